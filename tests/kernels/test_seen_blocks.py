"""Blocks that skip unseen columns: the same values, from prefixes no longer than needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_dcp_jax.kernels import seen_blocks
from glm_dcp_jax.kernels.seen_blocks import map_seen_blocks


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 rows already at more than 6 rows and columns."""
    monkeypatch.setattr(seen_blocks, "_ROWS", 4)
    monkeypatch.setattr(seen_blocks, "_SHORT", 6)


def run(seen: np.ndarray, columns: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """(the prefixes that ran, sums over each row's seen columns, the same in numpy)."""
    rows = np.random.default_rng(0).standard_normal((len(seen), columns)).astype(np.float32)
    ran = []

    def compute(n: int, row: jax.Array, row_seen: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: ran.append(n))
        return jnp.sum(jnp.where(jnp.arange(n) < row_seen[:, None], row[:, :n], 0), axis=1)

    found = jax.jit(lambda seen, rows: map_seen_blocks(compute, 1, columns, seen, rows, seen))(seen, rows)
    jax.effects_barrier()
    return ran, np.asarray(found), np.where(np.arange(columns) < seen[:, None], rows, 0).sum(1)


@pytest.mark.parametrize("columns", [7, 12, 13, 40])
@pytest.mark.usefixtures("small")
def test_a_causal_block_sees_the_shortest_prefix_that_holds_it(columns: int) -> None:
    seen = np.minimum(np.arange(1, 13), columns).astype(np.int32)
    ran, found, expected = run(seen, columns)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    sizes = [-(-columns * part // 4) for part in (1, 2, 3, 4)]
    needed = [max(seen[at : at + 4]) for at in (0, 4, 8)]
    assert sorted(ran) == sorted(min(size for size in sizes if size >= last) for last in needed)


@pytest.mark.parametrize("seen", [[0] * 8, [0, 0, 0, 0, 40, 0, 0, 0], [10, 10, 10, 10, 11, 0, 0, 0]])
@pytest.mark.usefixtures("small")
def test_rows_in_any_order_and_rows_that_see_nothing(seen: list[int]) -> None:
    _, found, expected = run(np.array(seen, np.int32), 40)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_short_work_is_one_block_of_all_columns() -> None:
    ran, found, expected = run(np.arange(8, dtype=np.int32), 40)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert ran == [40]


@pytest.mark.usefixtures("small")
def test_other_platforms_do_not_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, cpu: default(*args))
    ran, found, expected = run(np.arange(12, dtype=np.int32), 40)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert ran == [40]
