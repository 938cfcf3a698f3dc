"""Which implementation of an op runs: plain JAX, or a Pallas-Triton kernel."""

from collections.abc import Callable
from typing import Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array

Backend = Literal["auto", "reference", "triton", "interpret"]
"""auto: triton on NVIDIA GPUs, else reference, decided when a step is lowered. interpret: triton's kernels on any
platform, slowly, for tests."""

Out = TypeVar("Out")


def dispatch(
    backend: Backend, reference: Callable[..., Out], triton: Callable[..., Out], *arrays: Array
) -> Out:
    """reference(*arrays) or triton(*arrays, interpret=...), as the backend says.

    Raises ValueError for a word that is no Backend.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"there is no backend {backend!r}; use one of {', '.join(get_args(Backend))}")
    given = [jnp.asarray(array) for array in arrays]
    if backend == "reference":
        return reference(*given)
    if backend in ("triton", "interpret"):
        return triton(*given, interpret=backend == "interpret")
    return jax.lax.platform_dependent(
        *given, cuda=lambda *given: triton(*given, interpret=False), default=reference
    )
