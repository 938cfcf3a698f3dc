"""The compiled programs of a case: one that compares, and timing loops.

A call takes microseconds and its dispatch from the host about 100, so calls are timed inside one program: a scan over
inputs that differ in each iteration, whose body calls the op once on each of several places of the resident arrays. A
place is constant and other inputs are shared by the calls, so that the body holds next to nothing but calls.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.stages import Compiled, Wrapped
from jaxtyping import Array, PRNGKeyArray

from glm_dcp_jax.kernels.dispatch import Backend
from kernel_check.case import Case

RESULT_BYTES = 2**30
"""What the results of one iteration's calls may take together: they are all alive at its end."""


class Loop(NamedTuple):
    """How often a timing loop calls its op: iterations times calls."""

    iterations: int
    calls: int

    @property
    def total(self) -> int:
        """Calls of one run."""
        return self.iterations * self.calls


class Shapes(NamedTuple):
    """Of a case's arrays, without making them. fresh: of one iteration."""

    resident: Any
    fixed: Any
    fresh: Any
    expected: Any


def shapes(case: Case) -> Shapes:
    """What the programs of a case take."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    fixed = jax.eval_shape(case.fixed, key)
    fresh = jax.eval_shape(partial(case.fresh, awkward=False), key)
    expected = () if case.expected is None else jax.eval_shape(case.expected, fixed, fresh)
    return Shapes(jax.eval_shape(case.resident.make, key), fixed, fresh, expected)


def calls_that_fit(case: Case, given: Shapes) -> int:
    """As many calls as there are places for, and as their results leave room for."""
    if case.in_place:
        return case.calls
    call = lambda *arrays: case.run(case.place(arrays[0], 0), *arrays[1:], "reference")  # noqa: E731
    result = jax.eval_shape(call, given.resident, given.fixed, given.fresh)
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(result))
    return max(min(case.calls, RESULT_BYTES // nbytes), 1)


def comparison(case: Case, backend: Backend) -> Wrapped:
    """(resident, fixed, fresh, expected) to the case's differences."""
    return jax.jit(partial(case.differences, backend=backend))


def repeated(case: Case, calls: int, backend: Backend) -> Wrapped:
    """(resident, fixed, fresh of each iteration) to (resident, a number that needs every call's result).

    resident is donated where the op works in place. No calls: the empty loop.
    """

    def iteration(resident: Any, fixed: Any, fresh: Any) -> tuple[Any, Array]:
        op = jax.jit(partial(case.run, backend=backend))  # traced once for all calls
        needed = _first(fresh)
        for number in range(calls):
            result = op(case.place(resident, number), fixed, fresh)
            if case.in_place:
                resident = (result,)
            else:
                needed += _first(result)
        return resident, needed

    def in_place(resident: Any, fixed: Any, each: Any) -> tuple[Any, Array]:
        resident, needed = jax.lax.scan(lambda carry, fresh: iteration(carry, fixed, fresh), resident, each)
        return resident, needed[-1]

    def reading(resident: Any, fixed: Any, each: Any) -> tuple[Any, Array]:
        def step(total: Array, fresh: Any) -> tuple[Array, None]:
            return total + iteration(resident, fixed, fresh)[1], None

        return (), jax.lax.scan(step, jnp.float32(0), each)[0]

    if case.in_place:
        return jax.jit(in_place, donate_argnums=0)
    return jax.jit(reading)


def several(fresh: Any, iterations: int) -> Any:
    """Shapes of one iteration's inputs as those of many."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((iterations, *leaf.shape), leaf.dtype), fresh)


@dataclass(frozen=True)
class Programs:
    """A case's programs, compiled.

    inputs: a key to the fixed inputs, one iteration's awkward ones, and those of each iteration. kernel, reference:
    timing loops, and how often they call.
    """

    inputs: Compiled
    compare: Compiled
    kernel: Compiled
    kernel_loop: Loop
    reference: Compiled
    reference_loop: Loop


def compile_case(case: Case, backend: Backend, kernel: Loop, reference: Loop) -> Programs:
    """Compile a case's programs. kernel, reference: most iterations and calls of the timing loops; kernel has more."""
    given = shapes(case)
    kernel, reference = (
        Loop(most.iterations, min(most.calls, calls_that_fit(case, given))) for most in (kernel, reference)
    )

    def compiled(loop: Loop, on: Backend) -> Compiled:
        program = repeated(case, loop.calls, on)
        return program.lower(given.resident, given.fixed, several(given.fresh, loop.iterations)).compile()

    return Programs(
        inputs=jax.jit(partial(_inputs, case, kernel.iterations)).lower(jax.random.key(0)).compile(),
        compare=comparison(case, backend).lower(*given).compile(),
        kernel=compiled(kernel, backend),
        kernel_loop=kernel,
        reference=compiled(reference, "reference"),
        reference_loop=reference,
    )


def _inputs(case: Case, iterations: int, key: PRNGKeyArray) -> tuple[Any, Any, Any]:
    fixed, awkward, each = jax.random.split(key, 3)
    fresh = jax.vmap(partial(case.fresh, awkward=False))(jax.random.split(each, iterations))
    return case.fixed(fixed), case.fresh(awkward, True), fresh


def _first(result: Any) -> Array:
    """The sum of every array's first element."""
    firsts = (leaf[(0,) * leaf.ndim].astype(jnp.float32) for leaf in jax.tree.leaves(result))
    return sum(firsts, jnp.float32(0))
