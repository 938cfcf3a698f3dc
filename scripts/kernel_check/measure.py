"""Compares and times a case on the device, and measures what the device can do: a copy and a matrix product."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from kernel_check.case import LARGEST_L2, Case
from kernel_check.programs import Loop, Programs

WARM_UPS = 2


@dataclass(frozen=True)
class Effort:
    """How much is run. kernel, reference: most iterations and calls of a timing loop. repeats: how often each is timed.

    copy_bytes: what the copy reads, and what it writes. matmul: side of the square matrices.
    """

    kernel: Loop = Loop(32, 16)
    reference: Loop = Loop(8, 2)
    repeats: int = 9
    copy_bytes: int = 2**30
    matmul: int = 8192


@dataclass(frozen=True)
class Device:
    """What one kernel of XLA's reaches in this run. copy: bytes read and written per second. matmul: FLOP/s.

    is_gpu: false in a rehearsal, on a CPU.
    """

    copy: float
    matmul: float
    is_gpu: bool = True


@dataclass(frozen=True)
class Seconds:
    """Of one call: the median of all repeats, and the fastest."""

    median: float
    fastest: float


@dataclass(frozen=True)
class Result:
    """A case's outcome. error: why there is none. differences: figures and their limits, by name."""

    op: str
    shape: str
    bytes_moved: int
    flops: int
    rotated_bytes: int
    error: str | None = None
    differences: dict[str, tuple[float, float]] = field(default_factory=dict)
    kernel: Seconds | None = None
    reference: Seconds | None = None

    @property
    def failures(self) -> list[str]:
        """Figures above their limits; NaN is above every limit."""
        found = self.differences.items()
        return [f"{name} {value:.3g} > {limit:.3g}" for name, (value, limit) in found if not value <= limit]

    @property
    def passed(self) -> bool:
        """Whether it ran, and agrees with its reference."""
        return self.error is None and not self.failures

    @property
    def in_cache(self) -> bool:
        """Whether what the timing loop reads may stay in the L2 from one iteration to the next."""
        return self.rotated_bytes < 2 * LARGEST_L2

    def floor(self, device: Device) -> tuple[str, float]:
        """What bounds the op on this device, "copy" or "matmul", and the seconds that this takes."""
        floors = {"copy": self.bytes_moved / device.copy, "matmul": self.flops / device.matmul}
        return max(floors.items(), key=lambda item: item[1])

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        return asdict(self) | {"passed": self.passed}


def check(
    case: Case, programs: Programs, resident: Any, key: PRNGKeyArray, empty: float, repeats: int
) -> tuple[Result, Any]:
    """Compare and time a case. empty: seconds of the empty loop. Returns the result, and the resident arrays again."""
    fixed, awkward, fresh = programs.inputs(key)
    figures = programs.compare(resident, fixed, awkward, _expected(case, fixed, awkward))
    differences = {name: (float(value), case.limits[name]) for name, value in figures.items()}
    few = jax.tree.map(lambda leaf: leaf[: programs.reference_loop.iterations], fresh)
    times = []
    for program, loop, inputs in (
        (programs.kernel, programs.kernel_loop, fresh),
        (programs.reference, programs.reference_loop, few),
    ):
        state = [resident]

        def run(program: Any = program, inputs: Any = inputs, state: list[Any] = state) -> Array:
            changed, needed = program(state[0], fixed, inputs)
            state[0] = changed or state[0]
            return needed

        times.append(_per_call(seconds(run, repeats), empty, loop.total))
        resident = state[0]
    measured = replace(untried(case), differences=differences, kernel=times[0], reference=times[1])
    return measured, resident


def untried(case: Case, error: str | None = None) -> Result:
    """What is known of a case before it runs, or when it cannot."""
    cost = case.cost
    return Result(case.op, case.shape, cost.bytes_moved, cost.flops, case.rotated_bytes, error)


def seconds(run: Callable[[], Array], repeats: int) -> list[float]:
    """What each run takes, from its dispatch until its result is there."""
    for _ in range(WARM_UPS):
        jax.block_until_ready(run())
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    return taken


def _per_call(taken: list[float], empty: float, calls: int) -> Seconds:
    least = 1e-9  # the empty loop's own noise may exceed what a rehearsal takes
    return Seconds(*(max(taken - empty, least) / calls for taken in (median(taken), min(taken))))


def _expected(case: Case, fixed: Any, fresh: Any) -> Any:
    """The case's expected result, computed on the CPU and copied to the default device."""
    if case.expected is None:
        return ()
    host = jax.local_devices(backend="cpu")[0]
    wanted = jax.jit(case.expected)(*jax.device_put((fixed, fresh), host))
    return jnp.asarray(np.asarray(wanted))


def empty_loop(iterations: int, repeats: int) -> float:
    """Seconds of a timing loop that calls nothing: its dispatch, its iterations and the wait for its end."""

    @jax.jit
    def loop(each: Array) -> Array:
        step = lambda total, fresh: (total + fresh[0].astype(jnp.float32), None)  # noqa: E731
        return jax.lax.scan(step, jnp.float32(0), each)[0]

    each = jnp.ones((iterations, 1024), jnp.int32)
    return median(seconds(lambda: loop(each), repeats))


def measure_device(effort: Effort) -> Device:
    """A copy, here an addition of 1 to every number of a large array, and a product of bfloat16 matrices."""
    iterations, side = effort.kernel.iterations, effort.matmul

    @partial(jax.jit, donate_argnums=0)
    def copies(x: Array) -> Array:
        return jax.lax.fori_loop(0, iterations, lambda _, x: x + 1, x)

    @partial(jax.jit, donate_argnums=0)
    def products(x: Array, weights: Array) -> Array:
        product = partial(jnp.matmul, precision="default")
        return jax.lax.fori_loop(0, iterations, lambda _, x: product(x, weights), x)

    x, weights = jax.random.normal(jax.random.key(0), (2, side, side)).astype(jnp.bfloat16)
    state = {"copy": jnp.zeros(effort.copy_bytes // 4, jnp.int32), "matmul": x}
    weights *= side**-0.5  # products stay as large as x

    def copy() -> Array:
        state["copy"] = copies(state["copy"])
        return state["copy"]

    def matmul() -> Array:
        state["matmul"] = products(state["matmul"], weights)
        return state["matmul"]

    empty = empty_loop(iterations, effort.repeats)
    rates = {"copy": 2 * effort.copy_bytes, "matmul": 2 * side**3}
    for name, run in (("copy", copy), ("matmul", matmul)):
        rates[name] /= _per_call(seconds(run, effort.repeats), empty, iterations).median
    return Device(**rates, is_gpu=jax.default_backend() == "gpu")
