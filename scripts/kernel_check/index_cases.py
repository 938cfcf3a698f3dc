"""Cases of the indexer's ops: writing index keys, scoring them, and selecting by the scores."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from glm_dcp_jax.cache.records import IndexKeyFormat
from kernel_check import ops
from kernel_check.case import BLOCK_SIZE, LARGEST_L2, Case, Resident, Sizes
from kernel_check.differences import CODE_LIMITS, index_keys_apart, scores_apart, selections_apart, unequal
from kernel_check.record_cases import distinct_slots, plane_groups, scattered

SCORE_LIMIT = 1e-5
"""Both sides add up float32, in different orders; as a share of the row's largest score."""
DRAFT_ROWS = 4
"""Most rows of one request in a decode step: a token and three drafts."""


def index_pool(index: IndexKeyFormat, sizes: Sizes) -> Resident:
    """The index keys of all Full layers, normally distributed."""

    def make(key: PRNGKeyArray) -> tuple[Array, ...]:
        def layer(key: PRNGKeyArray) -> Array:
            keys = jax.random.normal(key, (sizes.tokens, index.width)).astype(jnp.bfloat16)
            pool, slots = jnp.zeros(_layer_shape(index, sizes), index.dtype), jnp.arange(sizes.tokens)
            return ops.write_index_keys(pool, 0, slots, keys, index, BLOCK_SIZE, backend="reference")[0]

        return (jax.lax.map(layer, jax.random.split(key, sizes.full_layers)),)

    return Resident(f"index keys: {index.kind}", make)


def index_cases(sizes: Sizes) -> Iterator[Case]:
    """All of the indexer's ops, in every format."""
    for index in dict.fromkeys(record.index for record in sizes.records):
        for rows in (*sizes.rows, sizes.prefill):
            yield _write(index, rows, sizes)
        for rows in sizes.rows:
            yield _score(index, rows, sizes, select=False)
        for rows in sizes.rows:
            yield _score(index, rows, sizes, select=True)
    for rows in sizes.rows:
        yield _select(rows, sizes)


def _layer_shape(index: IndexKeyFormat, sizes: Sizes) -> tuple[int, ...]:
    return index.pool_shape(1, sizes.tokens, BLOCK_SIZE)


def _layers(sizes: Sizes) -> tuple[int, Callable[..., tuple[Array, Array]]]:
    """As `plane_groups`, one layer at a time."""
    calls, groups = plane_groups(sizes.full_layers, 1, sizes)

    def place(resident: tuple[Array, ...], number: int) -> tuple[Array, Array]:
        pool, layers = groups(resident, number)
        return pool, layers[0]

    return calls, place


def _write(index: IndexKeyFormat, rows: int, sizes: Sizes) -> Case:
    calls, place = _layers(sizes)

    def run(place: Any, keys: Array, slots: Array, backend: Any) -> Array:
        return ops.write_index_keys(*place, slots, keys, index, BLOCK_SIZE, backend=backend)

    def expected(keys: Array, slots: Array) -> Array:
        pool = jnp.zeros(_layer_shape(index, sizes), index.dtype)
        return run((pool, 0), keys, slots, "reference")[0]

    def differences(
        resident: Any, keys: Array, slots: Array, expected: Array, backend: Any
    ) -> dict[str, Array]:
        pool, layer = place(resident, 0)
        # The layer starts as zeros, as the expected one did: what is not written stays zero.
        after = run((pool.at[layer].set(0), layer), keys, slots, backend)
        apart = index_keys_apart(after[layer], expected, index, BLOCK_SIZE)
        apart["share of codes off"] *= sizes.tokens / rows  # of those that were written
        return apart | {"elsewhere": unequal(after.at[layer].set(pool[layer]), pool)}

    return Case(
        op="write_index_keys",
        shape=f"{index.kind}, {rows} rows",
        cost=ops.write_index_keys_cost(rows, jnp.dtype(jnp.bfloat16).itemsize, index),
        resident=index_pool(index, sizes),
        rotated_bytes=calls * sizes.tokens * index.key_bytes,
        calls=calls,
        place=place,
        fixed=lambda key: jax.random.normal(key, (rows, index.width)).astype(jnp.bfloat16),
        fresh=lambda key, awkward: distinct_slots(rows, sizes.tokens, key, awkward),
        run=run,
        differences=differences,
        limits=CODE_LIMITS | {"elsewhere": 0},
        in_place=True,
        expected=expected,
    )


def _score(index: IndexKeyFormat, rows: int, sizes: Sizes, select: bool) -> Case:
    """paged_index_scores, or select_paged: requests of up to DRAFT_ROWS rows share the pool's tokens."""
    calls, place = _layers(sizes)
    each = min(rows, DRAFT_ROWS)
    requests = rows // each
    pages = sizes.tokens // BLOCK_SIZE // requests
    context = pages * BLOCK_SIZE
    paging = (index, BLOCK_SIZE, BLOCK_SIZE)

    def fixed(key: PRNGKeyArray) -> tuple[Array, Array]:
        q = jax.random.normal(key, (requests, each, sizes.index_heads, index.width)).astype(jnp.bfloat16)
        return q, jax.random.normal(jax.random.fold_in(key, 1), q.shape[:3])

    def fresh(key: PRNGKeyArray, awkward: bool) -> tuple[Array, Array]:
        table = scattered(key, requests * pages, requests * pages).reshape(requests, pages)
        visible = jnp.full((requests, each), context, jnp.int32)
        return table, jax.random.randint(key, visible.shape, 1, context) if awkward else visible

    def score(place: Any, given: tuple[Array, Array], fresh: Any, backend: Any) -> Array:
        return ops.paged_index_scores(*given, *place, *fresh, *paging, backend=backend)

    def choose(place: Any, given: tuple[Array, Array], fresh: Any, backend: Any) -> Array:
        return ops.select_paged(
            *given, *place, *fresh, sizes.selected, *paging, as_mask=False, backend=backend
        )

    def differences(resident: Any, given: Any, fresh: Any, expected: Any, backend: Any) -> dict[str, Array]:
        inputs = place(resident, 0), given, fresh
        scores = score(*inputs, "reference")
        if not select:
            return scores_apart(score(*inputs, backend), scores)
        return selections_apart(choose(*inputs, backend), choose(*inputs, "reference"), scores)

    group = ops.maxima_group(context, sizes.selected) if select else 0
    cost = ops.index_scores_cost(requests, each, sizes.index_heads, context, context, index, 2, group)
    if select:
        chosen = ops.topk_cost(rows, context, context, sizes.selected, has_maxima=bool(group))
        cost = type(cost)(*(a + b for a, b in zip(cost, chosen, strict=True)))
    return Case(
        op="select_paged" if select else "paged_index_scores",
        shape=f"{index.kind}, {requests} x {each} rows, {context} tokens",
        cost=cost,
        resident=index_pool(index, sizes),
        rotated_bytes=calls * sizes.tokens * index.key_bytes,
        calls=calls,
        place=place,
        fixed=fixed,
        fresh=fresh,
        run=choose if select else score,
        differences=differences,
        limits={"swap": SCORE_LIMIT, "count": 0} if select else {"score": SCORE_LIMIT, "hidden": 0},
    )


def _select(rows: int, sizes: Sizes) -> Case:
    """select_positions on given scores, of which many are equal."""
    row_bytes = 4 * sizes.tokens
    calls = min(sizes.calls, max(2 * LARGEST_L2 // (rows * row_bytes), 1))

    def make(key: PRNGKeyArray) -> tuple[Array, ...]:
        values = jax.random.normal(key, (calls, rows, sizes.tokens)).astype(jnp.bfloat16)
        return tuple(jnp.where(values == 0, 0.0, values.astype(jnp.float32)))

    def fresh(key: PRNGKeyArray, awkward: bool) -> Array:
        visible = jnp.full(rows, sizes.tokens, jnp.int32)
        return jax.random.randint(key, visible.shape, 0, sizes.tokens) if awkward else visible

    def run(scores: Array, fixed: Any, visible: Array, backend: Any) -> Array:
        return ops.select_positions(scores, visible, sizes.selected, backend=backend)

    def differences(
        resident: Any, fixed: Any, visible: Array, expected: Any, backend: Any
    ) -> dict[str, Array]:
        results = [run(resident[0], fixed, visible, each) for each in (backend, "reference")]
        return {"unequal": unequal(*results)}

    return Case(
        op="select_positions",
        shape=f"{rows} rows, {sizes.tokens} columns",
        cost=ops.topk_cost(rows, sizes.tokens, sizes.tokens, sizes.selected),
        resident=Resident(f"scores of {rows} rows", make),
        rotated_bytes=calls * rows * row_bytes,
        calls=calls,
        place=lambda resident, number: resident[number],
        fixed=lambda key: (),
        fresh=fresh,
        run=run,
        differences=differences,
        limits={"unequal": 0},
    )
