"""Record formats: what one token's CKV in one layer is stored as."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from glm_dcp_jax.config import ModelConfig


@dataclass(frozen=True)
class RecordFormat:
    """A record: `width` elements of `dtype`, the latent first, then the roped key.

    index_dtype, index_width: element type and count of an index key kept beside such records.
    """

    name: str
    dtype: DTypeLike
    index_dtype: DTypeLike
    width: int
    index_width: int

    @staticmethod
    def named(name: str, model: ModelConfig) -> "RecordFormat":
        """The format `float32` or `bfloat16` at the model's sizes."""
        dtype = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}[name]
        return RecordFormat(name, dtype, dtype, model.record_width, model.index_head_dim)

    @property
    def record_bytes(self) -> int:
        """Bytes of one record: 1152 for bfloat16 at GLM-5.2's 512 + 64."""
        return self.width * jnp.dtype(self.dtype).itemsize

    @property
    def index_key_bytes(self) -> int:
        """Bytes of one index key."""
        return self.index_width * jnp.dtype(self.index_dtype).itemsize

    def encode(self, latent: Float[Array, "*rows C"], rope_key: Float[Array, "*rows R"]) -> Array:
        """Records [*rows, width] in the cache's format. Done once per token; everything attends to `decode` of it."""
        return jnp.concatenate([latent, rope_key], axis=-1).astype(self.dtype)

    def decode(self, records: Array, dtype: DTypeLike) -> Float[Array, "*rows width"]:
        """The values that attention sees: latent, then roped key."""
        return records.astype(dtype)
