"""Merging partial attention outputs, and how attention cuts itself into parts."""

import jax.numpy as jnp
import numpy as np
import pytest

from glm_dcp_jax.kernels.combine import combine
from glm_dcp_jax.kernels.sparse_attention.tiling import SHARED_MEMORY, tiling

LARGE_SHARED_MEMORY = 227 * 1024


class TestCombine:
    """Merging partial outputs, each with its LSE."""

    def test_it_weighs_parts_by_their_lse(self) -> None:
        rng = np.random.default_rng(0)
        out = rng.standard_normal((2, 5, 3, 20)).astype(np.float32)
        lse = (10 * rng.standard_normal((2, 5, 3))).astype(np.float32)
        lse[0, 1:, 0] = lse[1, :, 2] = -np.inf
        out[np.isneginf(lse)] = np.nan
        merged, merged_lse = combine(out, lse, interpret=True)
        weights = np.exp(lse.astype(np.float64))
        total = weights.sum(axis=1)
        expected = (np.where(weights > 0, weights, 0)[..., None] * np.nan_to_num(out)).sum(axis=1)
        expected /= np.where(total > 0, total, 1)[..., None]
        np.testing.assert_allclose(merged, expected, rtol=1e-5, atol=1e-6)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(merged_lse, np.log(total), rtol=1e-5)
        assert not np.any(merged[1, 2])

    def test_one_part_is_the_result(self) -> None:
        out, lse = np.ones((2, 1, 3, 4), np.float32), np.zeros((2, 1, 3), np.float32)
        merged, merged_lse = combine(out, lse, interpret=True)
        assert merged.shape == (2, 3, 4) and merged_lse.shape == (2, 3)


class TestTiling:
    """How work is cut up at full size."""

    @pytest.mark.parametrize("heads", [8, 16, 64])
    @pytest.mark.parametrize("rows", [1, 4, 16, 32])
    @pytest.mark.parametrize("shared_memory", [SHARED_MEMORY, LARGE_SHARED_MEMORY])
    def test_a_gpu_is_filled_or_each_program_has_one_tile(self, rows, heads, shared_memory):
        cut = tiling(rows, heads, 2048, jnp.bfloat16, shared_memory)
        programs = rows * cut.head_blocks(heads) * cut.splits
        assert programs >= 128 or cut.splits * cut.records == 2048
        assert cut.splits == 1 or programs < 256

    def test_heads_share_a_program_where_there_is_room(self):
        assert tiling(16, 64, 2048, jnp.bfloat16).head_blocks(64) == 2
        assert tiling(16, 64, 2048, jnp.bfloat16, LARGE_SHARED_MEMORY).head_blocks(64) == 1
        assert tiling(1, 64, 2048, jnp.bfloat16, LARGE_SHARED_MEMORY).head_blocks(64) == 2
        assert not tiling(16, 16, 2048, jnp.bfloat16, LARGE_SHARED_MEMORY).wide

    def test_programs_of_a_shared_list_have_some_tiles_each(self):
        """Of 8,192 slots 3,584 are likely to be filled: 2 tiles each."""
        assert tiling(1, 32, 8192, jnp.bfloat16).splits == 128
        assert tiling(1, 32, 8192, jnp.bfloat16, shared_lists=True).splits == 64
        assert tiling(8, 32, 8192, jnp.bfloat16, shared_lists=True).splits == 16

    def test_a_short_list_is_one_tile(self):
        assert tiling(1, 64, 7, jnp.bfloat16).splits == 1
