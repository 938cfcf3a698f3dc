"""What a step hands out: how far requests had come. Outputs are made of it later, perhaps in another thread."""

import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from glm_dcp_jax.demo.description import VOCABULARY
from glm_dcp_jax.demo.tokenizer import make_tokenizer
from glm_dcp_jax.engine.detokenizer import Detokenizer
from glm_dcp_jax.engine.outputs import Logprob
from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.engine.sequence import Request, Sequence
from glm_dcp_jax.engine.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from lib import host_overhead  # noqa: E402

PROMPT = [5, 6, 7]
A, B, STOP = 40, 41, 42


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(make_tokenizer(VOCABULARY))


def request_of(tokenizer: Tokenizer | None, count: int = 1, **fields: object) -> Request:
    params = SamplingParams(max_tokens=9, n=count, **fields)
    sequences = [
        Sequence(
            index, list(PROMPT), len(PROMPT), 12, 0, params, tokenizer and Detokenizer(tokenizer, params)
        )
        for index in range(count)
    ]
    return Request("a", None, PROMPT, sequences)


class TestProgress:
    def test_an_output_is_of_the_moment_however_late_it_is_made(self, tokenizer):
        request = request_of(tokenizer, logprobs=0, prompt_logprobs=0)
        (sequence,) = request.sequences
        moments = []
        for number, token in enumerate([A, B, A, B]):
            sequence.logprobs.append({token: Logprob(-number)})
            sequence.prompt_logprobs.append({token: Logprob(-number)})
            sequence.cumulative_logprob -= number
            sequence.append(token, frozenset())
            moments.append((request.progress(), request.progress().output()))
        assert [now.outputs[0].token_ids for _, now in moments] == [[A], [A, B], [A, B, A], [A, B, A, B]]
        assert len({now.outputs[0].text for _, now in moments}) == 4
        for progress, now in moments:
            assert progress.output() == now
            assert (
                len(now.outputs[0].logprobs) == len(now.prompt_logprobs) - 1 == len(now.outputs[0].token_ids)
            )

    def test_marks_are_of_the_moment_too(self, tokenizer):
        request = request_of(tokenizer, marked_token_ids=[B])
        moments = []
        for token in (B, A, B):
            request.sequences[0].append(token, frozenset())
            moments.append(request.progress())
        length = len(tokenizer.token_to_str(A))
        marks = [progress.output().outputs[0].marks for progress in moments]
        assert marks == [[(0, B)], [(0, B)], [(0, B), (length, B)]]

    def test_an_end_later_on_is_not_in_it(self):
        request = request_of(None, stop_token_ids=[STOP])
        request.sequences[0].append(A, frozenset())
        before = request.progress()
        request.sequences[0].append(STOP, frozenset())
        after = request.progress()
        assert not before.finished and not before.output().finished
        assert before.output().outputs[0].finish_reason is None
        assert after.finished and after.output().finished
        assert (after.output().outputs[0].finish_reason, after.output().outputs[0].stop_reason) == (
            "stop",
            STOP,
        )

    def test_a_request_has_finished_when_all_its_sequences_have(self):
        request = request_of(None, count=2, stop_token_ids=[STOP])
        for sequence in request.sequences:
            assert not request.progress().finished
            sequence.append(STOP, frozenset())
        assert request.progress().finished

    def test_an_output_is_the_readers_own(self, tokenizer):
        request = request_of(tokenizer, logprobs=0)
        request.sequences[0].append(A, frozenset())
        output = request.progress().output().outputs[0]
        output.token_ids.clear()
        output.logprobs.append({})
        assert request.progress().output().outputs[0].token_ids == [A]
        assert request.sequences[0].tokens == [*PROMPT, A] and request.sequences[0].logprobs == []


def memory_of(call: Callable[[], object]) -> int:
    """Bytes that a call needs for itself: the least of 20 calls, as a list that grows is moved now and then."""
    needed = []
    for _ in range(20):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        call()
        needed.append(tracemalloc.get_traced_memory()[1] - before)
    return min(needed)


@pytest.mark.parametrize("text", [pytest.param(False, marks=pytest.mark.slow), True], ids=["tokens", "text"])
def test_a_step_copies_nothing_of_what_was_there_before(text):
    """Else its cost would grow with what was generated."""
    engine, _ = host_overhead.decoding_engine(requests=1, prompt_len=40, steps=8100, text=text)
    tracemalloc.start()
    try:
        early = memory_of(engine.step)
        for _ in range(8000):
            (progress,) = engine.step()
        late, read = memory_of(engine.step), memory_of(progress.output)
    finally:
        tracemalloc.stop()
    assert len(progress.output().outputs[0].token_ids) > 8000
    assert late - early < 1000 < read, "a copy of 8000 tokens, or of their text, needs more"
