"""Moving records between pools and steps: gather or pack at slots, unpack, quantise and write.

A pool is [layers, slots, width] of a record format's dtype. Slots are int32, and one below 0 or past the pool's end is
nothing: it is not written, and packs as zeros. Planes are layers' numbers in the pool, may be traced, and must exist.
No writing op is told the same slot or plane twice. It writes into the pool it is given when that is donated. Triton
kernels copy no pool; they refuse those that `encode_tiles.as_units` refuses.
"""

from functools import partial

from jaxtyping import Array, Float, Int, Shaped

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels.dispatch import Backend, dispatch
from glm_dcp_jax.kernels.records import reference, triton
from glm_dcp_jax.kernels.records.reference import gather_pages

__all__ = ["gather_pages", "pack_records", "unpack_records", "write_records"]


def pack_records(
    pool: Shaped[Array, "layers slots width"],
    planes: Int[Array, " P"],
    slots: Int[Array, " N"],
    backend: Backend = "auto",
) -> Shaped[Array, "P N width"]:
    """The records of several layers at the same slots, in one contiguous buffer."""
    return dispatch(backend, reference.pack_records, triton.pack_records, pool, planes, slots)


def unpack_records(
    pool: Shaped[Array, "layers slots width"],
    planes: Int[Array, " P"],
    slots: Int[Array, " N"],
    packed: Shaped[Array, "P N width"],
    backend: Backend = "auto",
) -> Shaped[Array, "layers slots width"]:
    """The pool with packed records at these slots of these layers: the inverse of `pack_records`."""
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

    outer_scales: float32, what each plane's latents are divided by first (nvfp4_ds_mla).
    """
    scales = () if outer_scales is None else (outer_scales,)
    return dispatch(
        backend,
        partial(reference.write_records, record=record),
        partial(triton.write_records, record=record),
        pool,
        planes,
        slots,
        latent,
        rope_key,
        *scales,
    )
