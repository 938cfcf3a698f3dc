"""What our own kernels move in a compiled step: their declared costs, at the shapes of the program's text.

A kernel's operands in HLO are whole pools, of which it touches little; each op declares what it moves as a function of
its shapes (kernels/*/cost.py), and this reads those shapes from the custom call.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import DTypeLike

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.experts import cost as routed_experts
from glm_dcp_jax.kernels.experts.tiling import tiling as experts_tiling
from glm_dcp_jax.kernels.index_keys import cost as index_keys
from glm_dcp_jax.kernels.index_scores import cost as index_scores
from glm_dcp_jax.kernels.linear import cost as linear
from glm_dcp_jax.kernels.records import cost as records
from glm_dcp_jax.kernels.sparse_attention import cost as sparse_attention
from glm_dcp_jax.kernels.sparse_attention.tiling import SHARED_MEMORY
from glm_dcp_jax.kernels.topk import cost as topk
from glm_dcp_jax.kernels.weight_tiles import Form
from glm_dcp_jax.plan.schedule import ArrayShape, Instruction

_KERNEL = re.compile(r'\bname = "([\w.]+)"')
_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32, "f16": jnp.float16}


@dataclass(frozen=True)
class Workload:
    """What the shapes of a step leave open.

    visible: tokens that each request has, all of which are scored. listed: the share of its list of slots that a kernel
    finds filled: 1 where the records were exchanged, 1 / W where each rank attends over those it owns. union: what of a
    list for all of a request's rows is filled, as rows select some records in common. shared_memory: as the engine's
    settings have it, since it decides how attention is cut up.

    experts: of a layer, on all ranks together. each: that a row chooses. expert_ranks: that experts are split over.
    used_experts: that a step's rows choose of one rank's; None: as many as are expected of rows that choose at random.
    """

    record: RecordFormat
    visible: int
    listed: float = 1.0
    union: float = 1.0
    shared_memory: int = SHARED_MEMORY
    experts: int = 256
    each: int = 8
    expert_ranks: int = 1
    used_experts: float | None = None

    def used(self, rows: int) -> float:
        """Experts that a rank reads in a layer."""
        if self.used_experts is not None:
            return self.used_experts
        return routed_experts.expected_experts(rows, self.experts, self.each) / self.expert_ranks


def kernel_name(instruction: Instruction) -> str | None:
    """The name of a Pallas kernel; None for any other instruction."""
    if "triton" not in instruction.attributes:
        return None
    found = _KERNEL.search(instruction.attributes)
    return found[1] if found else None


def declared_cost(
    kernel: str, operands: Sequence[ArrayShape], results: Sequence[ArrayShape], workload: Workload
) -> Cost | None:
    """What one run of a kernel moves and multiplies; None for kernels that declare nothing.

    operands, results: arrays of the custom call, in its order.
    """
    if kernel not in _COSTS:
        return None
    return _COSTS[kernel](operands, results, workload)


def _sparse_attention(
    operands: Sequence[ArrayShape], results: Sequence[ArrayShape], workload: Workload
) -> Cost:
    """Operands q, pool, plane, slots, then who sees what, an outer scale, current records and which of them are valid.

    The declared cost is that of the kernel and of `combine`, which merges its partials.
    """
    q, _, _, slots, *more = operands
    rows, heads, _ = q.sizes
    shared = bool(more) and more[0].sizes == slots.sizes
    more = more[shared:]
    return sparse_attention.cost(
        rows,
        heads,
        slots.sizes[1],
        workload.record,
        _DTYPES[q.dtype],
        current=more[-1].sizes[1] if len(more) >= 2 else 0,
        outer_scale=len(more) % 2 == 1,
        shared_memory=workload.shared_memory,
        shared_lists=shared,
        listed=workload.listed * (workload.union if shared else 1),
    )


def _combine(operands: Sequence[ArrayShape], results: Sequence[ArrayShape], workload: Workload) -> Cost:
    """Part of what `sparse_attention` declares."""
    return Cost(0, 0)


def _index_scores(operands: Sequence[ArrayShape], results: Sequence[ArrayShape], workload: Workload) -> Cost:
    """Operands q, head weights, pool, layer, page table, visible; results: the scores, maxima if there are."""
    requests, rows, heads, _ = operands[0].sizes
    context = results[0].sizes[-1]
    itemsize = jnp.dtype(_DTYPES[operands[0].dtype]).itemsize
    visible, index = min(workload.visible, context), workload.record.index
    group = context // results[1].sizes[-1] if len(results) > 1 else 0
    return index_scores.cost(requests, rows, heads, context, visible, index, itemsize, group)


def _pack(operands: Sequence[ArrayShape], results: Sequence[ArrayShape], workload: Workload) -> Cost:
    """Operands planes, slots, and what is packed or unpacked."""
    planes, slots = operands[0].sizes[0], operands[1].sizes[0]
    return records.pack_cost(planes, slots, workload.record.record_bytes)


def _write_records(operands: Sequence[ArrayShape], results: Sequence[ArrayShape], workload: Workload) -> Cost:
    """Operands planes, slots, latents, roped keys, perhaps outer scales, pool."""
    planes, slots, latent = operands[:3]
    itemsize = jnp.dtype(_DTYPES[latent.dtype]).itemsize
    has_outer_scales = len(operands) > 5
    return records.write_cost(planes.sizes[0], slots.sizes[0], workload.record, itemsize, has_outer_scales)


def _write_index_keys(
    operands: Sequence[ArrayShape], results: Sequence[ArrayShape], workload: Workload
) -> Cost:
    """Operands layer, slots, keys, pool."""
    keys = operands[2]
    itemsize = jnp.dtype(_DTYPES[keys.dtype]).itemsize
    return index_keys.write_cost(keys.sizes[0], itemsize, workload.record.index)


def _form(stored: Sequence[ArrayShape], x: ArrayShape) -> Form:
    """How a weight is stored, from its operands: values; or codes in units, and scales; or these and outer scales."""
    codes, *scales = stored
    _, outputs, units = codes.sizes
    if not scales:
        dtype = jnp.promote_types(_DTYPES[x.dtype], _DTYPES[codes.dtype])
        return Form("plain", outputs, units, 1, (outputs, units), dtype)
    of_unit = (codes.nbytes // math.prod(codes.sizes)) * len(scales)
    inputs = units * of_unit
    if len(scales) == 2:
        return Form("nvfp4", outputs, inputs, of_unit, (outputs, inputs), _DTYPES[x.dtype])
    _, row_blocks, column_blocks = scales[0].sizes
    block = outputs // row_blocks, inputs // column_blocks
    return Form("fp8", outputs, inputs, of_unit, block, _DTYPES[x.dtype])


def _linear(
    operands: Sequence[ArrayShape], results: Sequence[ArrayShape], workload: Workload, matrices: int = 1
) -> Cost:
    """Operands x, group, and the weight; results: one for each program that shares an output's inputs."""
    x, _, *stored = operands
    of_x, of_result = (array.nbytes // math.prod(array.sizes) for array in (x, results[0]))
    return linear.cost(x.sizes[0], _form(stored, x), matrices, of_x, of_result, _plain_dtype(stored))


def _gated_linear(operands: Sequence[ArrayShape], results: Sequence[ArrayShape], workload: Workload) -> Cost:
    """As of `_linear`, with gate and up."""
    return _linear(operands, results, workload, matrices=2)


def _experts_gate_up(
    operands: Sequence[ArrayShape], results: Sequence[ArrayShape], workload: Workload
) -> Cost:
    """Operands the plan of tiles, each assignment's expert, group, x, and gate and up."""
    _, chosen, _, x, *stored = operands
    rows, form = x.sizes[0], _form(stored, x)
    each, itemsize = chosen.sizes[0] // rows, jnp.dtype(_DTYPES[x.dtype]).itemsize
    cut = experts_tiling(rows, each, workload.experts // workload.expert_ranks, form, form)
    used = workload.used(rows)
    return routed_experts.gate_up_cost(rows, each, form, cut, used, itemsize, _plain_dtype(stored))


def _experts_down(operands: Sequence[ArrayShape], results: Sequence[ArrayShape], workload: Workload) -> Cost:
    """Operands the plan, experts, group, turn, inner values, the router's weights, and down.

    results: one turn's outputs.
    """
    _, chosen, _, _, x, _, *stored = operands
    form, assignments = _form(stored, x), chosen.sizes[0]
    rows = assignments // workload.each
    cut = experts_tiling(rows, workload.each, workload.experts // workload.expert_ranks, form, form)
    form = form._replace(outputs=results[0].sizes[1])
    itemsize = jnp.dtype(_DTYPES[x.dtype]).itemsize
    used = workload.used(rows)
    return routed_experts.down_cost(assignments, form, cut, used, itemsize, _plain_dtype(stored))


def _plain_dtype(stored: Sequence[ArrayShape]) -> DTypeLike:
    """Of a weight that is not quantised."""
    return _DTYPES.get(stored[0].dtype, jnp.bfloat16)


def _topk_maxima(operands: Sequence[ArrayShape], results: Sequence[ArrayShape], workload: Workload) -> Cost:
    """Operands scores and how many are visible, or maxima alone; results: the maxima of groups of every size."""
    rows, columns = operands[0].sizes
    visible = min(workload.visible, columns) if operands[0].dtype == "f32" else None
    return topk.maxima_cost(rows, columns, visible, sum(level.sizes[1] for level in results))


def _topk_choose(operands: Sequence[ArrayShape], results: Sequence[ArrayShape], workload: Workload) -> Cost:
    """Operands scores and how many are visible, or maxima; then the groups chosen above, if any."""
    values, *more = operands
    rows, size = values.sizes
    scores = values.dtype == "f32"
    above = more[-1].sizes[1] if len(more) > scores else 0
    return topk.choose_cost(rows, size, results[0].sizes[1], above, scores=scores)


_COSTS = {
    "sparse_attention": _sparse_attention,
    "combine": _combine,
    "index_scores": _index_scores,
    "pack_records": _pack,
    "unpack_records": _pack,
    "write_records": _write_records,
    "write_index_keys": _write_index_keys,
    "linear": _linear,
    "gated_linear": _gated_linear,
    "experts_gate_up": _experts_gate_up,
    "experts_down": _experts_down,
    "topk_maxima": _topk_maxima,
    "topk_choose": _topk_choose,
}
