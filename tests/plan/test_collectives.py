"""What is read from scheduled HLO, on a program that shows each form once, in the words of jax 0.10.2 and of 0.12."""

import pytest

from glm_dcp_jax.plan.schedule import ModelledTime, Schedule, parse_schedule

COSTS = (
    '"reification_cost":['
    '{"end_to_end_cycles":1.5,"exec_time_us":4.5,"compute_time_us":1,"memory_access_time_us":4.5,"name":""},'
    '{"end_to_end_cycles":0,"exec_time_us":3.5,"compute_time_us":0,"memory_access_time_us":0,"name":"sol"}]'
)
PROGRAM = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%fused_add (p.0: f32[8]) -> f32[8] {
  %p.0 = f32[8]{0} parameter(0)
  ROOT %add.0 = f32[8]{0} add(%p.0, %p.0)
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%inner_body (i: (s32[])) -> (s32[]) {
  ROOT %i = (s32[]) parameter(0)
}

%inner_condition (c: (s32[])) -> pred[] {
  %c = (s32[]) parameter(0)
  ROOT %less = pred[] constant(true)
}

%group (state: (s32[], /*index=1*/bf16[8,4]{1,0})) -> (s32[], bf16[8,4]) {
  %state = (s32[], /*index=1*/bf16[8,4]{1,0}) parameter(0)
  %x = bf16[8,4]{1,0} get-tuple-element(%state), index=1
  %gather.start = (bf16[8,4]{1,0}, bf16[32,4]{1,0}) all-gather-start(%x), channel_id=1, GATHER_GROUPS, dimensions={0}, backend_config={"reification_cost":[]}
  %scores.1 = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_add, backend_config={COSTS}
  %copied = f32[8]{0} copy(%scores.1)
  %kernel.2 = f32[8]{0} custom-call(%copied), custom_call_target="__gpu$xla.gpu.triton", backend_config={ir = "ML\\EF(R", name = "attend"}
  %gather.done = bf16[32,4]{1,0} all-gather-done(%gather.start)
  %reduce.start = ((f32[8]{0}, s32[3]{0}), (f32[8]{0}, s32[3]{0})) all-reduce-start(%kernel.2, %ids), to_apply=%sum, REDUCE_GROUPS
  %ids = s32[3]{0} constant({1, 2, 3})
  %reduce.done = (f32[8]{0}, s32[3]{0}) all-reduce-done(%reduce.start)
  %permuted = bf16[8,4]{1,0} collective-permute(%x), channel_id=2, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %search = (s32[]) while(%inner), condition=%inner_condition, body=%inner_body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %next = (s32[], bf16[8,4]{1,0}) tuple(%i2, %permuted)
}

%always (state.1: (s32[], bf16[8,4])) -> pred[] {
  %state.1 = (s32[], bf16[8,4]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

%overflow (o: f32[8]) -> f32[8] {
  ROOT %o = f32[8]{0} parameter(0)
}

%fits (f: f32[8]) -> f32[8] {
  ROOT %f = f32[8]{0} parameter(0)
}

%until (u: (s32[])) -> (s32[]) {
  ROOT %u = (s32[]) parameter(0)
}

ENTRY %main (arg: f32[8]) -> f32[8] {
  %arg = f32[8]{0} parameter(0)
  %layers = (s32[], bf16[8,4]{1,0}) while(%start), condition=%always, body=%group, backend_config={"known_trip_count":{"n":"3"}}
  %remainder = f32[8]{0} conditional(%p, %arg, %arg), branch_computations={%overflow, %fits}
  %again = f32[8]{0} call(%remainder), to_apply=%fits
  %search.9 = (s32[]) while(%begin), condition=%always, body=%until
  ROOT %out = f32[8]{0} fusion(%arg), kind=kLoop, calls=%fused_add
}
"""  # noqa: E501
SPELLINGS = {
    "jax 0.10.2": ("replica_groups={{0,1,2,3}}", "replica_groups=[2,2]<=[4]"),
    "jax 0.12": (
        "replica_groups=mesh['replica'=2,'dcp'=2] {'replica','dcp'}",
        "replica_groups=mesh['replica'=2,'dcp'=2] {'dcp'}",
    ),
}


@pytest.fixture(params=SPELLINGS)
def schedule(request) -> Schedule:
    gather, reduce = SPELLINGS[request.param]
    text = PROGRAM.replace("GATHER_GROUPS", gather).replace("REDUCE_GROUPS", reduce).replace("COSTS", COSTS)
    return parse_schedule(text)


def test_only_what_is_executed_as_such_is_scheduled_and_how_often_is_known(schedule):
    executions = {name: found.executions for name, found in schedule.computations.items()}
    assert executions == {
        "inner_body": 15,
        "group": 3,
        "overflow": 1,
        "fits": 2,
        "until": None,
        "main": 1,
    }


def test_a_gather_runs_beside_what_stands_between_its_start_and_its_done(schedule):
    gather = schedule.collectives[0]
    assert (gather.name, gather.kind, gather.computation) == ("gather.start", "all-gather", "group")
    assert (gather.start, gather.done, gather.instructions_between) == (2, 6, 3)
    assert gather.compute_between == ("scores.1", "kernel.2")  # not the copy
    assert not gather.blocks
    assert gather.executions == 3


def test_bytes_and_ranks_are_those_of_one_device(schedule):
    gather, reduce, permute = schedule.collectives
    assert (gather.operand_bytes, gather.result_bytes, gather.ranks) == (8 * 4 * 2, 32 * 4 * 2, 4)
    assert (reduce.operand_bytes, reduce.result_bytes, reduce.ranks) == (8 * 4 + 3 * 4,) * 2 + (2,)
    assert (permute.operand_bytes, permute.result_bytes, permute.ranks) == (64, 64, 4)


def test_a_collective_without_compute_beside_it_blocks(schedule):
    _, reduce, permute = schedule.collectives
    assert reduce.blocks and reduce.instructions_between == 1
    assert permute.blocks and (permute.start, permute.instructions_between) == (permute.done, 0)


def test_modelled_times_are_kept_by_model(schedule):
    assert schedule.modelled_times == {
        "scores.1": {"performance": ModelledTime(4.5, 1, 4.5), "sol": ModelledTime(3.5, 0, 0)}
    }


def test_a_text_without_an_order_is_refused():
    with pytest.raises(ValueError, match="no order of execution"):
        parse_schedule(PROGRAM.replace(", is_scheduled=true", ""))
