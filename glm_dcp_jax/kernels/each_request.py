"""Run a computation for each request of a block, the way its platform likes it, in bounded workspace."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jaxtyping import Array

from glm_dcp_jax.kernels.row_blocks import WORKSPACE_BYTES

Out = TypeVar("Out")


def each_request(compute: Callable[..., Out], bytes_each: int, *arrays: Array) -> Out:
    """compute on every entry of the arrays' leading axis; results are stacked along it.

    bytes_each: the largest intermediate of one entry. On a GPU as many run at once as the workspace holds. On the CPU
    one after the other: XLA:CPU transposes the large operand of a batched product first, which costs more than the
    product.
    """
    count = arrays[0].shape[0]
    together = max(1, min(count, WORKSPACE_BYTES // max(bytes_each, 1)))

    def in_turn(*parts: Array) -> Out:
        return jax.lax.map(lambda part: compute(*part), parts)

    def at_once(*parts: Array) -> Out:
        if together == count:
            return jax.vmap(compute)(*parts)
        return jax.lax.map(lambda part: compute(*part), parts, batch_size=together)

    return jax.lax.platform_dependent(*arrays, cpu=in_turn, default=at_once)
