"""What a step waits for, on schedules whose times add up by hand.

The link takes 2 us, and 1 us for 1,000 bytes: a gather of `scheduled` is over 5 us after its start.
"""

import pytest
from scheduled import branches, compute, done, gather, loop, program, start

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.parallel.link import Link
from glm_dcp_jax.plan.exposure import Timeline, layer_span, one_after_the_other, play, purpose_of
from glm_dcp_jax.plan.kernel_costs import Workload
from glm_dcp_jax.plan.schedule import Schedule
from glm_dcp_jax.plan.times import Times

LINK = Link(2e-6, 1e9, "a test's")
TIMES = Times(Workload(RecordFormat.sized("bfloat16", 512, 64, 128), visible=4096), bandwidth=1e9)


def played(schedule: Schedule, **options) -> Timeline:
    return play(schedule, TIMES, LINK, **options)


def us(seconds: float) -> float:
    return round(seconds * 1e6, 6)


def exposed(timeline: Timeline) -> list[float]:
    return [us(each.exposed) for each in timeline.exchanges]


def test_a_gather_with_nothing_beside_it_is_waited_for_in_full():
    timeline = played(program(*gather("g"), compute("a", 3)))
    (found,) = timeline.exchanges
    assert found.collective.blocks
    assert (found.wire_bytes, us(found.seconds), us(found.exposed)) == (3000, 5, 5)
    assert (us(timeline.seconds), us(timeline.compute_seconds), us(timeline.exposed_seconds)) == (8, 3, 5)


def test_enough_compute_hides_a_gather():
    timeline = played(program(start("g"), compute("a", 2), compute("b", 4), done("g")))
    assert not timeline.exchanges[0].collective.blocks
    assert exposed(timeline) == [0]
    assert us(timeline.seconds) == 6


def test_too_little_compute_hides_part_of_it():
    timeline = played(program(start("g"), compute("a", 3), done("g")))
    assert exposed(timeline) == [2]
    assert us(timeline.seconds) == 5


def test_compute_before_a_late_start_hides_nothing():
    timeline = played(program(compute("a", 6), start("g"), compute("b", 1), done("g"), compute("c", 6)))
    assert exposed(timeline) == [4]
    assert us(timeline.seconds) == 17


def test_a_second_gather_begins_when_the_first_is_over():
    lines = [start("g"), start("h"), compute("a", 6), done("g"), done("h")]
    assert exposed(played(program(*lines))) == [0, 4]


def test_gathers_under_way_together_share_the_bandwidth_but_not_the_latency():
    lines = [start("g"), start("h"), compute("a", 6), done("g"), done("h")]
    # Both send from 2 on, 6,000 bytes together.
    assert exposed(played(program(*lines), at_once=2)) == [2, 0]


def test_no_more_gathers_are_under_way_than_allowed():
    lines = [*(start(name) for name in "ghi"), done("g"), done("h"), done("i")]
    # Two are over at 8; the third begins then.
    assert exposed(played(program(*lines), at_once=2)) == [8, 0, 5]


def test_a_small_collective_beside_a_large_one_is_slowed_down_but_does_not_queue():
    small = (
        "%r = u8[500]{0} all-reduce-start(%y), replica_groups={{0,1}}, to_apply=%sum",
        "%r.done = u8[500]{0} all-reduce-done(%r)",
    )
    lines = ["%y = u8[500]{0} bitcast(%x)", start("g"), compute("a", 2), *small, done("g")]
    # Alone, g would send from 2 to 5. The reduction begins at 2 and sends 500 bytes from 4 on, half as fast: until 5.
    # By then g has sent 2,000 + 500 bytes, and needs 0.5 us more.
    assert exposed(played(program(*lines), at_once=2)) == [3, 0.5]
    assert exposed(played(program(*lines))) == [5.5, 0]


def test_waiting_for_one_gather_gives_time_to_the_next():
    lines = [start("g"), done("g"), start("h"), compute("a", 1), done("h")]
    assert exposed(played(program(*lines))) == [5, 4]


def test_a_loop_waits_in_every_turn():
    body = [start("g"), compute("a", 1), done("g")]
    timeline = played(program(loop("layers", "body", 3), compute("b", 2), body=body))
    assert us(timeline.exposed_seconds) == 3 * 4
    assert us(timeline.compute_seconds) == 3 * 1 + 2
    assert sum(each.times for each in timeline.exchanges) == 3


def test_the_first_turn_of_a_loop_finds_the_link_as_it_was_left():
    lines = [start("g"), loop("layers", "body", 3), done("g")]
    timeline = played(program(*lines, body=gather("h")))
    # g is over at 5 and the first h at 10; the other two turns wait 5 each.
    assert [(each.times, us(each.exposed)) for each in timeline.exchanges] == [(1, 10), (2, 5), (1, 0)]


@pytest.mark.parametrize(("each", "waits"), [(1, 1), (1.5, 0)])
def test_a_loop_hides_what_was_started_before_it_and_holds_up_nothing_after_it(each, waits):
    lines = [start("g"), loop("experts", "body", 4), done("g"), *gather("h")]
    timeline = played(program(*lines, body=[compute("a", each)]))
    assert exposed(timeline) == [waits, 5]
    assert us(timeline.seconds) == 4 * each + waits + 5


def test_loops_in_loops_multiply():
    timeline = played(
        program(
            loop("l", "outer", 3), outer=[loop("m", "inner", 5), compute("a", 1)], inner=[compute("b", 2)]
        )
    )
    assert us(timeline.seconds) == 3 * (5 * 2 + 1)
    assert timeline.kernels == 3 * (5 + 1)


def test_a_loop_of_unknown_length_takes_the_turns_that_are_given_and_says_so():
    schedule = program(loop("experts", "body", None), body=[compute("a", 2)])
    timeline = played(schedule, unknown_trips=2.5)
    assert us(timeline.seconds) == 5
    assert timeline.assumed_trips == {"experts": 2.5}


def test_the_longer_branch_is_not_taken_and_reported_apart():
    rest = [*gather("g", "overflow"), compute("a", 7)]
    schedule = program(branches("cond", "rest", "fits"), compute("b", 3), rest=rest, fits=[compute("c", 1)])
    timeline = played(schedule)
    assert us(timeline.seconds) == 1 + 3
    assert timeline.exchanges == []
    (found,) = timeline.overflow
    assert (found.purpose, found.wire_bytes, us(found.exposed)) == ("overflow", 3000, 5)
    assert us(timeline.overflow_seconds) == 12 - 1


def test_rounds_of_an_overflow_count_once():
    schedule = program(
        branches("cond", "fits", "rest"), fits=[], rest=[loop("rounds", "one", None)], one=gather("g")
    )
    timeline = played(schedule, unknown_trips=30)
    assert us(timeline.overflow_seconds) == 5
    assert len(timeline.overflow) == 1


def test_a_call_is_played_in_its_place():
    lines = [start("g"), "%k = u8[8]{0} call(%x), to_apply=%inner", done("g")]
    assert exposed(played(program(*lines, inner=[compute("a", 4)]))) == [1]


def test_what_has_no_model_is_named_and_takes_no_time():
    timeline = played(program('%k = u8[8]{0} custom-call(%x), custom_call_target="mystery"', compute("a", 1)))
    assert timeline.unknown == {"k"}
    assert us(timeline.seconds) == 1


def test_compute_is_kept_apart_by_what_it_rests_on():
    timeline = played(program(compute("a", 4), "%c = u8[1000]{0} copy(%x)"))
    assert {basis: us(seconds) for basis, seconds in timeline.compute.items()} == {"xla": 4, "bytes": 2}


def test_a_step_of_several_programs_is_their_sum():
    one = played(program(*gather("g"), compute("a", 3), loop("l", "body", None), body=[compute("b", 1)]))
    rest = gather("h", "overflow")
    other = played(program(branches("cond", "rest", "fits"), compute("c", 4), rest=rest, fits=[]))
    whole = one_after_the_other([one, other])
    assert us(whole.seconds) == 5 + 3 + 1 + 4
    assert (len(whole.exchanges), len(whole.overflow), whole.kernels) == (1, 1, 3)
    assert us(whole.overflow_seconds) == 5
    assert whole.assumed_trips == {"l": 1}


@pytest.mark.parametrize(
    ("scope", "purpose"),
    [
        ("attend/query_gather", "query_gather"),
        ("attend/merge", "merge"),
        ("full_exchange", "full_exchange"),
        ("shared_exchange", "shared_exchange"),
        ("top_k/index_merge", "index_merge"),
        ("tp_all_reduce", "tp_all_reduce"),
        ("embed", "embed"),
        ("head", "head"),
        ("overflow/cond/branch_1_fun/while/body/full_exchange", "overflow"),
        ("head/tp_all_reduce", "tp_all_reduce"),
        ("headless", "other"),
        ("", "other"),
    ],
)
def test_a_collective_is_for_what_the_scopes_around_it_say(scope, purpose):
    assert purpose_of(program(start("g", scope)).entry.instructions[1]) == purpose


def layers(count: int) -> list[str]:
    """Each layer: 1 us, a reduction of 5 us, 2 us, another."""
    lines = gather("e", "embed")
    for layer in range(count):
        lines += [compute(f"a{layer}", 1), *gather(f"t{layer}", "tp_all_reduce")]
        lines += [compute(f"f{layer}", 2), *gather(f"u{layer}", "tp_all_reduce")]
    return [*lines, *gather("h", "head")]


def test_layers_that_stand_for_others_count_more_often():
    schedule = program(*layers(4))
    middle = layer_span(schedule, 1, 2)
    timeline = played(schedule, weight=lambda position: 3.0 if position in middle else 1.0)
    # 2 + 3 * 2 layers of 3 us of compute and 10 us of waiting, then embedding and head.
    assert us(timeline.compute_seconds) == 8 * 3
    assert us(timeline.exposed_seconds) == 8 * 10 + 2 * 5
    assert sum(each.times for each in timeline.exchanges if each.purpose == "tp_all_reduce") == 16


def test_the_first_layer_begins_with_the_program():
    schedule = program(*layers(2))
    assert layer_span(schedule, 0, 0).start == 0
    assert layer_span(schedule, 0, 0).stop == layer_span(schedule, 1, 1).start


def test_layers_that_are_not_there_are_an_error():
    with pytest.raises(
        ValueError, match="layers 1 to 2 end with 6 collectives named tp_all_reduce, but .* has 4"
    ):
        layer_span(program(*layers(2)), 1, 2)
