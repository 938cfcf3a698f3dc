"""Cases of products with stored weights: linear and gated maps, and routed experts, of one of 8 ranks."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.weight_tiles import form_of
from glm_dcp_jax.kernels.weights import Fp8Weight, Nvfp4Weight, PlainWeight, Weight, nbytes
from kernel_check import ops
from kernel_check.case import LARGEST_L2, Case, Resident, Sizes
from kernel_check.differences import relative

LIMIT = {"output": 2.0**-8}
"""As a share of the largest magnitude: results, and what lies between two products, are rounded to bfloat16."""
KIND_NAMES = {"plain": "bfloat16", "fp8": "FP8", "nvfp4": "NVFP4"}
_WEIGHTS = {"plain": PlainWeight, "fp8": Fp8Weight, "nvfp4": Nvfp4Weight}
_FP8_BLOCK = 128


def weight_cases(sizes: Sizes) -> Iterator[Case]:
    """Every kind and number of rows; plain products of a prompt's rows are XLA's own."""
    for kind in sizes.weights:
        for rows in (*sizes.rows, *([] if kind == "plain" else [sizes.prefill])):
            yield _map("linear", kind, rows, (sizes.hidden, sizes.hidden // 3), sizes)
            yield _map("gated_linear", kind, rows, (2, sizes.hidden // 4, sizes.hidden), sizes)
            yield _experts(kind, rows, sizes)


def _random(kind: str, key: PRNGKeyArray, *shape: int) -> Weight:
    """Codes and scales of which none is NaN; values of about the size that keeps results near 1."""
    *stack, outputs, inputs = shape
    size = inputs**-0.5

    def e4m3(number: int, most: int, *shape: int) -> Array:
        codes = jax.random.randint(jax.random.fold_in(key, number), shape, 0, most, jnp.uint8)
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)

    def scales(number: int, *shape: int) -> Array:
        return size * jax.random.uniform(jax.random.fold_in(key, number), shape, minval=0.5)

    if kind == "plain":
        return PlainWeight(size * jax.random.normal(key, shape, jnp.bfloat16))
    if kind == "fp8":
        blocks = (max(n // _FP8_BLOCK, 1) for n in (outputs, inputs))
        sign = jax.random.randint(jax.random.fold_in(key, 2), shape, 0, 2, jnp.uint8) << 7
        codes = jax.lax.bitcast_convert_type(e4m3(0, 0x40, *shape), jnp.uint8) | sign
        return Fp8Weight(jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), scales(1, *stack, *blocks))
    codes = jax.random.bits(jax.random.fold_in(key, 0), (*stack, outputs, inputs // 2), jnp.uint8)
    return Nvfp4Weight(codes, e4m3(1, 0x38, *stack, outputs, inputs // 16), scales(2, *stack))


def _groups(one: int, sizes: Sizes) -> int:
    """As many as do not fit a cache, or as there is room for."""
    return max(min(-(-3 * LARGEST_L2 // one), sizes.pool_bytes // one, 4 * sizes.calls), 1)


def _shaped(kind: str, shape: tuple[int, ...]) -> Weight:
    """A weight's arrays as shapes."""
    return jax.eval_shape(lambda: _random(kind, jax.random.key(0), *shape))


def _resident(name: str, kind: str, groups: int, *shapes: tuple[int, ...]) -> Resident:
    """The arrays of weights of these shapes, for each of the groups."""

    def make(key: PRNGKeyArray) -> tuple[Array, ...]:
        keys = jax.random.split(key, len(shapes))
        weights = [_random(kind, each, groups, *shape) for each, shape in zip(keys, shapes, strict=True)]
        return tuple(part for weight in weights for part in weight)

    return Resident(f"{name} of {KIND_NAMES[kind]}, {groups} groups", make)


def _weights(kind: str, resident: tuple[Array, ...]) -> list[Weight]:
    made = _WEIGHTS[kind]
    each = len(made._fields)
    return [made(*resident[start : start + each]) for start in range(0, len(resident), each)]


def _map(op: str, kind: str, rows: int, shape: tuple[int, ...], sizes: Sizes) -> Case:
    weight = _shaped(kind, shape)
    one = nbytes(weight)
    groups = _groups(one, sizes)

    def place(resident: tuple[Array, ...], number: int) -> tuple[Weight, int]:
        return _weights(kind, resident)[0], groups - 1 - number % groups

    def run(place: Any, x: Array, scale: Array, backend: Any) -> Array:
        return getattr(ops, op)(x * scale, *place, backend=backend)

    def differences(resident: Any, x: Array, scale: Array, expected: Any, backend: Any) -> dict[str, Array]:
        at = place(resident, 0)
        exact = run(at, x.astype(jnp.float32), scale.astype(jnp.float32), "reference")
        return {"output": relative(run(at, x, scale, backend).astype(jnp.float32), exact)}

    outputs, inputs = shape[-2:]
    return Case(
        op=op,
        shape=f"{KIND_NAMES[kind]}, {rows} rows, {inputs} to {outputs}",
        cost=ops.linear_cost(rows, form_of(weight, jnp.bfloat16), len(shape) - 1, 2, 2),
        resident=_resident(f"weights {list(shape)}", kind, groups, shape),
        rotated_bytes=groups * one,
        calls=groups,
        place=place,
        fixed=lambda key: jax.random.normal(key, (rows, inputs), jnp.bfloat16),
        # A power of two: XLA need not round the product of others, and does so on one side only.
        fresh=lambda key, awkward: jnp.exp2(jax.random.randint(key, (), -1, 2)).astype(jnp.bfloat16),
        run=run,
        differences=differences,
        limits=LIMIT,
    )


def _experts(kind: str, rows: int, sizes: Sizes) -> Case:
    experts, each, hidden, width = sizes.experts, sizes.experts_each, sizes.hidden, sizes.expert_width
    made = (experts, 2, width, hidden), (experts, hidden, width)
    weights = [_shaped(kind, shape) for shape in made]
    one = nbytes(weights)
    groups = _groups(one, sizes)
    forms = [form_of(weight, jnp.bfloat16) for weight in weights]

    def place(resident: tuple[Array, ...], number: int) -> tuple[Weight, Weight, int]:
        return (*_weights(kind, resident), groups - 1 - number % groups)

    def fresh(key: PRNGKeyArray, awkward: bool) -> Array:
        """Each row's experts, all different; awkward ones go to two experts, the last among them, in every row."""
        if awkward:
            return jnp.where(jnp.arange(rows * each).reshape(rows, each) % 3 == 0, experts - 1, 1)
        chosen = jax.random.uniform(key, (rows, experts))
        return jax.lax.top_k(chosen, each)[1].astype(jnp.int32)

    def run(place: Any, given: tuple[Array, Array], ids: Array, backend: Any) -> Array:
        x, weights = given
        return ops.routed_experts(x, ids, weights, *place, backend=backend)

    def differences(resident: Any, given: Any, ids: Array, expected: Any, backend: Any) -> dict[str, Array]:
        at, (x, weights) = place(resident, 0), given
        exact = run(at, (x.astype(jnp.float32), weights), ids, "reference")
        return {"output": relative(run(at, given, ids, backend), exact)}

    used = round(ops.expected_experts(rows, experts, each))
    cost: Cost = ops.routed_experts_cost(rows, each, experts, *forms, used, 2)
    return Case(
        op="routed_experts",
        shape=f"{KIND_NAMES[kind]}, {rows} rows, {used} of {experts} experts",
        cost=cost,
        resident=_resident(f"{experts} experts", kind, groups, *made),
        rotated_bytes=groups * one,  # each iteration chooses anew
        calls=groups,
        place=place,
        fixed=lambda key: (
            jax.random.normal(key, (rows, hidden), jnp.bfloat16),
            jax.random.uniform(jax.random.fold_in(key, 1), (rows, each)),
        ),
        fresh=fresh,
        run=run,
        differences=differences,
        limits=LIMIT,
    )
