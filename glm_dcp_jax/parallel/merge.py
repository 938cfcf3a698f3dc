"""Merging attention outputs that each rank computed over its own part of the keys."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Shaped

from glm_dcp_jax.cache.codecs import from_bytes, to_bytes
from glm_dcp_jax.parallel.mesh import DCP


def gather_heads(q: Float[Array, "T H D"]) -> Float[Array, "T WH D"]:
    """Every DCP rank's heads, rank after rank."""
    with jax.named_scope("query_gather"):
        return jax.lax.all_gather(q, DCP, axis=1, tiled=True)


@jax.named_scope("merge")
def merge_partials(
    out: Float[Array, "T WH C"], lse: Float[Array, "T WH"], backend: str, dtype: DTypeLike = jnp.float32
) -> Float[Array, "T H C"]:
    """Combine partial outputs by their natural-log LSE; each rank keeps its own heads.

    A rank that saw no key brings out 0 and lse -inf and does not count; a row no rank has a key for becomes 0.
    backend `ag_rs`: LSEs are gathered, weighted outputs reduce-scattered. `a2a`: each rank receives every part of its
    own heads as `dtype`, LSEs among the columns, and adds them up. All sums are float32.
    """
    if backend == "ag_rs":
        weight = _weights(jax.lax.all_gather(lse, DCP))[jax.lax.axis_index(DCP)]
        return jax.lax.psum_scatter(out * weight[..., None], DCP, scatter_dimension=1, tiled=True)
    sent = jnp.concatenate([_as_words(out.astype(dtype)), _as_words(lse[..., None], dtype)], axis=-1)
    words = jax.lax.all_to_all(_split(sent), DCP, split_axis=0, concat_axis=0)
    columns = out.shape[-1]
    parts = jax.lax.bitcast_convert_type(words[..., :columns], dtype).astype(jnp.float32)
    parts_lse = from_bytes(to_bytes(words[..., columns:]), jnp.float32)[..., 0]
    return jnp.sum(parts * _weights(parts_lse)[..., None], axis=0)


def _as_words(values: Float[Array, "*rows n"], like: DTypeLike | None = None) -> Shaped[Array, "*rows words"]:
    """The bits of the last axis as unsigned integers of the size of `like`, which no compiler takes for numbers."""
    size = jnp.dtype(like or values.dtype).itemsize
    return from_bytes(to_bytes(values), jnp.dtype(f"uint{8 * size}"))


def _split(by_head: Float[Array, "T WH *rest"]) -> Float[Array, "W T H *rest"]:
    world = jax.lax.axis_size(DCP)
    rows, heads = by_head.shape[:2]
    return jnp.moveaxis(by_head.reshape(rows, world, heads // world, *by_head.shape[2:]), 1, 0)


def _weights(lse: Float[Array, "W T H"]) -> Float[Array, "W T H"]:
    """Each part's share of the whole softmax; all 0 where every part is empty."""
    top = jnp.max(lse, axis=0)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    exponentials = jnp.exp(lse - top)
    total = jnp.sum(exponentials, axis=0)
    return exponentials / jnp.where(total > 0, total, 1.0)


def merge_two(
    one: tuple[Float[Array, "T H C"], Float[Array, "T H"]],
    other: tuple[Float[Array, "T H C"], Float[Array, "T H"]],
) -> tuple[Float[Array, "T H C"], Float[Array, "T H"]]:
    """Outputs and natural-log LSEs over two disjoint sets of keys as those over both; a set may be empty."""
    lse = jnp.stack([one[1], other[1]])
    share = _weights(lse)[..., None]
    return one[0] * share[0] + other[0] * share[1], jax.nn.logsumexp(lse, axis=0)
