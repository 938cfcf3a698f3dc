"""Loads, stores and products of Pallas-Triton kernels, in the one form that lowers, compiles and is interpreted.

Inside a kernel every array has sizes that are powers of two, and every index is an array: masks cut off what the real
sizes lack. Kernels use these functions only, so that a test can count what they move and compute.
"""

import jax
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

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
