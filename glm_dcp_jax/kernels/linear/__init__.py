"""Linear maps with weights that may be quantised, and may be stacked over the layers of a scan."""
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from glm_dcp_jax.kernels.dispatch import Backend, dispatch
from glm_dcp_jax.kernels.fit import int32
from glm_dcp_jax.kernels.linear import reference, triton
from glm_dcp_jax.kernels.weights import Weight

__all__ = ["gated_linear", "linear"]


def linear(
    x: Float[Array, "T I"],
    weight: Weight,
    group: Int[Array, ""] | int = 0,
    out_dtype: DTypeLike | None = None,
    backend: Backend = "auto",
) -> Float[Array, "T O"]:
    """x @ weight.T, accumulated in float32, in out_dtype (None: x's).

    weight: [O, I], or [G, O, I] stacked over the groups of a scan, of which `group` is used.
    """
    return reference.linear(x, weight, group, x.dtype if out_dtype is None else out_dtype)


def gated_linear(
    x: Float[Array, "T I"], weight: Weight, group: Int[Array, ""] | int = 0, backend: Backend = "auto"
) -> Float[Array, "T O"]:
    """silu(x @ gate.T) * (x @ up.T) in x's dtype, both products and what is made of them in float32.

    weight: gate and up, [2, O, I], or [G, 2, O, I] stacked over the groups of a scan, of which `group` is used.
    """
    return reference.gated_linear(x, weight, group)
