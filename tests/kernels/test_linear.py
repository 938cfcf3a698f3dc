"""Linear maps with stored weights, and gated ones, against float64: both backends, all kinds, any sizes."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stored_weights import KINDS, random_weight, silu, spoilt, values_of

from glm_dcp_jax.kernels import linear as ops
from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.linear import gated_linear, linear, tiling
from glm_dcp_jax.kernels.linear.cost import cost, loads
from glm_dcp_jax.kernels.weight_tiles import form_of
from glm_dcp_jax.kernels.weights import Fp8Weight, Nvfp4Weight, PlainWeight, Weight, nbytes

GROUPS, GROUP = 3, 1
# rows, outputs, inputs, rows and columns of an FP8 block
SIZES = [
    (1, 67, 40, (67, 40)),
    (3, 66, 640, (33, 20)),
    (4, 96, 1536, (32, 128)),
    (17, 576, 256, (64, 128)),  # kv_a's 576 rows, whose blocks are cut
    (70, 40, 520, (40, 130)),
]
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-8, "float16": 2.0**-10}


def sizes_of(kind: str, size: tuple) -> tuple[int, int, int, tuple[int, int]]:
    rows, outputs, inputs, block = size
    return rows, outputs, -(-inputs // 16) * 16 if kind == "nvfp4" else inputs, block


def problem(
    kind: str, size: tuple, dtype: str, gated: bool = False, seed: int = 0
) -> tuple[jax.Array, Weight]:
    """x and a stack of weights, of whose groups all but one are NaN."""
    rows, outputs, inputs, block = sizes_of(kind, size)
    rng = np.random.default_rng(seed)
    shape = (GROUPS, 2, outputs, inputs) if gated else (GROUPS, outputs, inputs)
    weight = random_weight(kind, rng, *shape, block=block, dtype=dtype)
    x = jnp.asarray(rng.standard_normal((rows, inputs)), dtype)
    return x, spoilt(spoilt(weight, 0), GROUPS - 1)


def expected(x: jax.Array, weight: Weight) -> np.ndarray:
    """float64: of a gated map if there are two matrices."""
    products = np.asarray(x, np.float64) @ np.swapaxes(values_of(weight)[GROUP], -1, -2)
    return silu(products[0]) * products[1] if products.ndim == 3 else products


def check(found: jax.Array, wanted: np.ndarray, dtype: str, factor: float = 1.0) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=factor * TOLERANCE[dtype] * np.abs(wanted).max())


CASES = [(kind, size, "bfloat16") for kind in KINDS for size in SIZES] + [
    (kind, size, "float32") for kind in KINDS for size in SIZES[:2]
]


def chosen(*first: tuple[str, int, str]) -> list:
    """All cases; only these, by the number of their size, when slow tests are left out."""
    quick = [(kind, SIZES[number], dtype) for kind, number, dtype in first]
    return [
        pytest.param(
            case,
            marks=[] if case in quick else pytest.mark.slow,
            id="-".join(map(str, case)).replace(" ", ""),
        )
        for case in CASES
    ]


@pytest.mark.parametrize(
    "case",
    chosen(
        ("plain", 0, "bfloat16"),
        ("fp8", 1, "bfloat16"),
        ("nvfp4", 2, "bfloat16"),
        ("fp8", 3, "bfloat16"),
        ("nvfp4", 4, "bfloat16"),
        ("fp8", 0, "float32"),
    ),
)
def test_a_kernel_multiplies_with_the_stored_values(case: tuple) -> None:
    kind, _, dtype = case
    x, weight = problem(*case)
    found = jax.jit(partial(linear, out_dtype=jnp.float32, backend="interpret"))(x, weight, GROUP)
    assert found.dtype == jnp.float32
    # Products of what is stored are exact in float32, so that only their sum is rounded.
    check(found, expected(x, weight), "float32")


@pytest.mark.parametrize(
    "case",
    chosen(
        ("plain", 1, "bfloat16"),
        ("fp8", 2, "bfloat16"),
        ("nvfp4", 3, "bfloat16"),
        ("nvfp4", 0, "float32"),
    ),
)
def test_a_kernel_gates(case: tuple) -> None:
    _, _, dtype = case
    x, weight = problem(*case, gated=True, seed=1)
    found = jax.jit(partial(gated_linear, backend="interpret"))(x, weight, GROUP)
    assert found.dtype == dtype
    check(found, expected(x, weight), dtype, factor=4 if dtype == "float32" else 1)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("plain", "bfloat16"), ("fp8", "float16"), ("nvfp4", "bfloat16"), ("fp8", "float32")]
)
def test_the_reference_is_the_same_map(kind: str, dtype: str) -> None:
    x, weight = problem(kind, SIZES[1], dtype)
    found = linear(x, weight, GROUP, backend="reference")
    assert found.dtype == dtype
    check(found, expected(x, weight), dtype)
    x, weight = problem(kind, SIZES[1], dtype, gated=True)
    check(gated_linear(x, weight, GROUP, "reference"), expected(x, weight), dtype, factor=4)


@pytest.mark.parametrize("kind", ["nvfp4", pytest.param("fp8", marks=pytest.mark.slow)])
def test_float16_is_multiplied_as_float16(kind: str) -> None:
    x, weight = problem(kind, SIZES[1], "float16")
    found = linear(x, weight, GROUP, jnp.float32, "interpret")
    check(found, expected(x, weight), "float32")


@pytest.mark.parametrize(("kind", "backend"), [("fp8", "interpret"), ("nvfp4", "reference")])
def test_a_weight_needs_no_stack(kind: str, backend: str) -> None:
    x, weight = problem(kind, SIZES[0], "bfloat16")
    alone = type(weight)(*(part[GROUP] for part in weight))
    np.testing.assert_array_equal(
        linear(x, alone, backend=backend), linear(x, weight, GROUP, backend=backend)
    )


@pytest.mark.parametrize(
    "kind", ["fp8", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("plain", "nvfp4"))]
)
def test_rows_that_are_not_finite_stay_alone_with_it(kind: str) -> None:
    """Where a program multiplies slices of the inputs with one another, and where a row is beyond the tile's rows."""
    for size in (SIZES[2], SIZES[3]):
        x, weight = problem(kind, size, "bfloat16")
        multiply = jax.jit(partial(linear, backend="interpret"))
        clean, rows = np.asarray(multiply(x, weight, GROUP), np.float32), x.shape[0]
        found = np.asarray(multiply(x.at[rows - 2, 5].set(jnp.nan), weight, GROUP), np.float32)
        assert np.isnan(found[rows - 2]).all()
        np.testing.assert_array_equal(np.delete(found, rows - 2, 0), np.delete(clean, rows - 2, 0))


def test_programs_that_share_inputs_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut that splits must occur in these tests, and gated maps must sum before they gate."""
    x, weight = problem("fp8", SIZES[3], "bfloat16", gated=True)
    monkeypatch.setattr(tiling, "_MORE_PROGRAMS", 1)
    alone = tiling.cut_of(32, 1, form_of(weight, x.dtype), 2)
    assert alone.splits == 1
    whole = gated_linear(x, weight, GROUP, "interpret")
    monkeypatch.setattr(tiling, "_MORE_PROGRAMS", 40)
    x = jnp.tile(x, 2)
    weight = Fp8Weight(jnp.tile(weight.codes, 2), jnp.tile(weight.scales, 2))
    assert tiling.cut_of(32, 1, form_of(weight, x.dtype), 2).splits == 2
    check(gated_linear(x, weight, GROUP, "interpret"), expected(x, weight), "bfloat16")
    assert whole.shape == (17, 576)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize(
    ("kind", "rows", "outputs", "inputs"),
    [
        (kind, *sizes)
        for kind in KINDS
        for sizes in [(0, 16, 32), (3, 0, 32), (3, 16, 0)]
        if kind != "fp8" or 0 not in sizes[1:]  # FP8 weights have at least one block
    ],
)
def test_empty_sizes(kind: str, backend: str, rows: int, outputs: int, inputs: int) -> None:
    weight = random_weight(kind, np.random.default_rng(2), 2, outputs, inputs)
    found = linear(jnp.ones((rows, inputs), jnp.bfloat16), weight, 1, backend=backend)
    assert found.shape == (rows, outputs) and not found.any()


def test_results_repeat_bitwise() -> None:
    x, weight = problem("nvfp4", SIZES[2], "bfloat16")
    multiply = jax.jit(partial(linear, out_dtype=jnp.float32, backend="interpret"))
    np.testing.assert_array_equal(multiply(x, weight, GROUP), multiply(x, weight, GROUP))


def test_large_plain_products_are_left_to_xla() -> None:
    def lowered(rows: int, kind: str, dtype: str = "bfloat16") -> str:
        weight = jax.eval_shape(
            lambda: random_weight(kind, np.random.default_rng(0), 2, 128, 256, dtype="bfloat16")
        )
        x = jax.ShapeDtypeStruct((rows, 256), dtype)
        return jax.jit(linear).trace(x, weight, 1).lower(lowering_platforms=("cuda",)).as_text()

    own = "__gpu$xla.gpu.triton"
    assert own in lowered(ops.MOST_OWN_ROWS, "plain") and own not in lowered(ops.MOST_OWN_ROWS + 1, "plain")
    assert own in lowered(4, "plain", "float32") and own not in lowered(65, "plain", "float32")
    assert own in lowered(4096, "fp8") and own in lowered(4096, "nvfp4")


DECLARED = [("plain", 0, True), ("fp8", 2, False), ("nvfp4", 4, False), ("fp8", 4, True), ("nvfp4", 2, True)]


@pytest.mark.parametrize(
    ("kind", "number", "gated"),
    [
        pytest.param(*case, marks=[] if case in DECLARED else pytest.mark.slow)
        for case in [
            (kind, number, gated) for kind in KINDS for number in (0, 2, 4) for gated in (False, True)
        ]
    ],
)
def test_declared_costs_are_the_kernels_own(
    moved: Callable[[], Cost], kind: str, number: int, gated: bool
) -> None:
    x, weight = problem(kind, SIZES[number], "bfloat16", gated)
    op = gated_linear if gated else linear
    jax.block_until_ready(jax.jit(partial(op, backend="interpret"))(x, weight, GROUP))
    found, form, matrices = moved(), form_of(weight, x.dtype), 1 + gated
    loaded = loads(x.shape[0], form, matrices, 2)
    declared = cost(x.shape[0], form, matrices, 2, 2)
    assert found == declared._replace(bytes_read=loaded.total)
    # Each weight byte once for every tile of rows; memory is read once.
    one = nbytes(weight) // GROUPS
    assert loaded.codes == -(-x.shape[0] // 128) * (
        one - (nbytes(weight[1:]) // GROUPS if kind == "fp8" else matrices * 4 * (kind == "nvfp4"))
    )
    assert declared.bytes_read == one + x.size * 2 + 4


def test_a_decode_step_computes_few_products_for_nothing() -> None:
    """Rows of x are padded to 16 or, sliced, multiplied with other slices: 16 products for each weight either way."""
    weight = jax.eval_shape(
        lambda: random_weight("fp8", np.random.default_rng(0), 6144, 2048, block=(128, 128))
    )
    form = form_of(weight, jnp.bfloat16)
    for rows in (1, 4, 8, 16):
        assert cost(rows, form, 1, 2, 2).flops == 2 * 16 * 6144 * 2048


def ones(dtype: str, *shape: int) -> jax.Array:
    return jnp.ones(shape, dtype)


F8 = "float8_e4m3fn"
UNFITTING = [
    (ones("int32", 3, 32), PlainWeight(ones("float32", 5, 32)), "x is int32, but must be float32, bfloat16"),
    (ones("float32", 32), PlainWeight(ones("float32", 5, 32)), r"x is \[32\], but must be \[T, I\]"),
    (ones("float32", 3, 31), PlainWeight(ones("float32", 5, 32)), r"weight is \[5, 32\], .*I = 31 \(x\)"),
    (ones("float32", 3, 32), PlainWeight(ones("float32", 1, 2, 5, 32)), r"weight is \[1, 2, 5, 32\]"),
    (ones("float32", 3, 32), PlainWeight(ones("int8", 5, 32)), "weight is int8, but must be float32"),
    (
        ones("float32", 3, 32),
        Fp8Weight(ones(F8, 5, 32), ones("float32", 2, 4)),
        "2 x 4 blocks, which are not even shares of 5 x 32 codes",
    ),
    (
        ones("float32", 3, 32),
        Fp8Weight(ones(F8, 2, 5, 32), ones("float32", 1, 1)),
        r"weight.scales is \[1, 1\], but must be \[G, Ob, Ib\] with G = 2 \(weight\)",
    ),
    (
        ones("float32", 3, 32),
        Fp8Weight(ones("uint8", 5, 32), ones("float32", 1, 1)),
        r"weight.codes is uint8, but must be float8_e4m3fn \(FP8 weights\)",
    ),
    (
        ones("float32", 3, 40),
        Nvfp4Weight(ones("uint8", 5, 20), ones(F8, 5, 2), ones("float32")),
        "weight has 40 inputs, but NVFP4 needs a multiple of 16",
    ),
    (
        ones("float32", 3, 32),
        Nvfp4Weight(ones("uint8", 5, 16), ones(F8, 5, 3), ones("float32")),
        r"weight.scales is \[5, 3\], but must be \[O, I/16\] with O = 5 \(weight\), I/16 = 2",
    ),
    (
        ones("float32", 3, 32),
        Nvfp4Weight(ones("uint8", 4, 5, 16), ones(F8, 4, 5, 2), ones("float32")),
        r"weight.outer is \[\], but must be \[G\] with G = 4 \(weight\)",
    ),
    (
        ones("float32", 3, 32),
        Nvfp4Weight(ones("uint8", 5, 16), ones("uint8", 5, 2), ones("float32")),
        "weight.scales is uint8, but must be float8_e4m3fn",
    ),
]


@pytest.mark.parametrize("number", range(len(UNFITTING)))
@pytest.mark.parametrize("backend", ["reference", "interpret", "auto"])
def test_what_does_not_fit_is_refused(number: int, backend: str) -> None:
    x, weight, complaint = UNFITTING[number]
    with pytest.raises(ValueError, match=complaint):
        linear(x, weight, backend=backend)


def test_gate_and_up_are_two_matrices() -> None:
    with pytest.raises(ValueError, match=r"weight is \[3, 5, 32\], but must be \[2, O, I\] with 2 = 2"):
        gated_linear(ones("float32", 3, 32), PlainWeight(ones("float32", 3, 5, 32)))
    with pytest.raises(ValueError, match="group is float32, but must be int32"):
        linear(ones("float32", 3, 32), PlainWeight(ones("float32", 3, 5, 32)), 1.0)
