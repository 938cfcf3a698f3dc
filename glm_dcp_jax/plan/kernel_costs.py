"""What our own kernels move in a compiled step: their declared costs, at the shapes of the program's text.

A kernel's operands in HLO are whole pools, of which it touches little; each op declares what it moves as a function of
its shapes (kernels/*/cost.py), and this reads those shapes from the custom call.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.index_keys import cost as index_keys
from glm_dcp_jax.kernels.index_scores import cost as index_scores
from glm_dcp_jax.kernels.records import cost as records
from glm_dcp_jax.kernels.sparse_attention import cost as sparse_attention
from glm_dcp_jax.kernels.sparse_attention.tiling import SHARED_MEMORY
from glm_dcp_jax.plan.schedule import ArrayShape, Instruction

_KERNEL = re.compile(r'\bname = "([\w.]+)"')
_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32, "f16": jnp.float16}


@dataclass(frozen=True)
class Workload:
    """What the shapes of a step leave open.

    visible: tokens that each request has, all of which are scored. listed: the share of its list of slots that a kernel
    finds filled: 1 where the records were exchanged, 1 / W where each rank attends over those it owns. shared_memory:
    as the engine's settings have it, since it decides how attention is cut up.
    """

    record: RecordFormat
    visible: int
    listed: float = 1.0
    shared_memory: int = SHARED_MEMORY


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
    """Operands q, pool, plane, slots, then an outer scale, then current records and which of them are valid.

    The declared cost is that of the kernel and of `combine`, which merges its partials.
    """
    q, _, _, slots, *more = operands
    rows, heads, _ = q.sizes
    listed = math.ceil(workload.listed * slots.sizes[1])
    return sparse_attention.cost(
        rows,
        heads,
        listed,
        workload.record,
        _DTYPES[q.dtype],
        current=more[-1].sizes[1] if len(more) >= 2 else 0,
        outer_scale=len(more) % 2 == 1,
        shared_memory=workload.shared_memory,
    )


def _combine(operands: Sequence[ArrayShape], results: Sequence[ArrayShape], workload: Workload) -> Cost:
    """Part of what `sparse_attention` declares."""
    return Cost(0, 0)


def _index_scores(operands: Sequence[ArrayShape], results: Sequence[ArrayShape], workload: Workload) -> Cost:
    """Operands q, head weights, pool, layer, page table, visible; results: the scores."""
    requests, rows, heads, _ = operands[0].sizes
    context = results[0].sizes[-1]
    itemsize = jnp.dtype(_DTYPES[operands[0].dtype]).itemsize
    visible, index = min(workload.visible, context), workload.record.index
    return index_scores.cost(requests, rows, heads, context, visible, index, itemsize)


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


def _all_of_it(operands: Sequence[ArrayShape], results: Sequence[ArrayShape], workload: Workload) -> Cost:
    """Kernels of top-k read all their operands; `topk.cost` adds them up."""
    return Cost(sum(array.nbytes for array in operands), sum(array.nbytes for array in results))


_COSTS = {
    "sparse_attention": _sparse_attention,
    "combine": _combine,
    "index_scores": _index_scores,
    "pack_records": _pack,
    "unpack_records": _pack,
    "write_records": _write_records,
    "write_index_keys": _write_index_keys,
    "topk_count": _all_of_it,
    "topk_gather": _all_of_it,
}
