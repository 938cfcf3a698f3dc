"""How XLA schedules the exchanges of decode steps at GLM-5.2's layer sizes, NVFP4 records, with the engine's own flags.

Programs of two lone Full layers and three share groups; the whole network's are behind the marker `slow`. Times are
modelled: no exposed time means that the modelled computation beside a transfer is longer than the modelled transfer.
"""

from collections import Counter

import pytest

from glm_dcp_jax import plan
from glm_dcp_jax.plan.decode_schedule import DecodeStep
from glm_dcp_jax.plan.exposure import Played, Timeline
from glm_dcp_jax.plan.link import default_link

FULL_LAYERS, SHARED_LAYERS = 5, 9
OUTSIDE_OF_LAYERS = {"embed", "head"}
SHORT = {
    "8xH200 MTP3": ("8xH200", {"drafts": 3}),
    "8xH200 C4": ("8xH200", {"requests": 4}),
    "4xRTX-PRO-6000 MTP0": ("4xRTX-PRO-6000", {}),
    "4xRTX-PRO-6000 MTP3": ("4xRTX-PRO-6000", {"drafts": 3}),
}
LATE = {"8xH200 C4": 2e-6}
"""Seconds by which the first group's first plane comes late: the dense feed-forward beside it is short and does not
grow with the rows. Two pieces would hide, but joining them takes as long."""


def step_of(name: str, path: str, **settings) -> DecodeStep:
    target = plan.target(name)
    return DecodeStep(target, path, target.count, target.count, **settings)


def played(step: DecodeStep) -> tuple[Timeline, dict[str, list[Played]]]:
    """The modelled step, and its collectives by purpose."""
    programs = step.compile()
    timeline = step.timeline([program.schedule for program in programs], default_link(step.target.gpu))
    by_purpose: dict[str, list[Played]] = {}
    for each in timeline.exchanges:
        by_purpose.setdefault(each.purpose, []).append(each)
    return timeline, by_purpose


def slow_but(default: str) -> list:
    return [name if name == default else pytest.param(name, marks=pytest.mark.slow) for name in SHORT]


@pytest.fixture(scope="module", params=slow_but("8xH200 MTP3"))
def bulk(request: pytest.FixtureRequest, absent_gpus) -> tuple[Timeline, dict[str, list[Played]]]:
    name, settings = SHORT[request.param]
    absent_gpus("h200", 1)  # skips where there is no compiler
    return played(step_of(name, "bulk", **settings))


def test_shared_layers_records_move_in_one_piece_each_and_hide_fully(bulk, request) -> None:
    """Nothing was merged by XLA's combiner, started late, or left without computation beside it."""
    shared = bulk[1]["shared_exchange"]
    transfers = {each.collective.kind for each in shared}
    each_plane = 1 if transfers == {"all-gather"} else max(each.collective.ranks for each in shared) - 1
    assert len(shared) == SHARED_LAYERS * each_plane
    assert not [each.collective.name for each in shared if each.collective.blocks]
    late = LATE.get(request.node.callspec.params["bulk"], 0.0)
    assert shared[0].exposed <= late
    assert [each.exposed for each in shared[1:]] == [0.0] * (len(shared) - 1)


def test_of_exchanges_only_the_full_layers_may_block(bulk) -> None:
    blocking = Counter(
        each.purpose for exchanges in bulk[1].values() for each in exchanges if each.collective.blocks
    )
    assert set(blocking) <= {"tp_all_reduce", "full_exchange"} | OUTSIDE_OF_LAYERS
    assert blocking["full_exchange"] <= FULL_LAYERS * max(
        each.collective.ranks for each in bulk[1]["full_exchange"]
    )


def test_conditionals_hold_the_overflows_exchanges_alone(bulk) -> None:
    timeline, by_purpose = bulk
    assert {each.purpose for each in timeline.overflow} == {"overflow"}
    assert "overflow" not in by_purpose


def test_every_instruction_that_takes_time_has_a_model(bulk) -> None:
    assert bulk[0].unknown == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["8xH200 MTP3", "4xRTX-PRO-6000 MTP0"])
def test_bulk_waits_for_fewer_exchanges_than_the_other_paths(name: str, absent_gpus) -> None:
    absent_gpus("h200", 1)
    target, settings = SHORT[name]
    waited = {}
    for path in ("queries", "records", "bulk"):
        _, by_purpose = played(step_of(target, path, **settings))
        of_attention = set(by_purpose) - OUTSIDE_OF_LAYERS - {"tp_all_reduce"}
        waited[path] = sum(
            each.times * each.exposed for purpose in of_attention for each in by_purpose[purpose]
        )
    assert waited["bulk"] <= waited["records"] < waited["queries"]


@pytest.mark.slow
def test_the_whole_network_hides_its_exchanges_in_two_programs_and_none_in_one(absent_gpus) -> None:
    """In one, the arguments exceed what XLA's scheduler works with: the reason for segments."""
    absent_gpus("h200", 1)
    _, two = played(step_of("8xH200", "bulk", drafts=3, layers="full"))
    assert not any(each.collective.blocks for each in two["shared_exchange"])
    assert sum(each.times * each.exposed for each in two["shared_exchange"]) == 0.0
    _, one = played(step_of("8xH200", "bulk", drafts=3, layers="full", segments=1))
    assert all(each.collective.blocks for each in one["shared_exchange"])
