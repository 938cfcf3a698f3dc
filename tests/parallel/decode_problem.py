"""A share group's decode attention over a random cache: the problem, the paths' answers, and the right one."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.parallel.attention import AttentionLayer, AttentionPath, AttentionSettings, Queries
from glm_dcp_jax.parallel.batch import Block, Selection
from glm_dcp_jax.parallel.mesh import TENSOR_AXES

LATENT, ROPE, NOPE, VALUE = 32, 8, 12, 16
LAYERS = 5
GROUP = 3
FIRST = 1
SCALE = 0.3


class Case(NamedTuple):
    """What is fixed when a program is compiled. lengths: tokens of each request before the step; -1: a padded one."""

    world: int
    replicas: int = 1
    interleave: int = 1
    block_size: int = 4
    lengths: tuple[int, ...] = (37, 5)
    rows: int = 1
    topk: int = 8
    heads: int = 8
    record: str = "float32"
    transport: str = "direct"
    exchange_bytes: int = 2**20
    backend: str = "ag_rs"

    @property
    def layout(self) -> Layout:
        return Layout(self.block_size, self.world, self.interleave)

    @property
    def format(self) -> RecordFormat:
        return RecordFormat.sized(self.record, LATENT, ROPE, 8)

    @property
    def settings(self) -> AttentionSettings:
        return AttentionSettings(
            layout=self.layout,
            record=self.format,
            comm_backend=self.backend,
            scale=SCALE,
            latent_width=LATENT,
            index_topk=self.topk,
            transport=self.transport,
            exchange_bytes=self.exchange_bytes,
            kernels="reference",
        )


class Problem(NamedTuple):
    """block, and by request and row: positions [N, S, K]; the group's queries, current records and expansions.

    pool: [layers, W * slots, width], what each request holds at its positions; contents [layers, N, longest, width]
    has that in order, and the rest of the pool is anything.
    """

    block: Block
    positions: np.ndarray
    pool: np.ndarray
    nope: np.ndarray
    rope: np.ndarray
    current: np.ndarray
    key_expansion: np.ndarray
    value_expansion: np.ndarray
    contents: np.ndarray


Choose = Callable[[np.random.Generator, int, int, int], np.ndarray]
"""(rng, request, row, visible) -> distinct positions below visible, at most topk of them."""


def problem(case: Case, choose: Choose, seed: int = 0, lengths: tuple[int, ...] | None = None) -> Problem:
    """lengths: instead of the case's, as many, and no longer than its longest."""
    lengths = lengths or case.lengths
    rng = np.random.default_rng(seed)
    layout, requests = case.layout, len(lengths)
    pages_each = int(max(layout.pages_for(length + case.rows) for length in case.lengths))
    order = rng.permutation(np.arange(1, requests * pages_each + 1)).reshape(requests, pages_each)
    num_pages = requests * pages_each + 1
    slots = num_pages * case.block_size

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    longest = max(case.lengths)
    pool, contents, current = _records(
        case, random, (LAYERS, case.world, slots), (LAYERS, requests, longest), (GROUP, requests, case.rows)
    )
    if case.record == "float32":
        pool[:] = np.nan  # what no request holds must never be looked at
    for request, length in enumerate(lengths):
        for position in range(length):
            page = order[request, layout.page_index(position)]
            pool[:, layout.owner(position), layout.slot(position, int(page))] = contents[:, request, position]
    positions = np.full((requests, case.rows), -1, np.int32)
    chosen = np.full((requests, case.rows, case.topk), -1, np.int32)
    for request, length in enumerate(lengths):
        # The last request has one row less than the block where it can: rows behind are padding.
        count = 0 if length < 0 else case.rows - (request == requests - 1 and case.rows > 1)
        for row in range(count):
            positions[request, row] = length + row
            picked = choose(rng, request, row, length + row + 1)
            chosen[request, row, : len(picked)] = picked
    block = Block(np.zeros_like(positions), positions, order.astype(np.int32))
    return Problem(
        block,
        chosen,
        pool.reshape(LAYERS, case.world * slots, -1),
        random(GROUP, requests, case.rows, case.heads, NOPE),
        random(GROUP, requests, case.rows, case.heads, ROPE),
        current,
        random(GROUP, case.heads, NOPE, LATENT),
        random(GROUP, case.heads, VALUE, LATENT),
        contents,
    )


def _records(case: Case, random: Callable[..., np.ndarray], *shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Random encoded records of these shapes, encoded together."""
    counts = [int(np.prod(shape)) for shape in shapes]
    total = sum(counts)
    encoded = np.array(
        case.format.encode(jnp.asarray(random(total, LATENT)), jnp.asarray(random(total, ROPE)))
    )
    parts = np.split(encoded, np.cumsum(counts)[:-1])
    return [part.reshape(*shape, -1) for part, shape in zip(parts, shapes, strict=True)]


def program(case: Case, path_of: Callable[[AttentionSettings], AttentionPath]) -> Callable[..., jax.Array]:
    """The group's attention on the case's mesh, jitted."""
    path = path_of(case.settings)
    devices = jax.devices()[: case.world * case.replicas]
    mesh = Mesh(np.array(devices).reshape(case.replicas, case.world), TENSOR_AXES)

    def group(block, positions, pool, nope, rope, current, key_expansion, value_expansion):
        plan = path.plan(Selection(positions, None), block)
        flight = path.start(plan, pool, FIRST + jnp.arange(GROUP))
        outs = []
        for member in range(GROUP):
            expansions = key_expansion[member], value_expansion[member]
            layer = AttentionLayer(FIRST + member, FIRST + member, member, *expansions)
            queries = Queries(nope[member], rope[member])
            out = path.attend(plan, flight, layer, queries, current[member])
            for kind in ("attention", "ffn"):
                out, flight = path.window(flight, layer, kind, out)
            outs.append(out)
        return jnp.stack(outs)

    heads = P(None, None, None, TENSOR_AXES)
    expansion = P(None, TENSOR_AXES)
    specs = (P(), P(), P(None, "dcp"), heads, heads, P(), expansion, expansion)
    return jax.jit(jax.shard_map(group, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False))


def expected(case: Case, given: Problem) -> np.ndarray:
    """The same in float64, from what each request holds; rows without keys are 0."""
    requests, rows = given.block.positions.shape
    out = np.zeros((*given.nope.shape[:-1], VALUE))
    group = given.contents[FIRST : FIRST + GROUP]
    held = np.concatenate([_decoded(case, group), _decoded(case, given.current)], axis=2)
    for member, request, row in np.ndindex(GROUP, requests, rows):
        start = max(given.block.positions[request, 0], 0)
        chosen = given.positions[request, row]
        chosen = chosen[chosen >= 0]
        if not len(chosen):
            continue
        # Current rows lie behind the longest history.
        places = np.where(chosen < start, chosen, group.shape[2] + chosen - start)
        records = held[member, request, places]
        nope, rope = (part[member, request, row].astype(np.float64) for part in (given.nope, given.rope))
        keys = np.einsum("hnc,kc->hkn", given.key_expansion[member], records[:, :LATENT])
        scores = np.einsum("hn,hkn->hk", nope, keys) + rope @ records[:, LATENT:].T
        weights = np.exp(SCALE * (scores - scores.max(axis=1, keepdims=True)))
        weights /= weights.sum(axis=1, keepdims=True)
        values = np.einsum("hvc,kc->hkv", given.value_expansion[member], records[:, :LATENT])
        out[member, request, row] = np.einsum("hk,hkv->hv", weights, values)
    return out


def _decoded(case: Case, records: np.ndarray) -> np.ndarray:
    return np.asarray(case.format.decode(jnp.asarray(records), jnp.float32), np.float64)
