"""Arrays that do not fit together are refused by every op and backend: kernels would read past their ends."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from glm_dcp_jax.cache.records import IndexKeyFormat, RecordFormat
from glm_dcp_jax.kernels.dispatch import dispatch
from glm_dcp_jax.kernels.index_keys import gather_index_keys, write_index_keys
from glm_dcp_jax.kernels.index_scores import paged_index_scores
from glm_dcp_jax.kernels.records import gather_pages, pack_records, unpack_records, write_records
from glm_dcp_jax.kernels.sparse_attention import sparse_attention
from glm_dcp_jax.kernels.topk import select_mask, select_positions

RECORD, PLAIN = RecordFormat.sized("nvfp4_ds_mla", 32, 8, 8), RecordFormat.sized("float32", 32, 8, 8)
KEYS, BLOCK, PAGE = IndexKeyFormat("e4m3", 8), 4, 8
PLAIN_KEYS = IndexKeyFormat("float32", 8)


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def ints(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


def stored(record: RecordFormat, *shape: int) -> np.ndarray:
    return np.zeros((*shape, record.width), record.dtype)


class Op(NamedTuple):
    """An op with arguments that fit."""

    op: Callable[..., Any]
    fitting: dict[str, Any]
    has_backends: bool = True


OPS = {
    "gather_pages": Op(
        gather_pages, {"pool": stored(RECORD, 3, 12), "layer": 1, "pages": ints(2, 2), "page_size": 4}, False
    ),
    "pack": Op(pack_records, {"pool": stored(RECORD, 3, 12), "planes": ints(2), "slots": ints(5)}),
    "unpack": Op(
        unpack_records,
        {"pool": stored(PLAIN, 3, 12), "planes": ints(2), "slots": ints(5), "packed": floats(2, 5, 40)},
    ),
    "write": Op(
        partial(write_records, record=RECORD),
        {
            "pool": stored(RECORD, 3, 12),
            "planes": ints(2),
            "slots": ints(5),
            "latent": floats(2, 5, 32),
            "rope_key": floats(2, 5, 8),
            "outer_scales": floats(2),
        },
    ),
    "attention": Op(
        partial(sparse_attention, record=RECORD, scale=1.0),
        {
            "q": floats(3, 2, 40),
            "pool": stored(RECORD, 3, 12),
            "plane": 1,
            "slots": ints(3, 5),
            "outer_scale": np.float32(1),
            "current": stored(RECORD, 3, 2),
            "current_valid": np.ones((3, 2), bool),
        },
    ),
    "write keys": Op(
        partial(write_index_keys, index=KEYS),
        {
            "pool": np.zeros(KEYS.pool_shape(2, 24, BLOCK), np.uint8),
            "layer": 1,
            "slots": ints(5),
            "keys": floats(5, 8),
            "block_size": BLOCK,
        },
    ),
    "write plain keys": Op(
        partial(write_index_keys, index=PLAIN_KEYS),
        {"pool": floats(2, 24, 8), "layer": 1, "slots": ints(5), "keys": floats(5, 8), "block_size": BLOCK},
    ),
    "gather keys": Op(
        partial(gather_index_keys, index=KEYS, dtype=jnp.float32),
        {
            "pool": np.zeros(KEYS.pool_shape(2, 24, BLOCK), np.uint8),
            "layer": 1,
            "pages": ints(2, 2),
            "page_tokens": PAGE,
            "block_size": BLOCK,
        },
        False,
    ),
    "scores": Op(
        partial(paged_index_scores, index=KEYS),
        {
            "q": floats(2, 3, 4, 8),
            "head_weights": floats(2, 3, 4),
            "pool": np.zeros(KEYS.pool_shape(2, 24, BLOCK), np.uint8),
            "layer": 1,
            "page_table": ints(2, 2),
            "visible": ints(2, 3),
            "page_tokens": PAGE,
            "block_size": BLOCK,
        },
    ),
    "top-k": Op(select_positions, {"scores": floats(3, 9), "visible": ints(3), "k": 2}),
    "top-k mask": Op(select_mask, {"scores": floats(3, 9), "visible": ints(3), "k": 2}, False),
}

POOL_OF_BYTES, POOL_OF_WIDTH = (
    "pool is float32, but must be uint8",
    r"pool is \[3, 12, {}\], but must be .*width = 50",
)
UNFITTING: dict[str, list[tuple[str, Any, str]]] = {
    "gather_pages": [
        ("pages", ints(4), r"pages is \[4\], but must be \[N, P\]"),
        ("pages", floats(2, 2), "pages is float32, but must be int32"),
        ("layer", ints(1), r"layer is \[1\], but must be \[\]"),
        ("page_size", 5, "has 12 slots, which are not one or more pages of 5"),
        ("page_size", 0, "not one or more pages of 0"),
        ("pool", stored(RECORD, 3, 0), "has 0 slots"),
    ],
    "pack": [
        ("pool", stored(RECORD, 12), r"pool is \[12, 50\], but must be \[layers, slots, width\]"),
        ("planes", ints(2, 1), r"planes is \[2, 1\], but must be \[P\]"),
        ("slots", ints(1, 5), r"slots is \[1, 5\], but must be \[N\]"),
        ("slots", floats(5), "slots is float32, but must be int32"),
        ("planes", np.ones(2, bool), "planes is bool, but must be int32"),
    ],
    "unpack": [
        (
            "packed",
            floats(2, 5, 39),
            r"packed is \[2, 5, 39\], but must be .*P = 2 \(planes\), N = 5 .*width = 40",
        ),
        ("packed", floats(2, 4, 40), r"packed is \[2, 4, 40\], .*N = 5 \(slots\)"),
        ("packed", floats(3, 5, 40), r"packed is \[3, 5, 40\], .*P = 2 \(planes\)"),
        ("packed", floats(5, 40), r"packed is \[5, 40\], but must be \[P, N, width\]"),
        (
            "packed",
            floats(2, 5, 40).astype(jnp.bfloat16),
            r"packed is bfloat16, but must be float32 \(as the pool",
        ),
    ],
    "write": [
        (
            "latent",
            floats(2, 5, 31),
            r"latent is \[2, 5, 31\], but must be .*C = 32 \(nvfp4_ds_mla of 32 \+ 8\)",
        ),
        ("rope_key", floats(2, 5, 9), r"rope_key is \[2, 5, 9\], .*R = 8"),
        ("slots", ints(6), r"latent is \[2, 5, 32\], .*N = 6 \(slots\)"),
        ("rope_key", floats(2, 4, 8), r"rope_key is \[2, 4, 8\], .*N = 5 \(slots\)"),
        ("planes", ints(3), r"latent is \[2, 5, 32\], .*P = 3 \(planes\)"),
        ("rope_key", floats(1, 5, 8), r"rope_key is \[1, 5, 8\], .*P = 2"),
        ("latent", floats(2, 5, 32).astype(np.int32), "latent is int32, but must be float32, bfloat16"),
        ("outer_scales", floats(3), r"outer_scales is \[3\], but must be \[P\] with P = 2 \(planes\)"),
        ("outer_scales", floats(), r"outer_scales is \[\], but must be \[P\]"),
        ("pool", np.zeros((3, 12, 49), np.uint8), POOL_OF_WIDTH.format(49)),
        ("pool", floats(3, 12, 50), POOL_OF_BYTES),
    ],
    "attention": [
        ("q", floats(3, 2, 39), r"q is \[3, 2, 39\], but must be .*CR = 40 \(nvfp4_ds_mla of 32 \+ 8\)"),
        ("q", floats(3, 2, 40).astype(np.int32), "q is int32, but must be float32, bfloat16 or float16"),
        ("pool", np.zeros((3, 12, 51), np.uint8), POOL_OF_WIDTH.format(51)),
        ("pool", floats(3, 12, 50), POOL_OF_BYTES),
        ("pool", stored(RECORD, 3, 0), "the pool has no slots"),
        ("plane", ints(1), r"plane is \[1\], but must be \[\]"),
        ("slots", ints(2, 5), r"slots is \[2, 5\], but must be \[T, K\] with T = 3 \(q\)"),
        ("slots", ints(5), r"slots is \[5\]"),
        ("outer_scale", floats(3), r"outer_scale is \[3\]"),
        ("current", stored(RECORD, 2, 2), r"current is \[2, 2, 50\], .*T = 3 \(q\)"),
        ("current", np.zeros((3, 2, 49), np.uint8), r"current is \[3, 2, 49\], .*width = 50"),
        ("current", floats(3, 2, 50), r"current is float32, but must be uint8 \(nvfp4_ds_mla records"),
        ("current", stored(RECORD, 3, 1), r"current_valid is \[3, 2\], .*S = 1 \(current\)"),
        ("current_valid", np.ones((3, 1), bool), r"current_valid is \[3, 1\], .*S = 2 \(current\)"),
        ("current_valid", ints(3, 2), "current_valid is int32, but must be bool"),
        ("current", None, "pass both or neither"),
        ("current_valid", None, "pass both or neither"),
    ],
    "write keys": [
        ("keys", floats(5, 7), r"keys is \[5, 7\], but must be .*D = 8 \(e4m3 keys\)"),
        ("keys", floats(4, 8), r"keys is \[4, 8\], .*T = 5 \(slots\)"),
        ("slots", ints(5, 1), r"slots is \[5, 1\], but must be \[T\]"),
        ("layer", 1.0, "layer is float32, but must be int32"),
        ("block_size", 3, r"pool is \[2, 6, 48\], .*bytes = 36 \(3 keys of 8 codes and a scale\)"),
        ("block_size", 0, "no blocks of 0 keys"),
        ("pool", np.zeros((2, 6, 47), np.uint8), r"pool is \[2, 6, 47\]"),
        ("pool", floats(2, 6, 48), POOL_OF_BYTES),
    ],
    "write plain keys": [
        ("keys", floats(5, 9), r"keys is \[5, 9\], .*D = 8"),
        ("pool", floats(2, 24, 9), r"pool is \[2, 24, 9\], but must be \[full, slots, D\] with D = 8"),
        ("pool", floats(2, 24, 8).astype(jnp.bfloat16), "pool is bfloat16, but must be float32"),
    ],
    "gather keys": [
        ("pages", ints(2), r"pages is \[2\]"),
        ("page_tokens", 6, "a page of 6 tokens is not made of blocks of 4"),
        ("page_tokens", 16, "has 24 slots, which are not one or more pages of 16"),
        ("page_tokens", 0, "pages of 0"),
        ("pool", floats(2, 6, 48), POOL_OF_BYTES),
    ],
    "scores": [
        ("q", floats(2, 3, 4, 9), r"q is \[2, 3, 4, 9\], .*D = 8"),
        ("head_weights", floats(2, 3, 3), r"head_weights is \[2, 3, 3\], .*I = 4 \(q\)"),
        ("page_table", ints(1, 2), r"page_table is \[1, 2\], .*N = 2 \(q\)"),
        ("visible", ints(2, 2), r"visible is \[2, 2\], .*S = 3 \(q\)"),
        ("visible", floats(2, 3), "visible is float32, but must be int32"),
        ("pool", floats(2, 6, 48), POOL_OF_BYTES),
        ("pool", np.zeros((2, 6, 52), np.uint8), r"pool is \[2, 6, 52\]"),
        ("page_tokens", 10, "not made of blocks of 4"),
        ("page_tokens", 32, "not one or more pages of 32"),
    ],
    "top-k": [
        ("visible", ints(2), r"visible is \[2\], but must be \[T\] with T = 3 \(scores\)"),
        ("visible", floats(3), "visible is float32"),
        ("scores", floats(9), r"scores is \[9\], but must be \[T, L\]"),
        ("scores", floats(3, 9).astype(jnp.bfloat16), "scores is bfloat16, but must be float32"),
        ("k", -1, "-1 positions cannot be selected"),
    ],
}
UNFITTING["top-k mask"] = UNFITTING["top-k"]


def refusals() -> Iterator[Any]:
    for name, given in OPS.items():
        for backend in ("reference", "interpret", "auto") if given.has_backends else (None,):
            for number, unfitting in enumerate(UNFITTING[name]):
                yield pytest.param(name, backend, *unfitting, id=f"{name}-{backend}-{unfitting[0]}-{number}")


@pytest.mark.parametrize(("name", "backend", "argument", "unfitting", "complaint"), [*refusals()])
def test_what_does_not_fit_is_refused(name, backend, argument, unfitting, complaint):
    op, fitting, _ = OPS[name]
    options = {} if backend is None else {"backend": backend}
    with pytest.raises(ValueError, match=complaint):
        op(**{**fitting, argument: unfitting}, **options)


@pytest.mark.parametrize("name", OPS)
def test_what_fits_is_accepted(name):
    """Else the refusals above would say nothing."""
    op, fitting, has_backends = OPS[name]
    op(**fitting, **({"backend": "reference"} if has_backends else {}))


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_slots_of_any_integers_count_as_int32(backend):
    pool = np.arange(600, dtype=np.float32).reshape(1, 300, 2)
    for slots in (
        np.array([-1, 7], np.int8),
        np.array([2**32 - 1, 7], np.uint32),
        np.array([-1, 7], np.int64),
    ):
        packed = pack_records(pool, np.array([0], np.int8), slots, backend)
        assert packed.tolist() == [[[0, 0], [14, 15]]]


@pytest.mark.parametrize("word", ["Triton", "cuda", "", None])
def test_other_words_are_no_backends(word):
    with pytest.raises(ValueError, match="no backend .*; use one of auto, reference, triton, interpret"):
        dispatch(word, lambda: "reference", lambda interpret: "triton")
    with pytest.raises(ValueError, match="no backend"):
        select_positions(floats(3, 9), ints(3), 2, word)
