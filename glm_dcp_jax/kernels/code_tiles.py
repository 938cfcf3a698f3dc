"""Decoding E4M3 and E2M1 codes inside Pallas-Triton kernels, exactly, to what tensor cores multiply.

To bfloat16 two codes are decoded at once, in the halves of one register, by a few of the assembler's instructions:
compilers take the codes apart one by one, which is twice the work, and decoding is what a decode step does most of. A
code's exponent and mantissa become the lowest exponent and highest mantissa bits of a bfloat16, whose exponent is then
too small by the difference of the biases; multiplying by that power of two also makes subnormal codes right. Adding
-0.0 changes nothing: this multiplication alone needs newer GPUs.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, DTypeLike, Float, Int

from glm_dcp_jax.cache import codecs

_HALF_BIAS = 2.0**14
"""What an E2M1 code read as the leading bits of a float16 is too small by: their exponents' biases are 1 and 15."""
_E2M1_BIAS, _SCALE_BIAS = 2.0**126, 2.0**118
"""The same of a bfloat16, whose bias is 127. No scale can be multiplied by it, but by the second, which leaves 2**8."""

_E4M3_PAIR = """{{
.reg .b32 codes, signs, rest, bias, zero;
prmt.b32 codes, $1, $2, 0x{select:04x};
mov.b32 bias, 0x7b807b80;
mov.b32 zero, 0x80008000;
and.b32 signs, codes, 0x80008000;
shr.b32 rest, codes, 4;
lop3.b32 rest, rest, 0x07f007f0, signs, 0xea;
fma.rn.bf16x2 $0, rest, bias, zero;
}}"""
_E2M1_PAIR = """{{
.reg .b32 codes, signs, rest, zero;
prmt.b32 codes, $1, $2, 0x{select:04x};
mov.b32 zero, 0x80008000;
shl.b32 signs, codes, {sign};
and.b32 signs, signs, 0x80008000;
{shift}.b32 rest, codes, {magnitude};
lop3.b32 rest, rest, 0x01c001c0, signs, 0xea;
fma.rn.bf16x2 $0, rest, $3, zero;
}}"""


def e4m3_parts(
    units: Int[Array, "N units"], codes: int, dtype: DTypeLike, interpret: bool
) -> list[Float[Array, "N units"]]:
    """Part j: the values of the jth code of every unit, of which it holds `codes`.

    As bfloat16, on a GPU, the codes of NaN are +-480; checkpoints have none.
    """
    if codes == 4 and jnp.dtype(dtype) == jnp.bfloat16 and not interpret:
        return [_pairs(_E4M3_PAIR.format(select=_bytes(j)), units) for j in range(codes)]
    bytes_of = [(units >> 8 * j).astype(jnp.uint8) for j in range(codes)]
    return [codecs.decode_e4m3(each).astype(dtype) for each in bytes_of]


def e2m1_parts(
    words: Int[Array, "N words"], scales: Float[Array, "N words"], dtype: DTypeLike, interpret: bool
) -> list[Float[Array, "N words"]]:
    """Part j: the values of the jth of every word's 8 codes, times the word's scale, divided by `e2m1_missing`.

    scales: what E4M3 can be, in float32.
    """
    if jnp.dtype(dtype) == jnp.bfloat16 and not interpret:
        scales = (scales * _SCALE_BIAS).astype(jnp.bfloat16)
        return [_pairs(_e2m1_pair(j), words, scales) for j in range(8)]
    scales = scales * (_HALF_BIAS / e2m1_missing(dtype))
    return [(half * scales).astype(dtype) for half in _e2m1_halves(words)]


def e2m1_missing(dtype: DTypeLike) -> float:
    """What the results of `e2m1_parts` are too small by: a power of two."""
    return _E2M1_BIAS / _SCALE_BIAS if jnp.dtype(dtype) == jnp.bfloat16 else 1.0


def _pairs(asm: str, words: Int[Array, "N words"], *more: Array) -> Float[Array, "N words"]:
    """A bfloat16 for each word, of which the assembler takes two."""
    (values,) = plt.elementwise_inline_asm(
        asm,
        args=[words, *more],
        constraints="=r,r,r" + ",r" * len(more),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)],
    )
    return values


def _bytes(j: int) -> int:
    """prmt's selection of byte j of two words as the upper bytes of the halves of one."""
    return j << 4 | (4 + j) << 12


def _e2m1_pair(j: int) -> str:
    """Codes j, of 8, of two words; a code's sign becomes the sign, its rest the low exponent and high mantissa bits."""
    select, place = (0x7632, j - 4) if j >= 4 else (0x5410, j)
    left = 6 - 4 * place
    return _E2M1_PAIR.format(
        select=select, sign=12 - 4 * place, shift="shl" if left > 0 else "shr", magnitude=abs(left)
    )


def _e2m1_halves(words: Int[Array, "N units"]) -> list[Float[Array, "N units"]]:
    """Each part's E2M1 codes divided by _HALF_BIAS, in float32.

    A code's exponent and mantissa become the lowest exponent bits and the highest mantissa bit of a float16, its sign
    the sign: in both halves of a word at once.
    """
    magnitude, sign = np.uint32(0x0E000E00), np.uint32(0x80008000)
    pairs = [
        (_shifted(words, 9 - 4 * j) & magnitude) | (_shifted(words, 12 - 4 * j) & sign) for j in range(4)
    ]
    bits = [(pairs[j % 4] >> (16 * (j // 4))).astype(jnp.uint16) for j in range(8)]
    return [jax.lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) for half in bits]


def _shifted(words: Int[Array, "N units"], left: int) -> Int[Array, "N units"]:
    return words << left if left >= 0 else words >> -left
