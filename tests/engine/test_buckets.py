"""Static shapes: whatever serving asks for finds a bucket that holds it, and warm-up knows every one of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.config import SchedulerConfig
from glm_dcp_jax.engine.buckets import Buckets, ladder, rung
from glm_dcp_jax.engine.steps import BlockShape, StepShape

paddings = st.none() | st.sets(st.integers(1, 20000), min_size=1, max_size=4).map(lambda s: tuple(sorted(s)))


@st.composite
def engines(draw: st.DrawFn) -> tuple[Buckets, SchedulerConfig, int, Layout]:
    """Buckets, with what they were made from: the scheduler's limits, max_model_len and the layout."""
    config = SchedulerConfig(
        max_num_seqs=draw(st.integers(1, 70)),
        max_num_batched_tokens=draw(st.integers(1, 20000)),
        precompile_bs_paddings=draw(paddings),
        precompile_token_paddings=draw(paddings),
    )
    max_model_len = draw(st.integers(2, 100) | st.integers(2, 300_000))
    layout = Layout(draw(st.sampled_from([1, 4, 16, 64])), draw(st.integers(1, 8)))
    return Buckets.of(config, max_model_len, layout), config, max_model_len, layout


class TestLadder:
    def test_powers_of_four_up_to_the_limit_which_need_not_be_one(self):
        assert ladder(1, 16) == (1, 4, 16)
        assert ladder(1, 17) == (1, 4, 16, 17)
        assert ladder(16, 2048) == (16, 64, 256, 1024, 2048)
        assert ladder(5, 5) == (5,)

    def test_the_lowest_rung_that_is_enough(self):
        assert [rung((1, 4, 16), need) for need in (0, 1, 2, 4, 5, 16)] == [1, 1, 4, 4, 16, 16]
        with pytest.raises(ValueError, match="no bucket holds 17; the largest is 16"):
            rung((1, 4, 16), 17)


class TestDefaults:
    BUCKETS = Buckets.of(SchedulerConfig(), 131072, Layout(64, 4))

    def test_a_few_dozen_programs_at_most(self):
        assert len(self.BUCKETS.all()) < 60
        assert len(Buckets.of(SchedulerConfig(), 4096, Layout(64)).all()) < 25

    def test_sizes(self):
        assert self.BUCKETS.decode_requests == (1, 4, 16)
        assert self.BUCKETS.prefill_rows == (16, 64, 256, 1024, 2048)
        assert self.BUCKETS.decode_contexts == (4096, 16384, 65536, 131072)

    def test_a_decode_step(self):
        assert self.BUCKETS.decode(5, 5000) == StepShape((BlockShape("decode", 16, 1, 64),), 16)

    def test_a_prefill_step_gives_logits_of_last_rows_or_of_all(self):
        assert self.BUCKETS.prefill(1, 100, 100) == StepShape((BlockShape("prefill", 1, 256, 4),), 1)
        assert self.BUCKETS.prefill(2, 100, 100) == StepShape((BlockShape("prefill", 4, 256, 4),), 4)
        assert self.BUCKETS.prefill(1, 100, 100, all_logits=True).logits == 256
        assert self.BUCKETS.prefill(1, 100, 100, capture=True).capture


class TestGivenSizes:
    def test_the_limit_is_always_among_them_and_nothing_above_it(self):
        config = SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=100,
            precompile_bs_paddings=(2, 8, 32),
            precompile_token_paddings=(10, 1000),
        )
        buckets = Buckets.of(config, 4096, Layout(64))
        assert buckets.decode_requests == (2, 8)
        assert buckets.prefill_rows == (10, 100)

    def test_a_short_model_limits_the_chunk(self):
        buckets = Buckets.of(SchedulerConfig(precompile_token_paddings=(16, 64)), 50, Layout(4))
        assert buckets.prefill_rows == (16, 50)
        assert buckets.decode_contexts == buckets.prefill_contexts == (50,)


@settings(max_examples=300, deadline=None)
@given(engines(), st.data())
def test_every_step_within_the_limits_finds_a_known_shape_that_holds_it(engine, data):
    buckets, config, max_model_len, layout = engine
    known = buckets.all()
    assert len(set(known)) == len(known)
    requests = data.draw(st.integers(1, config.max_num_seqs))
    context = data.draw(st.integers(1, max_model_len))
    rows = data.draw(st.integers(1, min(buckets.largest_chunk, context)))
    for mixed in (False, True):
        several = buckets.lines_fit(rows, context, mixed)
        lines = data.draw(st.integers(1, buckets.prefill_lines if several else 1))
        if mixed:
            shape = buckets.mixed(requests, max_model_len, lines, rows, context)
            decode, prefill = shape.blocks
            assert decode.requests >= requests and decode.pages >= layout.pages_for(max_model_len)
            assert shape.logits == decode.total_rows + prefill.requests
        else:
            shape = buckets.prefill(lines, rows, context)
            (prefill,) = shape.blocks
            assert (shape.logits, shape.capture) == (prefill.requests, False)
        assert shape in known and prefill.kind == "prefill"
        assert lines <= prefill.requests <= config.max_num_seqs
        assert rows <= prefill.rows and prefill.total_rows <= config.max_num_batched_tokens
        assert layout.pages_for(context) <= prefill.pages <= layout.pages_for(max_model_len)
    (decode,) = buckets.decode(requests, context).blocks
    assert (decode.kind, decode.rows) == ("decode", 1) and buckets.decode(requests, context) in known
    assert requests <= decode.requests <= config.max_num_seqs
    assert layout.pages_for(context) <= decode.pages <= layout.pages_for(max_model_len)


def test_rows_of_drafts_are_part_of_a_decode_block():
    buckets = Buckets.of(SchedulerConfig(max_num_seqs=4), 4096, Layout(64), drafts=3)
    assert buckets.decode(3, 100) == StepShape((BlockShape("decode", 4, 4, 64),), 16)


def test_steps_of_both_kinds_are_few():
    """Their ladders have every other rung, a factor of 16; of requests that decode there is one size."""
    buckets = Buckets.of(SchedulerConfig(max_num_seqs=64), 1_048_576, Layout(64, 8))
    mixed = [shape.blocks for shape in buckets.all() if len(shape.blocks) == 2]
    assert {decode.requests for decode, _ in mixed} == {64}
    assert {prefill.rows for _, prefill in mixed} == {256, 2048}
    assert len(mixed) < 40
