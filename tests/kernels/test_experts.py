"""Routed experts against every chosen expert computed in float64, and how much arithmetic the compiled loop does."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding
from stored_weights import expert_by_expert

from glm_dcp_jax.kernels.experts import reference, routed_experts, tile_plan
from glm_dcp_jax.kernels.weights import PlainWeight, Weight

# rows, experts per row, experts, hidden, width; few shapes, because jax compiles each.
SHAPES = [(1, 1, 1, 3, 2), (1, 4, 8, 8, 4), (6, 2, 4, 8, 6), (40, 3, 5, 4, 7), (70, 1, 2, 6, 3)]


@jax.jit
def compute(x, expert_ids, weights, gate_up, down) -> jax.Array:
    return routed_experts(x, expert_ids, weights, PlainWeight(gate_up), PlainWeight(down))


def other_platforms_branch(*arguments, default, **branches):
    """What jax.lax.platform_dependent does anywhere but where a branch is named."""
    return default(*arguments)


@jax.jit
def compute_elsewhere(*arguments: jax.Array) -> jax.Array:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "platform_dependent", other_platforms_branch)
        return compute.__wrapped__(*arguments)


def random_weights(shape: tuple[int, ...], seed: int, dtype: type = np.float32) -> tuple[np.ndarray, ...]:
    rows, chosen, experts, hidden, width = shape
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, hidden)).astype(dtype)
    weights = rng.random((rows, chosen)).astype(np.float32)
    gate_up = rng.standard_normal((experts, 2, width, hidden)).astype(dtype)
    return x, weights, gate_up, rng.standard_normal((experts, hidden, width)).astype(dtype)


@st.composite
def routings(draw: st.DrawFn) -> tuple[tuple[int, ...], np.ndarray]:
    """Any routing: balanced or skewed, with an expert twice in a row, with experts that nobody chose."""
    shape = draw(st.sampled_from(SHAPES))
    rows, chosen, experts = shape[:3]
    popular = st.sampled_from(sorted({0, experts - 1, draw(st.integers(0, experts - 1))}))
    expert = draw(st.sampled_from([st.integers(0, experts - 1), popular]))
    ids = draw(st.lists(expert, min_size=rows * chosen, max_size=rows * chosen))
    return shape, np.array(ids, np.int32).reshape(rows, chosen)


@settings(max_examples=50, deadline=None)
@given(routings(), st.integers(0, 2**32 - 1))
def test_any_routing_gives_what_its_experts_give(
    routing: tuple[tuple[int, ...], np.ndarray], seed: int
) -> None:
    shape, expert_ids = routing
    x, weights, gate_up, down = random_weights(shape, seed)
    expected = expert_by_expert(x, expert_ids, weights, gate_up, down)
    for implementation in (compute, compute_elsewhere):
        out = implementation(x, expert_ids, weights, gate_up, down)
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("compute", [compute, compute_elsewhere])
@pytest.mark.parametrize("expert", [0, 2, 4])
def test_all_rows_to_one_expert(compute, expert: int) -> None:
    shape = (40, 3, 5, 4, 7)
    x, weights, gate_up, down = random_weights(shape, 1)
    expert_ids = np.full((40, 3), expert, np.int32)
    # What the other experts hold must not be looked at: NaN would spread through a multiplication by zero.
    others = np.arange(5) != expert
    gate_up[others], down[others] = np.nan, np.nan
    out = compute(x, expert_ids, weights, gate_up, down)
    np.testing.assert_allclose(
        out, expert_by_expert(x, expert_ids, weights, gate_up, down), rtol=1e-4, atol=2e-3
    )


@pytest.mark.parametrize("compute", [compute, compute_elsewhere])
def test_a_row_does_not_reach_another_rows_result(compute) -> None:
    """Rows of one tile are computed together; a row that went non-finite must stay alone with it."""
    shape = (40, 3, 5, 4, 7)
    x, weights, gate_up, down = random_weights(shape, 2)
    expert_ids = np.random.default_rng(3).integers(0, 5, (40, 3)).astype(np.int32)
    clean = np.asarray(compute(x, expert_ids, weights, gate_up, down))
    x[17] = np.nan
    found = np.asarray(compute(x, expert_ids, weights, gate_up, down))
    assert np.isnan(found[17]).all()
    np.testing.assert_array_equal(np.delete(found, 17, axis=0), np.delete(clean, 17, axis=0))


def test_bfloat16_is_summed_in_float32() -> None:
    shape = (40, 3, 5, 64, 32)
    x, weights, gate_up, down = random_weights(shape, 4, jnp.bfloat16)
    gate_up, down = gate_up * jnp.bfloat16(0.125), down * jnp.bfloat16(0.125)
    expert_ids = np.random.default_rng(5).integers(0, 5, (40, 3)).astype(np.int32)
    out = compute(x, expert_ids, weights, gate_up, down)
    assert out.dtype == jnp.float32
    expected = expert_by_expert(x, expert_ids, weights, gate_up, down)
    np.testing.assert_allclose(out, expected, atol=0.01 * np.abs(expected).max())


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=64).filter(any))
def test_the_tiles_hold_every_routing(counts: list[int]) -> None:
    """counts: assignments of each expert. Each begins a tile of its own, so sum(ceil(count / tile_rows)) are needed."""
    plan = tile_plan(sum(counts), len(counts))
    assert sum(-(-count // plan.tile_rows) for count in counts) <= plan.num_tiles


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 20_000), st.integers(1, 512))
def test_tiles_waste_at_most_one_tile_per_expert(assignments: int, experts: int) -> None:
    plan = tile_plan(assignments, experts)
    assert plan.num_tiles * plan.tile_rows <= assignments + min(experts, assignments) * plan.tile_rows


INSTRUCTION = re.compile(r"^\s*(?:ROOT )?(%\S+) = \w+\[([\d,]*)\]\S* ([\w-]+)\(([^)]*)\)(.*)$")
COMPUTATION = re.compile(r"^(?:ENTRY )?(%\S+) \(.*\{$")
CALLED = re.compile(r"(?:calls|to_apply|body)=(%[\w.-]+)")


class CompiledWork:
    """Multiply-adds of a compiled program: its matrix products, times the trip counts of the loops around them.

    products: [batch, m, n, k] of every matrix product that stands in the program's text.
    """

    def __init__(self, text: str) -> None:
        self.products: list[tuple[int, int, int, int]] = []
        self._shapes: dict[str, list[int]] = {}
        self._computations: dict[str, list[str]] = {}
        self._entry = name = ""
        for line in text.splitlines():
            if opened := COMPUTATION.match(line):
                name = opened[1]
                self._computations[name] = []
                self._entry = name if line.startswith("ENTRY") else self._entry
            elif name and " = " in line:
                self._computations[name].append(line)
                if made := INSTRUCTION.match(line):
                    self._shapes[made[1]] = [int(size) for size in made[2].split(",") if size]
        self.multiply_adds = self._count(self._entry)

    def _count(self, computation: str) -> int:
        total = 0
        for line in self._computations[computation]:
            made = INSTRUCTION.match(line)
            if made and made[3] == "dot":
                total += self._product(made)
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            times = int(trips[1]) if trips else 1
            total += times * sum(self._count(called) for called in CALLED.findall(line))
        return total

    def _product(self, dot: re.Match) -> int:
        left = self._shapes[dot[4].split(",")[0].strip()]

        def axes(kind: str) -> list[int]:
            found = re.search(rf"lhs_{kind}_dims={{([\d,]*)}}", dot[5])
            return [left[int(axis)] for axis in found[1].split(",")] if found else []

        k, batch = int(np.prod(axes("contracting"))), int(np.prod(axes("batch")))
        m, out = int(np.prod(left)) // k // batch, int(np.prod(self._shapes[dot[1]]))
        self.products.append((batch, m, out // m // batch, k))
        return out * k


def compiled_work(function, *shapes: tuple[tuple[int, ...], type]) -> CompiledWork:
    """Compiled for the CPU whatever the platform: its text names every product."""
    on_cpu = SingleDeviceSharding(jax.devices("cpu")[0])
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=on_cpu) for shape, dtype in shapes]
    return CompiledWork(jax.jit(function).lower(*arguments).compile().as_text())


def test_multiply_adds_are_counted_through_loops() -> None:
    def three_products(x: jax.Array, stack: jax.Array) -> jax.Array:
        x = jax.lax.fori_loop(0, 7, lambda _, x: jnp.tanh(x @ stack[0]), x)
        return jnp.einsum("mk,bkn->bmn", x, stack)

    work = compiled_work(three_products, ((4, 8), np.float32), ((3, 8, 8), np.float32))
    assert work.multiply_adds == 7 * 4 * 8 * 8 + 3 * 4 * 8 * 8


@pytest.mark.parametrize("rows", [1, 8, 64, 512])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_the_known_number_of_tiles_is_far_from_every_expert(
    rows: int, dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the loop has a known length, its work is the tiles', and far from every expert for every row."""
    monkeypatch.setattr(jax.lax, "platform_dependent", other_platforms_branch)
    chosen, experts, hidden, width = 4, 64, 48, 20
    plan = tile_plan(rows * chosen, experts)
    work = compiled_work(
        lambda *arguments: compute.__wrapped__(*arguments),
        ((rows, hidden), dtype),
        ((rows, chosen), np.int32),
        ((rows, chosen), np.float32),
        ((experts, 2, width, hidden), dtype),
        ((experts, hidden, width), dtype),
    )
    per_row = 3 * hidden * width
    assert work.multiply_adds == plan.num_tiles * plan.tile_rows * per_row
    wasted = min(experts, rows * chosen) * plan.tile_rows
    assert work.multiply_adds <= (rows * chosen + wasted) * per_row
    assert work.multiply_adds <= rows * experts * per_row / 4
    # One iteration multiplies a tile's rows with one expert: no product is batched over experts.
    one_tile = {(1, plan.tile_rows, 2 * width, hidden), (1, plan.tile_rows, hidden, width)}
    turned = {(batch, n, m, k) for batch, m, n, k in one_tile}
    assert len(work.products) == 2
    assert set(work.products) <= one_tile | turned


@pytest.mark.parametrize("rows", [1, 8, 64, 512])
def test_only_chosen_experts_are_computed(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What really runs on the CPU: every chosen expert once, on its own rows, rounded up to whole tiles."""
    runs = []
    own = reference.gated

    def counted(x: jax.Array, gate_up: Weight) -> jax.Array:
        jax.debug.callback(lambda: runs.append(len(x)))
        return own(x, gate_up)

    monkeypatch.setattr(reference, "gated", counted)
    shape = (rows, 4, 64, 12, 5)
    x, weights, gate_up, down = random_weights(shape, 6)
    expert_ids = np.random.default_rng(7).integers(0, 64, (rows, 4)).astype(np.int32)
    jax.block_until_ready(jax.jit(lambda *a: compute.__wrapped__(*a))(x, expert_ids, weights, gate_up, down))
    jax.effects_barrier()
    tile_rows = tile_plan(rows * 4, 64).tile_rows
    assert sum(runs) == sum(-(-np.bincount(expert_ids.ravel()) // tile_rows)) * tile_rows
    assert sum(runs) < rows * 4 + 64 * tile_rows


def test_a_dense_mixture_would_be_noticed() -> None:
    """The same count on what must not happen: every expert for every row."""
    rows, experts, hidden, width = 16, 8, 12, 20
    work = compiled_work(
        lambda x, up: jnp.einsum("th,eih->eti", x, up),
        ((rows, hidden), np.float32),
        ((experts, width, hidden), np.float32),
    )
    assert work.multiply_adds == rows * experts * hidden * width
