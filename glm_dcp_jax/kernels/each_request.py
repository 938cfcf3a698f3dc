"""Run a computation for each request of a block, the way its platform likes it."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jaxtyping import Array

Out = TypeVar("Out")


def each_request(compute: Callable[..., Out], *arrays: Array) -> Out:
    """compute on every entry of the arrays' leading axis; results are stacked along it.

    All at once on a GPU. One after the other on the CPU: XLA:CPU transposes the large operand of a batched product
    first, which costs more than the product.
    """

    def in_turn(*parts: Array) -> Out:
        return jax.lax.map(lambda part: compute(*part), parts)

    def at_once(*parts: Array) -> Out:
        return jax.vmap(compute)(*parts)

    return jax.lax.platform_dependent(*arrays, cpu=in_turn, default=at_once)
