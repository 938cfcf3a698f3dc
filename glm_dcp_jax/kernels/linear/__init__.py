"""Linear maps with weights that may be quantised, and may be stacked over the layers of a scan."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from glm_dcp_jax.kernels.dispatch import Backend, dispatch
from glm_dcp_jax.kernels.fit import check_axes, check_dtype, check_floats, int32
from glm_dcp_jax.kernels.linear import reference, triton
from glm_dcp_jax.kernels.weights import NVFP4_GROUP, Fp8Weight, Nvfp4Weight, PlainWeight, Weight, shape_of

__all__ = ["MOST_OWN_ROWS", "check_weight", "gated_linear", "linear"]

MOST_OWN_ROWS = 64
"""With more rows, XLA's own products with plain weights are faster than ours, though they copy the matrix first."""


def linear(
    x: Float[Array, "T I"],
    weight: Weight,
    group: Int[Array, ""] | int = 0,
    out_dtype: DTypeLike | None = None,
    backend: Backend = "auto",
) -> Float[Array, "T O"]:
    """x @ weight.T, accumulated in float32, in out_dtype (None: x's).

    weight: [O, I], or [G, O, I] stacked over the groups of a scan, of which `group` is used. x: float32, bfloat16 or
    float16; kernels multiply codes in its dtype, which holds them exactly, and scale the sums. Raises ValueError for
    arrays that do not fit together, for FP8 weights of 2 GiB or more whose inputs, or those of a block, are no multiple
    of 4, and for 2 GiB or more of NVFP4's scales.
    """
    out_dtype = x.dtype if out_dtype is None else out_dtype
    return _dispatch(
        backend,
        partial(reference.linear, out_dtype=out_dtype),
        partial(triton.linear, out_dtype=out_dtype),
        x,
        weight,
        group,
        "O I",
    )


def gated_linear(
    x: Float[Array, "T I"], weight: Weight, group: Int[Array, ""] | int = 0, backend: Backend = "auto"
) -> Float[Array, "T O"]:
    """silu(x @ gate.T) * (x @ up.T) in x's dtype, both products and what is made of them in float32.

    weight: gate and up, [2, O, I], or [G, 2, O, I] stacked over the groups of a scan, of which `group` is used. Raises
    ValueError as `linear` does.
    """
    return _dispatch(backend, reference.gated_linear, triton.gated_linear, x, weight, group, "2 O I")


def _dispatch(
    backend: Backend,
    plain: Callable[..., Array],
    kernel: Callable[..., Array],
    x: Array,
    weight: Weight,
    group: Int[Array, ""] | int,
    letters: str,
) -> Array:
    check_axes({}, x=(x, "T I"))
    check_floats(x=x)
    check_weight("weight", weight, letters, I=(x.shape[1], "x"))
    group = int32("group", group)
    check_axes({}, group=(group, ""))
    if backend == "auto" and isinstance(weight, PlainWeight) and x.shape[0] > MOST_OWN_ROWS:
        return plain(x, weight, group)
    parts, structure = jax.tree.flatten(weight)

    def whole(op: Callable[..., Array]) -> Callable[..., Array]:
        return lambda x, group, *parts, **options: op(
            x, jax.tree.unflatten(structure, parts), group, **options
        )

    return dispatch(backend, whole(plain), whole(kernel), x, group, *parts)


def check_weight(name: str, weight: Weight, letters: str, **sizes: tuple[int, str]) -> None:
    """Raise ValueError unless the weight has the axes that its letters name, with or without one over groups in front.

    sizes: that letters must have, and what asks for them; a number among the letters is its own size.
    """
    sizes |= {letter: (int(letter), name) for letter in letters.split() if letter.isdigit()}
    *stack, outputs, inputs = letters.split()
    shape = shape_of(weight)
    front = "G " if len(shape) == len(letters.split()) + 1 else ""
    whole = jax.eval_shape(lambda: jnp.zeros(shape))
    check_axes(sizes, **{name: (whole, front + letters)})
    if isinstance(weight, PlainWeight):
        check_floats(**{name: weight.values})
        return
    over = front + " ".join(stack)
    known = {letter: (size, name) for letter, size in zip((front + letters).split(), shape, strict=True)}
    if isinstance(weight, Fp8Weight):
        check_axes(known, **{f"{name}.scales": (weight.scales, f"{over} Ob Ib")})
        check_dtype(jnp.float8_e4m3fn, "FP8 weights", **{f"{name}.codes": weight.codes})
        blocks = weight.scales.shape[-2:]
        if 0 in blocks or shape[-2] % blocks[0] or shape[-1] % blocks[1]:
            raise ValueError(
                f"{name}.scales has {blocks[0]} x {blocks[1]} blocks, which are not even shares of "
                f"{shape[-2]} x {shape[-1]} codes; repeat scales until blocks are"
            )
    elif isinstance(weight, Nvfp4Weight):
        if shape[-1] % NVFP4_GROUP:
            raise ValueError(f"{name} has {shape[-1]} inputs, but NVFP4 needs a multiple of {NVFP4_GROUP}")
        groups = {**known, "I/16": (shape[-1] // NVFP4_GROUP, name)}
        check_axes(groups, **{f"{name}.scales": (weight.scales, f"{over} {outputs} {inputs}/16")})
        check_axes(known, **{f"{name}.outer": (weight.outer, over)})
        check_dtype(jnp.uint8, "NVFP4 weights", **{f"{name}.codes": weight.codes})
        check_dtype(jnp.float8_e4m3fn, "NVFP4 weights", **{f"{name}.scales": weight.scales})
