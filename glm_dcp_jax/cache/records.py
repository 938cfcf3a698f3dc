"""Record formats: what one token's CKV in one layer is stored as, and its index key beside it.

A record is the latent (width C) and the roped key (width R). `docs/cache-formats.md` shows every byte.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from glm_dcp_jax.cache import codecs
from glm_dcp_jax.config import ConfigError, ModelConfig

FP8_GROUP = 128
"""Latent values that share a float32 scale in fp8_ds_mla."""
NVFP4_GROUP = 16
"""Latent values that share an E4M3 scale in nvfp4_ds_mla."""
_FLOATS = ("float32", "bfloat16", "float16")
_NAMES = (*_FLOATS, "fp8_ds_mla", "nvfp4_ds_mla")
_ROPE_KINDS = ("bfloat16", "fp8")

NVFP4_GAP = 16
"""Bytes between scales and roped key in nvfp4_ds_mla: zero, or the roped key's scale in front of zeros."""


@dataclass(frozen=True)
class Field:
    """`count` elements of `kind` at byte `offset` of a record. kind: float32, bfloat16, e4m3, e2m1 or zero (a byte)."""

    name: str
    kind: str
    offset: int
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of the field; two e2m1 elements share one."""
        if self.kind == "e2m1":
            return self.count // 2
        return self.count * (jnp.dtype(self.kind).itemsize if self.kind in _FLOATS else 1)


@dataclass(frozen=True)
class IndexKeyFormat:
    """One token's index key in one Full layer: `width` elements of `kind`, which is float32, bfloat16 or e4m3.

    e4m3 keys carry a float32 scale, a power of two. Pools keep them planar: a block is B keys, then B scales.
    """

    kind: str
    width: int

    @property
    def quantised(self) -> bool:
        """Whether keys are codes with a scale."""
        return self.kind == "e4m3"

    @property
    def dtype(self) -> DTypeLike:
        """Element type of the pool."""
        return jnp.uint8 if self.quantised else jnp.dtype(self.kind)

    @property
    def key_bytes(self) -> int:
        """Bytes of one key, its scale included: 132 for e4m3 at GLM-5.2's 128."""
        return self.width + 4 if self.quantised else self.width * jnp.dtype(self.kind).itemsize

    def pool_shape(self, full_layers: int, slots: int, block_size: int) -> tuple[int, ...]:
        """[full_layers, slots, width]; quantised [full_layers, slots / block_size, block_size * (width + 4)].

        In both a page's keys are in position order: key s is the (s % block_size)th of block s // block_size.
        """
        if not self.quantised:
            return (full_layers, slots, self.width)
        return (full_layers, slots // block_size, block_size * self.key_bytes)


@dataclass(frozen=True)
class RecordFormat:
    """How records are stored. latent_width: C. rope_width: R. fields: in order of their offsets."""

    name: str
    latent_width: int
    rope_width: int
    fields: tuple[Field, ...]
    index: IndexKeyFormat

    @staticmethod
    def named(name: str, model: ModelConfig, rope_kind: str = "bfloat16") -> "RecordFormat":
        """A format at the model's sizes. rope_kind: bfloat16, or of nvfp4_ds_mla fp8; plain floats need no choice.

        Raises ConfigError for names and kinds that there are not, and for widths that the format cannot hold.
        """
        return RecordFormat.sized(
            name, model.kv_lora_rank, model.qk_rope_head_dim, model.index_head_dim, rope_kind
        )

    @staticmethod
    def sized(
        name: str, latent: int, rope: int, index_width: int, rope_kind: str = "bfloat16"
    ) -> "RecordFormat":
        """A format at any sizes; see `named`. float16 is one too: what float16 arithmetic decodes records to."""
        _check(name, rope_kind, latent=latent, rope=rope, index_width=index_width)
        if name in _FLOATS:
            fields = _laid_out(("latent", name, latent), ("rope", name, rope))
            return RecordFormat(name, latent, rope, fields, IndexKeyFormat(name, index_width))
        if name == "fp8_ds_mla":
            scales = ("latent_scales", "float32", -(-latent // FP8_GROUP))
            fields = _laid_out(("latent", "e4m3", latent), scales, ("rope", "bfloat16", rope))
        else:
            fields = _nvfp4_fields(latent, rope, rope_kind)
        return RecordFormat(name, latent, rope, fields, IndexKeyFormat("e4m3", index_width))

    @property
    def quantised(self) -> bool:
        """Whether records are bytes of several fields, rather than plain floats."""
        return self.name not in _FLOATS

    @property
    def dtype(self) -> DTypeLike:
        """Element type of the pool."""
        return jnp.uint8 if self.quantised else jnp.dtype(self.name)

    @property
    def record_bytes(self) -> int:
        """Bytes of one record: 1152, 656, 432 or 368 at GLM-5.2's 512 + 64."""
        return self.fields[-1].offset + self.fields[-1].nbytes

    @property
    def width(self) -> int:
        """Elements of one record in the pool."""
        return self.record_bytes // jnp.dtype(self.dtype).itemsize

    def field(self, name: str) -> Field:
        """The field of that name; KeyError if the format has none."""
        return {field.name: field for field in self.fields}[name]

    def has(self, name: str) -> bool:
        """Whether the format has a field of that name."""
        return any(field.name == name for field in self.fields)

    def encode(
        self,
        latent: Float[Array, "*rows C"],
        rope_key: Float[Array, "*rows R"],
        outer_scale: Float[Array, ""] | None = None,
    ) -> Array:
        """Records [*rows, width]. Done once per token; everything attends to `decode` of it.

        outer_scale: what nvfp4_ds_mla latents are divided by before they are quantised (a layer's constant).
        """
        if not self.quantised:
            return jnp.concatenate([latent, rope_key], axis=-1).astype(self.dtype)
        if outer_scale is not None:
            latent = codecs.divide(latent.astype(jnp.float32), outer_scale)
        parts = self._encode_latent(latent) | self._encode_rope(rope_key)
        rows = latent.shape[:-1]
        zeros = lambda field: jnp.zeros((*rows, field.nbytes), jnp.uint8)  # noqa: E731
        return jnp.concatenate([parts.get(field.name, zeros(field)) for field in self.fields], axis=-1)

    def decode(
        self, records: Array, dtype: DTypeLike, outer_scale: Float[Array, ""] | None = None
    ) -> Float[Array, "*rows C+R"]:
        """The values that attention sees: latent, then roped key. Computed in float32, then cast."""
        if not self.quantised:
            return records.astype(dtype)
        latent = self._decode_latent(records)
        if outer_scale is not None:
            latent = latent * outer_scale
        return jnp.concatenate([latent, self._decode_rope(records)], axis=-1).astype(dtype)

    def _bytes(self, records: Array, name: str) -> Array:
        field = self.field(name)
        return records[..., field.offset : field.offset + field.nbytes]

    def _encode_latent(self, latent: Array) -> dict[str, Array]:
        if self.name == "fp8_ds_mla":
            codes, scales = codecs.encode_fp8_groups(latent, FP8_GROUP)
            return {"latent": codes, "latent_scales": codecs.to_bytes(scales)}
        codes, scales = codecs.encode_nvfp4_groups(latent, NVFP4_GROUP)
        return {"latent": codecs.pack_nibbles(codes), "latent_scales": scales}

    def _decode_latent(self, records: Array) -> Array:
        raw, scales = self._bytes(records, "latent"), self._bytes(records, "latent_scales")
        if self.name == "fp8_ds_mla":
            return codecs.scale_groups(
                codecs.decode_e4m3(raw), codecs.from_bytes(scales, jnp.float32), FP8_GROUP
            )
        values = codecs.decode_e2m1(codecs.unpack_nibbles(raw))
        return codecs.scale_groups(values, codecs.decode_e4m3(scales), NVFP4_GROUP)

    def _encode_rope(self, rope_key: Array) -> dict[str, Array]:
        if not self.has("rope_scale"):
            return {"rope": codecs.to_bytes(rope_key.astype(jnp.bfloat16))}
        values = rope_key.astype(jnp.float32)
        scale = codecs.divide(jnp.max(jnp.abs(values), axis=-1, keepdims=True), codecs.E4M3_MAX)
        codes = codecs.encode_e4m3(values * (1.0 / jnp.where(scale > 0, scale, 1.0)))
        return {"rope": codes, "rope_scale": codecs.to_bytes(scale)}

    def _decode_rope(self, records: Array) -> Array:
        raw = self._bytes(records, "rope")
        if not self.has("rope_scale"):
            return codecs.from_bytes(raw, jnp.bfloat16).astype(jnp.float32)
        scale = codecs.from_bytes(self._bytes(records, "rope_scale"), jnp.float32)
        return codecs.decode_e4m3(raw) * scale


def _check(name: str, rope_kind: str, **widths: int) -> None:
    if name not in _NAMES:
        raise ConfigError(f"there is no record format {name!r}; use one of {', '.join(_NAMES)}")
    if rope_kind not in _ROPE_KINDS:
        raise ConfigError(f"a roped key cannot be kept as {rope_kind!r}; use {' or '.join(_ROPE_KINDS)}")
    if rope_kind == "fp8" and name != "nvfp4_ds_mla":
        raise ConfigError(
            f"--nvfp4-rope-dtype fp8 is for nvfp4_ds_mla records, but these are {name}; leave the roped key in "
            "bfloat16, or add --kv-cache-dtype nvfp4_ds_mla"
        )
    for width, size in widths.items():
        if size < 1:
            raise ConfigError(f"a {name} record cannot have {width} {size}; widths are at least 1")


def _laid_out(*fields: tuple[str, str, int]) -> tuple[Field, ...]:
    """Fields one after the other."""
    placed: list[Field] = []
    for name, kind, count in fields:
        offset = placed[-1].offset + placed[-1].nbytes if placed else 0
        placed.append(Field(name, kind, offset, count))
    return tuple(placed)


def _nvfp4_fields(latent: int, rope: int, rope_kind: str) -> tuple[Field, ...]:
    if latent % 2:
        raise ConfigError(
            f"kv_lora_rank {latent} is odd, but nvfp4_ds_mla keeps two values in a byte; use fp8_ds_mla"
        )
    front = (("latent", "e2m1", latent), ("latent_scales", "e4m3", -(-latent // NVFP4_GROUP)))
    if rope_kind == "fp8":
        scale, gap = ("rope_scale", "float32", 1), ("gap", "zero", NVFP4_GAP - 4)
        return _laid_out(*front, scale, gap, ("rope", "e4m3", rope))
    return _laid_out(*front, ("gap", "zero", NVFP4_GAP), ("rope", "bfloat16", rope))
