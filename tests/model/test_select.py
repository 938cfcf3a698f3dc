"""Selections made in blocks that skip unseen columns are those made on whole rows, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_dcp_jax.kernels import seen_blocks
from glm_dcp_jax.model.indexer import select

REQUESTS, ROWS, HEADS, WIDTH, CONTEXT = 2, 8, 2, 4, 40


def selected(as_mask: bool) -> np.ndarray:
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((REQUESTS, ROWS, HEADS, WIDTH)).astype(np.float32)
    weights = rng.standard_normal((REQUESTS, ROWS, HEADS)).astype(np.float32)
    # Few distinct keys: many scores tie, and the lowest positions must win.
    keys = jnp.asarray(rng.integers(0, 3, (REQUESTS, CONTEXT, WIDTH)).astype(np.float32))
    starts = np.array([[3], [30]])
    visible = (starts + np.arange(1, ROWS + 1)).astype(np.int32)
    visible[1, -1] = 0  # a padded row

    def keys_of(pages: jax.Array) -> jax.Array:
        return keys[pages[0]]

    tables = np.arange(REQUESTS, dtype=np.int32)[:, None]
    choose = jax.jit(lambda q, w, t, v: select(q, w, keys_of, t, v, 6, as_mask, CONTEXT))
    return np.asarray(choose(queries, weights, tables, visible))


@pytest.mark.parametrize("as_mask", [True, False])
def test_prefixes_select_the_same(monkeypatch: pytest.MonkeyPatch, as_mask: bool) -> None:
    whole = selected(as_mask)
    assert whole.any()
    monkeypatch.setattr(seen_blocks, "_ROWS", 2)
    monkeypatch.setattr(seen_blocks, "_SHORT", 4)
    np.testing.assert_array_equal(selected(as_mask), whole)
