"""How far results are apart, as figures that are 0 where they agree. NaN, which no limit allows, if a result is NaN."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from glm_dcp_jax.cache import codecs
from glm_dcp_jax.cache.records import Field, IndexKeyFormat, RecordFormat

CODE_LIMITS = {"code steps": 1, "share of codes off": 1e-4, "scale ulps": 1, "other bytes": 0}
"""A quotient that is off by an ulp can move a code that lies between two others, and the scale itself."""


def unequal(a: Array, b: Array) -> Float[Array, ""]:
    """Elements whose bits differ."""
    return jnp.sum(_bits(a) != _bits(b), dtype=jnp.float32)


def relative(a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, ""]:
    """The largest difference, as a share of the largest magnitude in b."""
    return jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))


def scores_apart(a: Float[Array, "*rows L"], b: Float[Array, "*rows L"]) -> dict[str, Array]:
    """Of scores, -inf where hidden: the largest difference as a share of the row's largest magnitude in b."""
    hidden = jnp.isneginf(b)
    shown = jnp.where(hidden, 0.0, b)
    largest = jnp.maximum(jnp.max(jnp.abs(shown), axis=-1, keepdims=True), codecs.SMALLEST_NORMAL)
    apart = jnp.where(hidden, 0.0, jnp.abs(a - b)) / largest
    return {"score": jnp.max(apart), "hidden": jnp.sum(hidden != jnp.isneginf(a), dtype=jnp.float32)}


def selections_apart(
    a: Int[Array, "*rows k"], b: Int[Array, "*rows k"], scores: Float[Array, "*rows L"]
) -> dict[str, Array]:
    """Of two selections by nearly equal scores. scores: of the second.

    swap: of what only one of them chose, the largest distance from the lowest score that the second chose, as a share
    of the row's largest magnitude. count: rows that chose different numbers of positions, or one twice.
    """
    chosen_a, chosen_b = _as_mask(a, scores.shape[-1]), _as_mask(b, scores.shape[-1])
    lowest = jnp.min(jnp.where(chosen_b, scores, jnp.inf), axis=-1, keepdims=True)
    largest = jnp.max(jnp.where(jnp.isinf(scores), 0.0, jnp.abs(scores)), axis=-1, keepdims=True)
    swap = jnp.where(chosen_a != chosen_b, jnp.abs(scores - lowest) / largest, 0.0)
    counts = [jnp.sum(chosen_a, -1), jnp.sum(a >= 0, -1), jnp.sum(chosen_b, -1)]
    wrong = (counts[0] != counts[2]) | (counts[1] != counts[2])
    return {"swap": jnp.max(swap), "count": jnp.sum(wrong, dtype=jnp.float32)}


def records_apart(a: Array, b: Array, record: RecordFormat) -> dict[str, Array]:
    """Of encoded records, field by field: those of CODE_LIMITS."""
    if not record.quantised:
        return _code_figures([], [], [unequal(a, b)])
    kinds: dict[str, list[Array]] = {"code": [], "scale": [], "other": []}
    for field in record.fields:
        steps = jnp.abs(_integers(a, field) - _integers(b, field)).ravel()
        kind = {"e2m1": "code", "e4m3": "code", "float32": "scale"}.get(field.kind, "other")
        kinds[kind].append(jnp.sum(steps != 0, dtype=jnp.float32) if kind == "other" else steps)
    return _code_figures(kinds["code"], kinds["scale"], kinds["other"])


def index_keys_apart(a: Array, b: Array, index: IndexKeyFormat, block_size: int) -> dict[str, Array]:
    """Of a pool's index keys: those of CODE_LIMITS."""
    if not index.quantised:
        return _code_figures([], [], [unequal(a, b)])
    codes, scales = ([], [])
    for pool in (a, b):
        keys, raw = jnp.split(pool, [block_size * index.width], axis=-1)
        codes.append(keys.astype(jnp.int32))
        scales.append(codecs.from_bytes(raw, jnp.int32))
    return _code_figures([jnp.abs(codes[0] - codes[1]).ravel()], [jnp.abs(scales[0] - scales[1]).ravel()], [])


def _code_figures(codes: list[Array], scales: list[Array], others: list[Array]) -> dict[str, Array]:
    """Figures of the steps that codes and scales differ by, and of how many other elements differ."""
    nothing = jnp.zeros(1, jnp.int32)
    steps, ulps = jnp.concatenate([nothing, *codes]), jnp.concatenate([nothing, *scales])
    figures = jnp.max(steps), jnp.mean(steps != 0), jnp.max(ulps), sum(others, jnp.float32(0))
    return dict(zip(CODE_LIMITS, figures, strict=True))


def _integers(records: UInt8[Array, "*rows width"], field: Field) -> Int[Array, "*rows n"]:
    """A field's elements as integers, neighbouring values one apart: steps of one sign."""
    raw = records[..., field.offset : field.offset + field.nbytes]
    if field.kind == "e2m1":
        return codecs.unpack_nibbles(raw).astype(jnp.int32)
    if field.kind in ("float32", "bfloat16"):
        size = jnp.dtype(field.kind).itemsize
        return codecs.from_bytes(raw, jnp.dtype(f"int{8 * size}")).astype(jnp.int32)
    return raw.astype(jnp.int32)


def _as_mask(positions: Int[Array, "*rows k"], columns: int) -> Bool[Array, "*rows L"]:
    flat = positions.reshape(-1, positions.shape[-1])
    row = jnp.arange(flat.shape[0])[:, None]
    mask = jnp.zeros((flat.shape[0], columns), bool)
    mask = mask.at[row, jnp.where(flat < 0, columns, flat)].set(True, mode="drop")
    return mask.reshape(*positions.shape[:-1], columns)


def _bits(values: Array) -> Array:
    if not jnp.issubdtype(values.dtype, jnp.floating):
        return values
    return jax.lax.bitcast_convert_type(values, jnp.dtype(f"uint{8 * values.dtype.itemsize}"))
