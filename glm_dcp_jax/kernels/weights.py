"""A weight matrix as a device holds it: floats, or codes and the scales they are multiplied by.

Weights keep the checkpoint's [out, in], here [O, I], and may be stacked along leading axes S: groups of layers,
experts, gate and up. A weight is a pytree, so it is passed to jitted functions as it is.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Int, UInt8

from glm_dcp_jax.cache import codecs

NVFP4_GROUP = 16
"""Inputs that share one of NVFP4's block scales."""


class PlainWeight(NamedTuple):
    """values: [*S, O, I] in float32, bfloat16 or float16."""

    values: Float[Array, "*S O I"]


class Fp8Weight(NamedTuple):
    """E4M3 codes, times the float32 scale of their block: of O / Ob rows and I / Ib columns, which divide evenly.

    codes: [*S, O, I] float8_e4m3fn. scales: [*S, Ob, Ib].
    """

    codes: Float8e4m3fn[Array, "*S O I"]
    scales: Float[Array, "*S Ob Ib"]


class Nvfp4Weight(NamedTuple):
    """E2M1 codes, times the E4M3 scale of their 16 inputs, times the float32 scale of the matrix.

    codes: [*S, O, I/2] uint8, the input with the even number in the low nibble. scales: [*S, O, I/16] float8_e4m3fn.
    outer: [*S].
    """

    codes: UInt8[Array, "*S O I/2"]
    scales: Float8e4m3fn[Array, "*S O I/16"]
    outer: Float[Array, "*S"]


Weight = PlainWeight | Fp8Weight | Nvfp4Weight


def shape_of(weight: Weight) -> tuple[int, ...]:
    """(*S, O, I)."""
    first = weight[0]
    inputs = first.shape[-1] * (2 if isinstance(weight, Nvfp4Weight) else 1)
    return (*first.shape[:-1], inputs)


def block_of(weight: Fp8Weight) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    (rows, columns), blocks = weight.codes.shape[-2:], weight.scales.shape[-2:]
    return rows // blocks[0], columns // blocks[1]


def at(weight: Weight, *index: Int[Array, ""] | int) -> Weight:
    """One matrix, or a smaller stack, of a stack: `index` counts along its first axes."""
    return type(weight)(*(part[index] for part in weight))


def dequantised(weight: Weight) -> Float[Array, "*S O I"]:
    """The values: of codes in float32, else as they are stored."""
    if isinstance(weight, PlainWeight):
        return weight.values
    if isinstance(weight, Fp8Weight):
        rows, columns = block_of(weight)
        scales = jnp.repeat(jnp.repeat(weight.scales, rows, axis=-2), columns, axis=-1)
        return weight.codes.astype(jnp.float32) * scales
    codes = codecs.decode_e2m1(codecs.unpack_nibbles(weight.codes))
    scales = jnp.repeat(weight.scales.astype(jnp.float32), NVFP4_GROUP, axis=-1)
    return codes * scales * weight.outer[..., None, None]


def nbytes(weight: Any) -> int:
    """Bytes of all its arrays, or of their ShapeDtypeStructs."""
    return sum(math.prod(part.shape) * jnp.dtype(part.dtype).itemsize for part in jax.tree.leaves(weight))
