"""The kernels of routed experts, interpreted, against float64: all kinds of weights, any routing; and their cost."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_weights import KINDS, expert_by_expert, random_weight, spoilt, values_of

from glm_dcp_jax.kernels import row_blocks
from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.experts import routed_experts, tiling
from glm_dcp_jax.kernels.experts.cost import cost, expected_experts, loads
from glm_dcp_jax.kernels.experts.tile_plan import plan_tiles, tile_bound
from glm_dcp_jax.kernels.weight_tiles import form_of
from glm_dcp_jax.kernels.weights import Nvfp4Weight, nbytes


class Sizes:
    """Of a problem with stored weights. block: of FP8, of gate and up; down's is the same, turned."""

    def __init__(
        self, rows: int, each: int, experts: int, hidden: int, width: int, block: tuple[int, int]
    ) -> None:
        self.rows, self.each, self.experts, self.hidden, self.width = rows, each, experts, hidden, width
        self.block = block

    def __str__(self) -> str:
        return f"{self.rows}x{self.each}-of-{self.experts}-{self.hidden}-{self.width}"


SIZES = [
    Sizes(1, 2, 5, 1024, 48, (16, 128)),  # inputs in four slices
    Sizes(3, 2, 5, 144, 80, (40, 36)),  # bytes, not words, of FP8; nothing is a whole tile
    Sizes(17, 3, 4, 64, 32, (32, 32)),
    Sizes(70, 4, 3, 80, 96, (48, 40)),  # tiles of 64 rows, several of an expert
]
GROUPS, GROUP = 2, 1
TOLERANCE = {"float32": 1e-5, "bfloat16": 2.0**-8}


def stored_problem(kind: str, sizes: Sizes, dtype: str, ids: np.ndarray, seed: int = 0) -> tuple:
    """(x, ids, weights, gate_up, down): NaN in the other group and in every expert that no row chose."""
    rng = np.random.default_rng(seed)
    shape = (GROUPS, sizes.experts)
    gate_up = random_weight(kind, rng, *shape, 2, sizes.width, sizes.hidden, block=sizes.block, dtype=dtype)
    down = random_weight(kind, rng, *shape, sizes.hidden, sizes.width, block=sizes.block[::-1], dtype=dtype)
    for other in [(0,), *((GROUP, expert) for expert in range(sizes.experts) if expert not in ids)]:
        gate_up, down = spoilt(gate_up, *other), spoilt(down, *other)
    x = jnp.asarray(rng.standard_normal((sizes.rows, sizes.hidden)) / sizes.hidden**0.5, dtype)
    weights = jnp.asarray(rng.random((sizes.rows, sizes.each)), jnp.float32)
    return x, jnp.asarray(ids, jnp.int32), weights, gate_up, down


def kernels(first_expert: int = 0):
    return jax.jit(partial(routed_experts, group=GROUP, first_expert=first_expert, backend="interpret"))


def check_stored(found: jax.Array, problem: tuple, dtype: str) -> None:
    x, ids, weights, gate_up, down = problem
    wanted = expert_by_expert(x, ids, weights, values_of(gate_up)[GROUP], values_of(down)[GROUP])
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE[dtype] * np.abs(wanted).max())


def routing(name: str, sizes: Sizes) -> np.ndarray:
    rng = np.random.default_rng(8)
    shape = sizes.rows, sizes.each
    return {
        "random": rng.integers(0, sizes.experts, shape),
        "all to the last": np.full(shape, sizes.experts - 1),
        "first and last": rng.choice([0, sizes.experts - 1], shape),
    }[name]


CASES = [(kind, sizes, "bfloat16", "random") for kind in KINDS for sizes in SIZES] + [
    ("plain", SIZES[1], "float32", "random"),
    ("plain", SIZES[3], "float32", "random"),
    ("fp8", SIZES[2], "float32", "first and last"),
    ("nvfp4", SIZES[2], "float32", "random"),
    ("nvfp4", SIZES[2], "bfloat16", "all to the last"),
    ("fp8", SIZES[3], "bfloat16", "first and last"),
    ("plain", SIZES[3], "bfloat16", "all to the last"),
]


QUICK = [(0, "plain"), (1, "fp8"), (2, "nvfp4"), (3, "fp8")]


@pytest.mark.parametrize(
    ("kind", "sizes", "dtype", "name"),
    [
        pytest.param(
            *case,
            id="-".join(map(str, case)).replace(" ", "_"),
            marks=[]
            if case in [(kind, SIZES[number], "bfloat16", "random") for number, kind in QUICK]
            or case[2:] == ("float32", "first and last")
            else pytest.mark.slow,
        )
        for case in CASES
    ],
)
def test_kernels_compute_the_chosen_experts(kind: str, sizes: Sizes, dtype: str, name: str) -> None:
    """Whatever holds NaN is not looked at: other groups, experts that nobody chose."""
    problem = stored_problem(kind, sizes, dtype, routing(name, sizes))
    check_stored(kernels()(*problem), problem, dtype)


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_the_reference_takes_all_kinds(kind: str) -> None:
    problem = stored_problem(kind, SIZES[2], "float32", routing("random", SIZES[2]))
    check_stored(routed_experts(*problem, group=GROUP, backend="reference"), problem, "float32")


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_experts_elsewhere_count_as_nothing(backend: str) -> None:
    """Summed over ranks that hold a part of the experts each, it is what one rank with all of them computes."""
    sizes = SIZES[2]
    problem = stored_problem("plain", sizes, "bfloat16", routing("random", sizes))
    x, ids, weights, gate_up, down = problem
    total = np.zeros((sizes.rows, sizes.hidden))
    for first, last in ((0, 1), (1, 4)):
        own = [type(part)(*(array[:, first:last] for array in part)) for part in (gate_up, down)]
        total += routed_experts(x, ids, weights, *own, GROUP, first, backend)
    check_stored(jnp.asarray(total, jnp.float32), problem, "bfloat16")
    away = routed_experts(x, ids, weights, gate_up, down, GROUP, 100, backend)
    assert away.shape == x.shape and not away.any()


def test_down_in_turns_is_down_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(17, 3, 4, 320, 32, (32, 32))
    problem = stored_problem("plain", sizes, "bfloat16", routing("random", sizes))
    whole = kernels()(*problem)
    monkeypatch.setattr(tiling, "WORKSPACE_BYTES", 2 * 17 * 3 * 64 * 4)
    turns = kernels()(*problem)
    np.testing.assert_array_equal(turns, whole)
    assert row_blocks.WORKSPACE_BYTES > tiling.WORKSPACE_BYTES


def test_kernels_repeat_bitwise() -> None:
    problem = stored_problem("nvfp4", SIZES[2], "bfloat16", routing("random", SIZES[2]))
    compute = kernels()
    np.testing.assert_array_equal(compute(*problem), compute(*problem))


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_no_rows(backend: str) -> None:
    x, ids, weights, gate_up, down = stored_problem("fp8", SIZES[2], "bfloat16", np.zeros((17, 3), int))
    out = routed_experts(x[:0], ids[:0], weights[:0], gate_up, down, GROUP, backend=backend)
    assert out.shape == (0, SIZES[2].hidden) and out.dtype == jnp.float32


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([(3, 2, 4, 4), (40, 3, 7, 4), (300, 2, 5, 16)]), st.integers(-2, 3))
def test_tiles_hold_every_assignment_once(data: st.DataObject, shape: tuple[int, ...], first: int) -> None:
    """Both ways of planning: by comparing, and by sorting."""
    rows, each, experts, tile_rows = shape
    ids = data.draw(routings_of(rows, each, experts))
    plan = np.asarray(plan_of(ids, first, experts, tile_rows))
    assert plan.shape == (tile_bound(ids.size, experts, tile_rows), tile_rows)
    local = ids.reshape(-1) - first
    here = (local >= 0) & (local < experts)
    assert sorted(plan[plan >= 0]) == list(np.flatnonzero(here))
    used = plan[(plan >= 0).any(axis=1)]
    assert (plan[: len(used)] == used).all(), "tiles that are not used come last"
    owners = []
    for tile in used:
        held = tile[tile >= 0]
        assert (tile[: len(held)] == held).all() and (np.diff(held) > 0).all()
        assert len(set(local[held])) == 1
        owners.append(local[held[0]])
    assert owners == sorted(owners)
    counts = np.bincount(local[here], minlength=experts)
    assert len(used) == sum(-(-counts // tile_rows))


plan_of = jax.jit(plan_tiles, static_argnums=(2, 3))


@st.composite
def routings_of(draw: st.DrawFn, rows: int, each: int, experts: int) -> np.ndarray:
    """Random, or to few experts."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    among = rng.permutation(experts)[: draw(st.integers(1, experts))]
    return rng.choice(among, (rows, each)).astype(np.int32)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        pytest.param(
            kind, SIZES[number], id=f"{kind}-{SIZES[number]}", marks=[] if quick else pytest.mark.slow
        )
        for kind in KINDS
        for number in (0, 1, 3)
        for quick in [(kind, number) in (("nvfp4", 0), ("fp8", 1), ("plain", 3))]
    ],
)
def test_declared_costs_are_the_kernels_own(moved: Callable[[], Cost], kind: str, sizes: Sizes) -> None:
    ids = routing("random", sizes)
    x, ids, weights, gate_up, down = stored_problem(kind, sizes, "bfloat16", ids)
    jax.block_until_ready(kernels()(x, ids, weights, gate_up, down))
    found, forms = moved(), (form_of(gate_up, x.dtype), form_of(down, x.dtype))
    counts = np.bincount(np.asarray(ids).ravel())
    given = sizes.rows, sizes.each, sizes.experts, *forms
    rows = tiling.tiling(*given).rows
    used_tiles = sum(-(-counts // rows))
    loaded = loads(*given, used_tiles, 2)
    declared = cost(*given, (counts > 0).sum(), 2)
    assert found.bytes_read == loaded.total and found.bytes_written == declared.bytes_written
    # The declared products are those of full tiles, as far as assignments fill them.
    least = max((counts > 0).sum(), ids.size / rows)
    assert found.flops == pytest.approx(declared.flops * used_tiles / least, rel=1e-6)
    # Each chosen expert is read once by its tiles, one where its rows fit.
    one = (nbytes(gate_up) + nbytes(down)) // (GROUPS * sizes.experts)
    floats = sum(nbytes(part[1:]) for part in (gate_up, down)) // (GROUPS * sizes.experts)
    codes = one - (floats if kind == "fp8" else 12 if kind == "nvfp4" else 0)
    assert loaded.codes == used_tiles * codes
    assert declared.bytes_read > (counts > 0).sum() * one


def test_experts_that_rows_are_expected_to_choose() -> None:
    assert expected_experts(1, 256, 8) == pytest.approx(8)
    assert expected_experts(10_000, 256, 8) == pytest.approx(256)


def test_what_does_not_fit_is_refused() -> None:
    x, ids, weights, gate_up, down = stored_problem("nvfp4", SIZES[2], "bfloat16", np.zeros((17, 3), int))
    fitting = {"x": x, "expert_ids": ids, "weights": weights, "gate_up": gate_up, "down": down}
    routed_experts(**fitting, group=GROUP)
    one = Nvfp4Weight(*(part[0] for part in down))
    for name, unfitting, complaint in (
        ("x", x[:, :48], r"gate_up is \[2, 4, 2, 32, 64\], .*H = 48 \(x\)"),
        ("expert_ids", ids[:16], r"expert_ids is \[16, 3\], .*T = 17"),
        ("expert_ids", weights, "expert_ids is float32, but must be int32"),
        ("weights", weights[:, :2], r"weights is \[17, 2\], .*K = 3"),
        ("gate_up", down, r"gate_up is \[2, 4, 64, 32\]"),
        (
            "down",
            Nvfp4Weight(*(part[:, :3] for part in down)),
            r"down is \[2, 3, 64, 32\], .*E = 4 \(gate_up\)",
        ),
        ("down", one, "both or none must be stacked over the same groups"),
        ("first_expert", 1.5, "first_expert is float32, but must be int32"),
    ):
        with pytest.raises(ValueError, match=complaint):
            routed_experts(**{**fitting, "group": GROUP, name: unfitting})
