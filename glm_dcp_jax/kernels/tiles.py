"""What Pallas-Triton kernels load, store, multiply and reorder with: forms that lower, compile and are interpreted.

Inside a kernel every array has sizes that are powers of two, and every index is an array: masks cut off what the real
sizes lack. Kernels use these functions only, so that a test can count what they move and compute.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Shaped

MIN_PRODUCT = 16
"""Smallest side of a matrix product that tensor cores take."""


def next_power(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (max(n, 1) - 1).bit_length()


def load(ref: jax.Ref, *indices: Array, mask: Array | None = None, other: float | int = 0) -> Array:
    """ref at index arrays that broadcast against each other; `other` where the mask is false."""
    if mask is None:
        return plt.load(ref.at[indices])
    return plt.load(ref.at[indices], mask=mask, other=other)


def store(ref: jax.Ref, *indices: Array, value: Array, mask: Array | None = None) -> None:
    """Write value at index arrays that broadcast against each other, where the mask is true."""
    plt.store(ref.at[indices], value, mask=mask)


def dot(a: Array, b: Array, transpose_b: bool = False) -> Array:
    """a [M, K] @ b [K, N] (b [N, K] when transposed) in float32; float32 inputs are multiplied exactly, not as TF32."""
    return plt.dot(a, b, trans_b=transpose_b, allow_tf32=False)


def weave(parts: list[Shaped[Array, "N n"]]) -> Shaped[Array, "N n*parts"]:
    """The first column of each part, then the second of each, and so on. The number of parts is a power of two."""
    if len(parts) == 1:
        return parts[0]
    pairs = jnp.stack([weave(parts[0::2]), weave(parts[1::2])], axis=-1)
    return pairs.reshape(pairs.shape[0], -1)


def only(ref: jax.Ref) -> Shaped[Array, ""]:
    """The one element of an array."""
    return jnp.max(load(ref, jnp.zeros((1,), jnp.int32)))


def repeat(values: Shaped[Array, "N n"], times: int) -> Shaped[Array, "N n*times"]:
    """Each element `times` times in a row."""
    return jnp.broadcast_to(values[:, :, None], (*values.shape, times)).reshape(values.shape[0], -1)
