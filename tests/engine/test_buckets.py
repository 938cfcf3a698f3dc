"""Static shapes: whatever serving asks for finds a bucket that holds it, and warm-up knows every one of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.config import SchedulerConfig
from glm_dcp_jax.engine.buckets import Buckets, ladder, rung
from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.engine.scheduler import Scheduler, Work
from glm_dcp_jax.engine.sequence import Sequence
from glm_dcp_jax.engine.steps import StepShape

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
        assert self.BUCKETS.decode(5, 5000) == StepShape("decode", 16, 1, 64, 16)

    def test_a_prefill_step_gives_logits_of_last_rows_or_of_all(self):
        assert self.BUCKETS.prefill(1, 100, 100) == StepShape("prefill", 1, 256, 4, 1)
        assert self.BUCKETS.prefill(2, 100, 100) == StepShape("prefill", 4, 256, 4, 4)
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
def test_every_step_within_the_limits_finds_a_shape_that_holds_it(engine, data):
    buckets, config, max_model_len, layout = engine
    requests = data.draw(st.integers(1, config.max_num_seqs))
    context = data.draw(st.integers(1, max_model_len))
    decode = buckets.decode(requests, context)
    assert (decode.kind, decode.rows, decode.logits) == ("decode", 1, decode.requests)
    assert requests <= decode.requests <= config.max_num_seqs
    assert layout.pages_for(context) <= decode.pages <= layout.pages_for(max_model_len)

    lines = data.draw(st.integers(1, buckets.prefill_lines))
    rows = data.draw(st.integers(1, min(buckets.largest_chunk, context)))
    prefill = buckets.prefill(lines, rows, context)
    assert (prefill.kind, prefill.logits, prefill.capture) == ("prefill", prefill.requests, False)
    assert lines <= prefill.requests <= config.max_num_seqs
    assert rows <= prefill.rows <= config.max_num_batched_tokens
    assert layout.pages_for(context) <= prefill.pages <= layout.pages_for(max_model_len)


def shape_of(buckets: Buckets, work: Work) -> StepShape:
    """The step that a runner would take for this work."""
    ends = [s.computed + chunk for s, chunk in zip(work.sequences, work.chunks, strict=True)]
    if work.kind == "decode":
        return buckets.decode(len(ends), max(ends))
    return buckets.prefill(len(ends), max(work.chunks), max(ends))


@settings(max_examples=120, deadline=None)
@given(engines(), st.data())
def test_warm_up_knows_every_shape_that_serving_takes_and_steps_stay_within_their_budget(engine, data):
    buckets, config, max_model_len, layout = engine
    known = set(buckets.all())
    assert len(known) == len(buckets.all())
    scheduler = Scheduler(buckets, layout, 10**6, config.max_num_seqs)
    lengths = st.integers(1, min(40, max_model_len - 1)) | st.integers(1, max_model_len - 1)
    for length in data.draw(st.lists(lengths, min_size=1, max_size=8)):
        limit = min(length + data.draw(st.integers(1, 3)), max_model_len)
        scheduler.add(Sequence(0, [7] * length, length, limit, 0, SamplingParams(), None))
    steps = 0
    while (work := scheduler.next()) is not None and steps < 60:
        steps += 1
        shape = shape_of(buckets, work)
        assert shape in known
        if work.kind == "prefill":
            assert shape.requests * shape.rows <= config.max_num_batched_tokens
        for sequence, chunk in zip(work.sequences, work.chunks, strict=True):
            sequence.computed += chunk
            if sequence.computed == len(sequence.tokens):
                sequence.append(9, frozenset())
                if sequence.finish_reason:
                    scheduler.remove(sequence)
