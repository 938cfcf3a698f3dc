"""Sizes that attention over a pool refuses, and those that it must take."""

from functools import partial

import jax
import numpy as np
import pytest
from ml_dtypes import bfloat16 as BFLOAT16

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels.sparse_attention import sparse_attention


def test_byte_pools_beyond_32_bit_offsets_are_refused_and_words_are_not() -> None:
    def shape(record: RecordFormat, slots: int) -> tuple:
        q = jax.ShapeDtypeStruct((1, 1, record.latent_width + record.rope_width), BFLOAT16)
        pool = jax.ShapeDtypeStruct((78, slots, record.width), np.uint8)
        run = partial(sparse_attention, record=record, scale=1.0, backend="interpret")
        return jax.eval_shape(run, q, pool, 0, jax.ShapeDtypeStruct((1, 8), np.int32))[0].shape

    assert shape(RecordFormat.sized("nvfp4_ds_mla", 512, 64, 128), 2**20) == (1, 1, 512)
    with pytest.raises(ValueError, match="below 2 GiB"):
        shape(RecordFormat.sized("nvfp4_ds_mla", 24, 3, 8), 2**20)


def test_more_rows_than_a_grid_takes_are_refused() -> None:
    record = RecordFormat.sized("bfloat16", 16, 4, 8)
    shapes = [((65_536, 1, 20), BFLOAT16), ((1, 64, 20), BFLOAT16), ((65_536, 8), np.int32)]
    q, pool, slots = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    run = partial(sparse_attention, record=record, scale=1.0, backend="triton")
    with pytest.raises(ValueError, match="65536 rows are more than a GPU's grid takes; .* at most 65535"):
        jax.eval_shape(run, q, pool, 0, slots)
