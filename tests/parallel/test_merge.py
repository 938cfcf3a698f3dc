"""Merging partial attention on 4 devices: both backends give what one device gives over all keys."""

from collections.abc import Callable

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from glm_dcp_jax.parallel.merge import gather_heads, merge_partials
from glm_dcp_jax.parallel.mesh import DCP, REPLICA, TENSOR_AXES

WORLD, ROWS, HEADS, KEYS, WIDTH = 4, 5, 8, 6, 3
BACKENDS = ["ag_rs", "a2a"]

Merge = Callable[[np.ndarray, np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def merges(devices) -> dict[str, Merge]:
    """For each backend, [W, T, WH, C] outputs and [W, T, WH] LSEs of all ranks -> [T, WH, C], rank after rank."""
    mesh = Mesh(np.array(devices(WORLD)).reshape(1, WORLD), TENSOR_AXES)

    def of(backend: str) -> Merge:
        inside = jax.shard_map(
            lambda out, lse: merge_partials(out[0], lse[0], backend),
            mesh=mesh,
            in_specs=P(DCP),
            out_specs=P(None, DCP),
            check_vma=False,
        )
        compiled = jax.jit(inside)
        return lambda out, lse: np.asarray(compiled(out.astype(np.float32), lse.astype(np.float32)))

    return {backend: of(backend) for backend in BACKENDS}


def softmax_attention(
    scores: np.ndarray, values: np.ndarray, seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [T, H, C] and LSE [T, H] in float64 of scores [T, H, K] over values [K, C], where seen [T, K]."""
    out, lse = np.zeros((*scores.shape[:2], values.shape[1])), np.full(scores.shape[:2], -np.inf)
    for row, columns in enumerate(seen):
        if columns.any():
            own = scores[row][:, columns]
            top = own.max(axis=1, keepdims=True)
            weights = np.exp(own - top)
            total = weights.sum(axis=1, keepdims=True)
            out[row], lse[row] = weights / total @ values[columns], (top + np.log(total))[:, 0]
    return out, lse


class Shards:
    """Random scores over W * KEYS keys, KEYS on each rank; `seen` [T, W * KEYS] says which count."""

    def __init__(self, seed: int, seen: np.ndarray, spread: float = 1.0) -> None:
        rng = np.random.default_rng(seed)
        scores = spread * rng.standard_normal((ROWS, HEADS, WORLD * KEYS))
        values = rng.standard_normal((WORLD * KEYS, WIDTH))
        self.whole, _ = softmax_attention(scores, values, seen)
        own = [slice(rank * KEYS, (rank + 1) * KEYS) for rank in range(WORLD)]
        parts = [softmax_attention(scores[:, :, keys], values[keys], seen[:, keys]) for keys in own]
        self.out, self.lse = np.stack([out for out, _ in parts]), np.stack([lse for _, lse in parts])


# Whether a rank's shard holds keys of a row at all, and of those present, which keys.
shards_present = st.lists(
    st.lists(st.booleans(), min_size=WORLD, max_size=WORLD), min_size=ROWS, max_size=ROWS
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1), shards_present, st.sampled_from([1.0, 30.0]))
def test_both_backends_give_the_softmax_over_all_keys(
    merges: dict[str, Merge], seed: int, present: list[list[bool]], spread: float
) -> None:
    keys = np.random.default_rng([seed, 1]).random((ROWS, WORLD * KEYS)) < 0.7
    shards = Shards(seed, keys & np.repeat(present, KEYS, axis=1), spread)
    for backend, merge in merges.items():
        merged = merge(shards.out, shards.lse)
        np.testing.assert_allclose(merged, shards.whole, rtol=1e-5, atol=1e-5, err_msg=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_no_rank_has_a_key_for_becomes_zero(merges: dict[str, Merge], backend: str) -> None:
    """A padded row: -inf on every rank, and -inf - -inf must not make NaN of it."""
    seen = np.ones((ROWS, WORLD * KEYS), bool)
    seen[2] = False
    shards = Shards(1, seen)
    assert (shards.lse[:, 2] == -np.inf).all()
    merged = merges[backend](shards.out, shards.lse)
    assert (merged[2] == 0).all()
    np.testing.assert_allclose(merged, shards.whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("owner", range(WORLD))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_one_token_prompt_lives_on_one_rank(merges: dict[str, Merge], backend: str, owner: int) -> None:
    """Every other rank is empty; the merge is then the owner's output as it is."""
    seen = np.zeros((ROWS, WORLD * KEYS), bool)
    seen[:, owner * KEYS] = True
    shards = Shards(2, seen)
    np.testing.assert_array_equal(
        merges[backend](shards.out, shards.lse), shards.out[owner].astype(np.float32)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_far_beyond_the_exponential_stay_finite(merges: dict[str, Merge], backend: str) -> None:
    shards = Shards(3, np.ones((ROWS, WORLD * KEYS), bool), spread=3000.0)
    assert np.abs(shards.lse).max() > 1000  # exp() of it overflows float32
    np.testing.assert_allclose(merges[backend](shards.out, shards.lse), shards.whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_replicas_merge_within_their_own_group(devices, backend: str) -> None:
    """On a (2, 2) mesh the two replicas hold different heads and must not mix."""
    mesh = Mesh(np.array(devices(4)).reshape(2, 2), TENSOR_AXES)
    rng = np.random.default_rng(4)
    out = rng.standard_normal((2, 2, ROWS, HEADS, WIDTH)).astype(np.float32)
    lse = rng.standard_normal((2, 2, ROWS, HEADS)).astype(np.float32)
    inside = jax.shard_map(
        lambda out, lse: merge_partials(out[0, 0], lse[0, 0], backend)[None],
        mesh=mesh,
        in_specs=P(REPLICA, DCP),
        out_specs=P(REPLICA, None, DCP),
        check_vma=False,
    )
    merged = np.asarray(jax.jit(inside)(out, lse))
    for replica in range(2):
        weights = np.exp(lse[replica])
        expected = (out[replica] * weights[..., None]).sum(axis=0) / weights.sum(axis=0)[..., None]
        np.testing.assert_allclose(merged[replica], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "close"), [("bfloat16", 0.02), ("float16", 0.002)])
def test_a2a_sends_parts_in_a_narrower_type_and_their_lses_in_full(devices, dtype: str, close: float) -> None:
    """An LSE rounded to 8 bits would be off by more than any output is."""
    mesh = Mesh(np.array(devices(WORLD)).reshape(1, WORLD), TENSOR_AXES)
    seen = np.ones((ROWS, WORLD * KEYS), bool)
    shards = Shards(5, seen, spread=30.0)
    merged = jax.jit(
        jax.shard_map(
            lambda out, lse: merge_partials(out[0], lse[0], "a2a", dtype),
            mesh=mesh,
            in_specs=P(DCP),
            out_specs=P(None, DCP),
            check_vma=False,
        )
    )(np.float32(shards.out), np.float32(shards.lse + 1000.25))
    assert merged.dtype == np.float32
    np.testing.assert_allclose(merged, shards.whole, rtol=0, atol=close)


def test_gathered_heads_come_rank_after_rank_to_every_rank(devices) -> None:
    mesh = Mesh(np.array(devices(WORLD)).reshape(1, WORLD), TENSOR_AXES)
    q = np.arange(ROWS * HEADS * WIDTH, dtype=np.float32).reshape(ROWS, HEADS, WIDTH)
    inside = jax.shard_map(
        lambda part: gather_heads(part)[None],
        mesh=mesh,
        in_specs=P(None, DCP),
        out_specs=P(DCP),
        check_vma=False,
    )
    for everyone in np.asarray(jax.jit(inside)(q)):
        np.testing.assert_array_equal(everyone, q)
