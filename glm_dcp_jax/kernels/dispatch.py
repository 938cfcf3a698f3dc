"""Which implementation of an op runs: plain JAX, or a Pallas-Triton kernel."""

from collections.abc import Callable
from typing import Literal, TypeVar

import jax
from jaxtyping import Array

Backend = Literal["auto", "reference", "triton", "interpret"]
"""auto: triton on NVIDIA GPUs, else reference, decided when a step is lowered. interpret: triton's kernels on any
platform, slowly, for tests."""

Out = TypeVar("Out")


def dispatch(
    backend: Backend, reference: Callable[..., Out], triton: Callable[..., Out], *arrays: Array
) -> Out:
    """reference(*arrays) or triton(*arrays, interpret=...), as the backend says."""
    if backend == "reference":
        return reference(*arrays)
    if backend in ("triton", "interpret"):
        return triton(*arrays, interpret=backend == "interpret")
    return jax.lax.platform_dependent(
        *arrays, cuda=lambda *given: triton(*given, interpret=False), default=reference
    )
