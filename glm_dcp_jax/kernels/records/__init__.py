"""Moving records between pools and steps: gather or pack at slots, unpack, quantise and write.

A pool is [layers, slots, width] of a record format's dtype. Slots are int32, and one below 0 or past the pool's end is
nothing: it is not written, and packs as zeros. Planes are layers' numbers in the pool and may be traced. Callers see to
it that planes exist, and that no writing op is told the same slot or plane twice. It writes into the pool it is given
when that is donated. Triton kernels copy no pool; they refuse those that `encode_tiles.as_units` refuses. All ops raise
ValueError for arrays that do not fit together.
"""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels.dispatch import Backend, dispatch
from glm_dcp_jax.kernels.fit import check_axes, check_dtype, check_floats, check_pages, int32, record_sizes
from glm_dcp_jax.kernels.records import reference, triton

__all__ = ["gather_pages", "pack_records", "unpack_records", "write_records"]

_POOL = "layers slots width"


def gather_pages(
    pool: Shaped[Array, "layers slots width"],
    layer: Int[Array, ""] | int,
    pages: Int[Array, "N P"],
    page_size: int,
) -> Shaped[Array, "N P*page_size width"]:
    """One layer's whole pages, `page_size` slots each, in page-table order; plain JAX on every platform.

    Pages are int32. A negative one reads page 0; others must exist.
    """
    layer, pages = int32("layer", layer), int32("pages", pages)
    check_axes({}, pool=(pool, _POOL), layer=(layer, ""), pages=(pages, "N P"))
    check_pages(pool.shape[1], page_size)
    return reference.gather_pages(jnp.asarray(pool), layer, pages, page_size)


def pack_records(
    pool: Shaped[Array, "layers slots width"],
    planes: Int[Array, " P"],
    slots: Int[Array, " N"],
    backend: Backend = "auto",
) -> Shaped[Array, "P N width"]:
    """The records of several layers at the same slots, in one contiguous buffer."""
    planes, slots = int32("planes", planes), int32("slots", slots)
    check_axes({}, pool=(pool, _POOL), planes=(planes, "P"), slots=(slots, "N"))
    return dispatch(backend, reference.pack_records, triton.pack_records, pool, planes, slots)


def unpack_records(
    pool: Shaped[Array, "layers slots width"],
    planes: Int[Array, " P"],
    slots: Int[Array, " N"],
    packed: Shaped[Array, "P N width"],
    backend: Backend = "auto",
) -> Shaped[Array, "layers slots width"]:
    """The pool with packed records at these slots of these layers: the inverse of `pack_records`."""
    planes, slots = int32("planes", planes), int32("slots", slots)
    check_axes({}, pool=(pool, _POOL), planes=(planes, "P"), slots=(slots, "N"), packed=(packed, "P N width"))
    check_dtype(pool.dtype, "as the pool", packed=packed)
    return dispatch(backend, reference.unpack_records, triton.unpack_records, pool, planes, slots, packed)


def write_records(
    pool: Shaped[Array, "layers slots width"],
    planes: Int[Array, " P"],
    slots: Int[Array, " N"],
    latent: Float[Array, "P N C"],
    rope_key: Float[Array, "P N R"],
    record: RecordFormat,
    outer_scales: Float[Array, " P"] | None = None,
    backend: Backend = "auto",
) -> Shaped[Array, "layers slots width"]:
    """The pool with new records, encoded as `RecordFormat.encode` does, at these slots of these layers.

    pool: allocated from the record format. outer_scales: float32, what each plane's latents are divided by first
    (quantised records only).
    """
    planes, slots = int32("planes", planes), int32("slots", slots)
    fresh = {"latent": (latent, "P N C"), "rope_key": (rope_key, "P N R")}
    if outer_scales is not None:
        fresh["outer_scales"] = (outer_scales, "P")
    check_axes(record_sizes(record), pool=(pool, _POOL), planes=(planes, "P"), slots=(slots, "N"), **fresh)
    check_dtype(record.dtype, f"{record.name} records", pool=pool)
    check_floats(**{name: array for name, (array, _) in fresh.items()})
    return dispatch(
        backend,
        partial(reference.write_records, record=record),
        partial(triton.write_records, record=record),
        pool,
        planes,
        slots,
        *(array for array, _ in fresh.values()),
    )
