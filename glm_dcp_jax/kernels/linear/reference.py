"""Products with stored weights in plain JAX: the matrix in use is cut out of its stack, and dequantised."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from glm_dcp_jax.kernels.weights import PlainWeight, Weight, at, dequantised, shape_of


def linear(
    x: Float[Array, "T I"], weight: Weight, group: Int[Array, ""] | int, out_dtype: DTypeLike
) -> Float[Array, "T O"]:
    """See the op."""
    return product(x, _only(weight, group, stacked=3)).astype(out_dtype)


def gated_linear(x: Float[Array, "T I"], weight: Weight, group: Int[Array, ""] | int) -> Float[Array, "T O"]:
    """See the op."""
    return gated(x, _only(weight, group, stacked=4))


def product(x: Float[Array, "T I"], weight: Weight) -> Float[Array, "T O"]:
    """x @ weight.T in float32, which codes are taken to; weight: one matrix."""
    values = dequantised(weight)
    x = x if isinstance(weight, PlainWeight) else x.astype(jnp.float32)
    # A GPU would multiply float32 as TF32.
    exact = jax.lax.Precision.HIGHEST if jnp.promote_types(x.dtype, values.dtype) == jnp.float32 else None
    return jnp.einsum("ti,oi->to", x, values, precision=exact, preferred_element_type=jnp.float32)


def gated(x: Float[Array, "T I"], weight: Weight) -> Float[Array, "T O"]:
    """silu(x @ gate.T) * (x @ up.T), computed in float32, in x's dtype; weight: gate and up, [2, O, I]."""
    if isinstance(weight, PlainWeight):  # as one product, which XLA:CPU does faster than two
        both = product(x, PlainWeight(weight.values.reshape(-1, x.shape[1])))
        gate, up = jnp.split(both, 2, axis=1)
    else:
        gate, up = product(x, at(weight, 0)), product(x, at(weight, 1))
    return (jax.nn.silu(gate) * up).astype(x.dtype)


def _only(weight: Weight, group: Int[Array, ""] | int, stacked: int) -> Weight:
    """The matrices of a group; as they are where there is no axis over groups."""
    return at(weight, group) if len(shape_of(weight)) == stacked else weight
