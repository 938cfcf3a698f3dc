"""All decode paths over one cache: each equals float64 attention, and `records` and `bulk` are equal bit for bit.

A case is what is compiled; each is run on every kind of selection that could upset an exchange.
"""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))

from decode_problem import Case, Choose, Problem, expected, problem, program

from glm_dcp_jax.parallel.queries import QueriesDecode
from glm_dcp_jax.parallel.records import BulkDecode, RecordsDecode

PATHS = {"queries": QueriesDecode, "records": RecordsDecode, "bulk": BulkDecode}

CASES = [
    Case(2),
    Case(2, rows=4, lengths=(37, 5, 64), backend="a2a"),
    Case(2, replicas=4, interleave=4, rows=2, topk=16),
    Case(3, heads=6, rows=3, lengths=(90,)),
    Case(4, transport="ce", rows=8, lengths=(70, 9), topk=32),
    Case(4, replicas=2, record="nvfp4_ds_mla", rows=4),
    Case(4, record="bfloat16", interleave=2, transport="ce"),
    Case(4, record="fp8_ds_mla", lengths=(3, 20, 33, 41, 12, 8, 77, 64), exchange_bytes=2000),
    Case(8, record="nvfp4_ds_mla", interleave=4, rows=8, exchange_bytes=1, topk=16),
    Case(8, block_size=16, interleave=16, lengths=(300, 17), topk=64, rows=2, transport="ce", backend="a2a"),
]
"""exchange_bytes of 1 to 2000 leave room for a few records: the rest goes in rounds."""


def anything(rng: np.random.Generator, case: Case, row: int, visible: int) -> np.ndarray:
    return rng.permutation(visible)[: case.topk]


def of_one_owner(rng: np.random.Generator, case: Case, row: int, visible: int) -> np.ndarray:
    positions = np.arange(visible)
    return rng.permutation(positions[case.layout.owner(positions) == case.world - 1])[: case.topk]


def the_same(rng: np.random.Generator, case: Case, row: int, visible: int) -> np.ndarray:
    return np.arange(visible - row)[: case.topk][::-1]


def disjoint(rng: np.random.Generator, case: Case, row: int, visible: int) -> np.ndarray:
    return np.arange(visible)[row :: case.rows][: case.topk]


def newest(rng: np.random.Generator, case: Case, row: int, visible: int) -> np.ndarray:
    """Mostly rows of this very step."""
    return np.arange(visible)[::-1][: case.topk]


def nothing(rng: np.random.Generator, case: Case, row: int, visible: int) -> np.ndarray:
    return np.arange(0)


KINDS = (anything, of_one_owner, the_same, disjoint, newest, nothing)


@cache
def compiled(case: Case, path: str) -> Callable[..., jax.Array]:
    return program(case, PATHS[path])


def given(case: Case, kind: Callable[..., np.ndarray], lengths: tuple[int, ...] | None = None) -> Problem:
    choose: Choose = lambda rng, request, row, visible: kind(rng, case, row, visible)  # noqa: E731
    return problem(case, choose, lengths=lengths)


def run(case: Case, path: str, problem: Problem) -> np.ndarray:
    return np.asarray(compiled(case, path)(*problem[:-1]))


def check(case: Case, problem: Problem, what: str) -> None:
    right = expected(case, problem)
    answers = {path: run(case, path, problem) for path in PATHS}
    for path, answer in answers.items():
        np.testing.assert_allclose(answer, right, rtol=0, atol=1e-4, err_msg=f"{path}, {what}")
    np.testing.assert_array_equal(answers["records"], answers["bulk"], what)


QUICK = {1, 4, 5, 7, 8}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if at in QUICK else pytest.mark.slow) for at, case in enumerate(CASES)],
    ids=str,
)
def test_every_path_attends_to_exactly_what_was_selected(case: Case, devices) -> None:
    devices(case.world * case.replicas)
    with jax.default_matmul_precision("highest"):
        for kind in KINDS:
            check(case, given(case, kind), kind.__name__)
        # As when requests have just begun, have finished, or are padding; the longest sets the shape.
        longest = max(case.lengths)
        for lengths in ((longest, -1), (0, longest), (longest, 1)):
            if len(case.lengths) > 1:
                lengths = (*lengths, *(-1,) * (len(case.lengths) - 2))
                check(case, given(case, anything, lengths), str(lengths))
