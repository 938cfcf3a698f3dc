"""Weights as stored: their values, their place in a stack, and the instructions that decode codes on GPUs."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from stored_weights import E2M1, KINDS, random_weight, values_of

from glm_dcp_jax.kernels import code_tiles, weight_tiles, weights
from glm_dcp_jax.kernels.weights import Fp8Weight, Nvfp4Weight

SHAPES = {"plain": (3, 2, 5, 7), "fp8": (3, 2, 12, 20), "nvfp4": (3, 2, 5, 48)}


@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_values_are_code_times_scales(kind: str) -> None:
    weight = random_weight(kind, np.random.default_rng(0), *SHAPES[kind], block=(4, 10))
    found = weights.dequantised(weight)
    assert found.shape == weights.shape_of(weight) == SHAPES[kind]
    np.testing.assert_allclose(found, values_of(weight), rtol=3e-7)
    one = weights.at(weight, 1, 0)
    assert type(one) is type(weight)
    np.testing.assert_array_equal(weights.dequantised(one), found[1, 0])


def test_a_weight_is_a_pytree_and_knows_its_bytes() -> None:
    rng = np.random.default_rng(1)
    fp8 = random_weight("fp8", rng, 4, 256, 128, block=(128, 128))
    assert weights.nbytes(fp8) == 4 * (256 * 128 + 2 * 4)
    assert weights.block_of(fp8) == (128, 128)
    nvfp4 = random_weight("nvfp4", rng, 4, 256, 128)
    assert weights.nbytes(nvfp4) == 4 * (256 * 64 + 256 * 8 + 4)
    assert weights.nbytes(jax.eval_shape(lambda: nvfp4)) == weights.nbytes(nvfp4)


@pytest.mark.parametrize(("inputs", "block", "unit"), [(40, 20, 4), (40, 10, 1), (42, 42, 1)])
def test_codes_are_words_where_they_and_their_blocks_are_whole_ones(
    inputs: int, block: int, unit: int
) -> None:
    weight = random_weight("fp8", np.random.default_rng(2), 3, 2, 6, inputs, block=(3, block))
    codes, scales = weight_tiles.as_stored(weight)
    assert codes.shape == (6, 6, inputs // unit) and codes.dtype.itemsize == unit
    assert scales.shape == (6, 2, inputs // block)
    assert weight_tiles.form_of(weight, jnp.bfloat16).codes == unit


def test_what_byte_offsets_cannot_reach_is_refused() -> None:
    def shaped(dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    odd = Fp8Weight(shaped(jnp.float8_e4m3fn, 2**10, 2**10, 2**11 + 2), shaped(jnp.float32, 2**10, 1, 1))
    with pytest.raises(ValueError, match="below 2 GiB"):
        jax.eval_shape(weight_tiles.as_stored, odd)
    rows = 2**17
    scales = Nvfp4Weight(
        shaped(jnp.uint8, 2**6, rows, 2**11),
        shaped(jnp.float8_e4m3fn, 2**6, rows, 2**8),
        shaped(jnp.float32, 2**6),
    )
    with pytest.raises(ValueError, match="below 2 GiB"):
        jax.eval_shape(weight_tiles.as_stored, scales)


class Assembler:
    """Runs the few PTX instructions that decode two codes. Registers hold uint32."""

    def __init__(self, asm: str, *arguments: int) -> None:
        self.registers = {f"${number + 1}": value for number, value in enumerate(arguments)}
        for line in asm.splitlines():
            if found := re.fullmatch(r"(\w+)[\w.]* (\$?\w+), (.*);", line):
                sources = [self._value(source) for source in found[3].split(", ")]
                self.registers[found[2]] = getattr(self, f"_{found[1]}")(*sources) & 0xFFFFFFFF
            else:
                assert line in ("{", "}") or line.startswith(".reg .b32 "), line

    def halves(self) -> list[np.ndarray]:
        """The result's two bfloat16, the first in the low half."""
        return list(np.array([self.registers["$0"]], np.uint32).view(ml_dtypes.bfloat16))

    def _value(self, source: str) -> int:
        return self.registers[source] if source in self.registers else int(source, 0)

    def _mov(self, a: int) -> int:
        return a

    def _and(self, a: int, b: int) -> int:
        return a & b

    def _shl(self, a: int, b: int) -> int:
        return a << b

    def _shr(self, a: int, b: int) -> int:
        return a >> b

    def _prmt(self, a: int, b: int, select: int) -> int:
        given = a.to_bytes(4, "little") + b.to_bytes(4, "little")
        return int.from_bytes(bytes(given[select >> 4 * n & 7] for n in range(4)), "little")

    def _lop3(self, a: int, b: int, c: int, table: int) -> int:
        bits = ((a >> n & 1) << 2 | (b >> n & 1) << 1 | (c >> n & 1) for n in range(32))
        return sum((table >> index & 1) << n for n, index in enumerate(bits))

    def _fma(self, a: int, b: int, c: int) -> int:
        """Rounded once, to bfloat16: the product of two bfloat16 is exact in float32, c is -0.0."""
        x, y, z = (np.array([n], np.uint32).view(ml_dtypes.bfloat16).astype(np.float64) for n in (a, b, c))
        assert (z == 0).all() and np.signbit(z).all()
        return int((x * y).astype(ml_dtypes.bfloat16).view(np.uint32)[0])


@pytest.mark.parametrize("j", range(4))
def test_the_instructions_decode_every_e4m3_code(j: int) -> None:
    asm = code_tiles._E4M3_PAIR.format(select=code_tiles._bytes(j))
    rng = np.random.default_rng(3)
    for code in range(256):
        other = int(rng.integers(256))
        words = [int.from_bytes(rng.bytes(4), "little") & ~(255 << 8 * j) for _ in range(2)]
        given = [word | each << 8 * j for word, each in zip(words, (code, other), strict=True)]
        found = [float(half) for half in Assembler(asm, *given).halves()]
        expected = np.array([code, other], np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        nan = np.isnan(expected)
        assert all(abs(value) == 480 for value in np.array(found)[nan])
        np.testing.assert_array_equal(np.array(found)[~nan], expected[~nan])


@pytest.mark.parametrize("j", range(8))
def test_the_instructions_decode_every_e2m1_code_and_scale(j: int) -> None:
    asm = code_tiles._e2m1_pair(j)
    scales = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    rng = np.random.default_rng(4)
    for code in range(16):
        for scale in scales:
            other, second = int(rng.integers(16)), scales[rng.integers(127)]
            words = [int.from_bytes(rng.bytes(4), "little") & ~(15 << 4 * j) for _ in range(2)]
            given = [word | each << 4 * j for word, each in zip(words, (code, other), strict=True)]
            both = np.array([scale, second]) * code_tiles._SCALE_BIAS
            packed = both.astype(ml_dtypes.bfloat16)
            assert (packed.astype(np.float64) == both).all(), "the scale is exact"
            halves = Assembler(asm, *given, int(packed.view(np.uint32)[0])).halves()
            found = np.array([float(half) for half in halves]) * code_tiles.e2m1_missing(jnp.bfloat16)
            np.testing.assert_array_equal(found, E2M1[[code, other]] * [scale, second])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_interpreted_decoding_is_exact_as_well(dtype: str) -> None:
    words = jnp.asarray(np.random.default_rng(5).integers(0, 2**32, (64, 8), np.uint32))
    raw = np.asarray(words)
    codes = np.stack([raw >> 4 * j & 15 for j in range(8)])
    scale = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scales = jnp.asarray(np.resize(scale, (64, 8)))
    found = np.stack(code_tiles.e2m1_parts(words, scales, dtype, interpret=True)).astype(np.float64)
    expected = E2M1[codes] * np.asarray(scales, np.float64)
    np.testing.assert_array_equal(found * code_tiles.e2m1_missing(dtype), expected)
    found = np.stack(code_tiles.e4m3_parts(words, 4, dtype, interpret=True)).astype(np.float64)
    values = np.stack([(raw >> 8 * j).astype(np.uint8).view(ml_dtypes.float8_e4m3fn) for j in range(4)])
    np.testing.assert_array_equal(found, values.astype(np.float64))
