"""Clients that go away in every state of a hand-over, caches that do not arrive, sequences that lose their pages; with
both engines in this process, so that a test decides when each of them goes on."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from between import Ask, Between, Message, Rule, alters, at, breaks
from fault_engines import new_prompt, settings
from handover import EngineHere
from tiny import write_tiny

from glm_dcp_jax import LLM

TOKENS = 5
KV = {"kv": {"kv_connector": "inproc", "kv_connector_extra_config": {"piece_bytes": 4096}}}
LEAVES = {"do_remote_decode": True}


class Trio:
    """A producer and a consumer of each policy; how far a hand-over gets is up to a rule."""

    def __init__(self, model: Any) -> None:
        def here(*role: str, **changes: Any) -> EngineHere:
            return EngineHere(LLM(str(model), **settings(*role, **KV, **changes)))

        self.producer = here("kv_producer", max_num_batched_tokens=16, precompile_token_paddings=(16,))
        # Pages for 112 tokens: a prompt that comes, and another that grows.
        self.failing = here("kv_consumer", num_gpu_blocks_override=15)
        self.recomputing = here("kv_consumer", "recompute", num_gpu_blocks_override=15)
        self.between = Between()

    def alone(self, prompt: list[int], **sampling: Any) -> list[list[int]]:
        """What one engine says; all outputs."""
        return self.producer.result(self.producer.add(prompt, max_tokens=TOKENS, **sampling))["all_token_ids"]

    def offered(self, prompt: list[int], **sampling: Any) -> Message:
        result = self.producer.result(self.producer.add(prompt, LEAVES, max_tokens=1, **sampling))
        return self.between.through(result["kv_transfer_params"])

    def wait_idle(self) -> None:
        for each in (self.producer, self.failing, self.recomputing):
            each.wait_idle(10.0)

    def close(self) -> None:
        for each in (self.failing, self.recomputing, self.producer):
            each.engine.close()
        self.between.close()


@pytest.fixture(scope="module")
def all_three(devices, tmp_path_factory) -> Iterator[Trio]:
    devices(2)
    trio = Trio(write_tiny(tmp_path_factory.mktemp("model")))
    yield trio
    trio.close()


@pytest.fixture
def trio(all_three: Trio) -> Iterator[Trio]:
    """All are idle afterwards, and hand over as ever."""
    yield all_three
    all_three.wait_idle()
    for consumer in (all_three.failing, all_three.recomputing):
        prompt = new_prompt()
        params = all_three.offered(prompt)
        result = consumer.result(consumer.add(prompt, params, max_tokens=TOKENS))
        assert result["all_token_ids"] == all_three.alone(prompt) and result["cached"] == len(prompt) - 1
    all_three.wait_idle()


@pytest.fixture(params=["failing", "recomputing"])
def consumer(request: pytest.FixtureRequest, trio: Trio) -> EngineHere:
    return getattr(trio, request.param)


class Held:
    """A rule that holds a request up until the test lets it go on."""

    def __init__(self, do: str, number: int = 0) -> None:
        self.come, self.go = threading.Event(), threading.Event()
        self.rule: Rule = at(do, self._hold, number)

    def _hold(self, message: Message, ask: Ask) -> Message:
        self.come.set()
        assert self.go.wait(20)
        return ask(message)


def step_until(engine: EngineHere, condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Steps are no measure of time: an engine with nothing to compute makes thousands while one message travels."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        engine.step()


def begin_to_load(engine: EngineHere, name: str, held: "Held") -> Any:
    """The sequence, once its load is held up. No step meanwhile: another's tokens could take its pages before that."""
    found = sequence(engine, name)
    step_until(engine, lambda: found.loading)
    assert held.come.wait(20)
    return found


def sequence(engine: EngineHere, name: str) -> Any:
    return engine.engine._requests[name].sequences[0]


class TestProducer:
    @pytest.mark.parametrize("n", [1, 2])
    @pytest.mark.parametrize("steps", [0, 1, 2, 4])
    def test_a_client_that_goes_away_before_all_is_computed_leaves_nothing(self, trio, steps, n):
        name = trio.producer.add(new_prompt(), LEAVES, max_tokens=1, n=n)
        for _ in range(steps):
            trio.producer.step()
        assert not trio.producer.is_done(name)
        trio.producer.engine.abort(name)
        trio.producer.wait_idle(5.0)
        assert trio.producer.engine.stats().transfers.sent.offers.held == 0

    def test_what_is_offered_stays_though_the_request_is_gone_and_is_released_once(self, trio):
        name = trio.producer.add(new_prompt(), LEAVES, max_tokens=1)
        params = trio.producer.result(name)["kv_transfer_params"]
        assert trio.producer.engine.abort(name) is None
        connector = trio.producer.engine.connector
        assert connector.usage()["held"] == 1
        assert [connector.release(params), connector.release(params)] == [True, False]
        trio.producer.wait_idle(5.0)

    @pytest.mark.parametrize("sampling", [{"n": 2}, {"max_tokens": 4}, {"stops": True}])
    def test_a_request_leaves_one_cache_however_it_ends(self, trio, sampling):
        prompt = new_prompt()
        right = trio.alone(prompt)
        if sampling.get("stops"):
            sampling = {"stop_token_ids": right[0][:1], "max_tokens": 3}
        result = trio.producer.result(trio.producer.add(prompt, LEAVES, **({"max_tokens": 1} | sampling)))
        assert trio.producer.engine.connector.usage()["held"] == 1
        params = result["kv_transfer_params"]
        found = trio.failing.result(trio.failing.add(prompt, params, max_tokens=TOKENS))
        assert found["all_token_ids"] == right


class TestConsumer:
    @pytest.mark.parametrize(
        ("when", "n"),
        [
            pytest.param(when, n, marks=[pytest.mark.slow] if n > 1 and when != "piece" else [])
            for when in ("waiting", "hello", "open", "piece", "confirm", "decoding")
            for n in (1, 2)
        ],
    )
    def test_a_client_that_goes_away(self, trio, consumer, when, n):
        """Nothing is left of it, and nothing of a cache that came in part is ever used."""
        prompt = new_prompt()
        params, held = trio.offered(prompt), Held(when, number=2 if when == "piece" else 0)
        held.go.set() if when in ("waiting", "decoding") else None
        with trio.between.doing(held.rule):
            name = consumer.add(prompt, params, max_tokens=TOKENS, n=n)
            if when == "decoding":
                step_until(consumer, lambda: len(sequence(consumer, name).output_ids) > 1)
            elif when != "waiting":
                step_until(consumer, held.come.is_set)
                assert sequence(consumer, name).loading
            left = weakref.ref(sequence(consumer, name))
            consumer.engine.abort(name)
            held.go.set()
            consumer.wait_idle(10.0)
            trio.producer.wait_idle(10.0)
        gc.collect()
        assert left() is None, "something still knows the request"
        again = consumer.result(consumer.add(prompt, max_tokens=TOKENS))
        assert again["all_token_ids"] == trio.alone(prompt)
        assert again["cached"] == (len(prompt) - 1 if when == "decoding" else 0)

    def test_a_client_that_goes_away_when_all_has_come_and_nobody_has_looked(self, trio, consumer):
        prompt = new_prompt(20)
        name = consumer.add(prompt, trio.offered(prompt), max_tokens=TOKENS)
        step_until(consumer, lambda: sequence(consumer, name).loading)
        received = consumer.engine.connector.stats().received
        while sum(consumer.engine.connector.stats().received.bytes.counts) == sum(received.bytes.counts):
            if consumer.engine.connector.has_events:
                consumer.engine._take_arrivals(consumer.engine.connector, {})
            threading.Event().wait(0.005)
        consumer.engine.abort(name)

    @pytest.mark.parametrize("n", [1, 2])
    @pytest.mark.parametrize("piece", [0, 8])
    def test_a_cache_that_does_not_arrive(self, trio, consumer, piece, n):
        """All outputs fail, or are right; and what came of it is not found by the next with that prompt."""
        prompt = new_prompt()
        right = trio.alone(prompt, n=n)
        params = trio.offered(prompt)
        wrong = alters(lambda answer: answer | {"crcs": [crc ^ 1 for crc in answer["crcs"]]})
        with trio.between.doing(at("piece", wrong, piece)):
            result = consumer.result(consumer.add(prompt, params, max_tokens=TOKENS, n=n))
        if consumer is trio.recomputing:
            assert result["all_token_ids"] == right
            return
        assert (result["all_token_ids"], result["finish_reason"]) == ([[]] * n, "error")
        again = consumer.result(consumer.add(prompt, max_tokens=TOKENS, n=n))
        assert (again["all_token_ids"], again["cached"]) == (right, 0)

    def test_a_cache_that_does_not_arrive_behind_a_prefix_that_is_there(self, trio, consumer):
        start, end = new_prompt(40), new_prompt(30)
        consumer.result(consumer.add(start, max_tokens=1))
        prompt = start + end
        right, params = trio.alone(prompt), trio.offered(prompt)
        with trio.between.doing(breaks):
            result = consumer.result(consumer.add(prompt, params, max_tokens=TOKENS))
        assert result["all_token_ids"] == (right if consumer is trio.recomputing else [[]])
        trio.producer.engine.connector.release(params)  # nobody could tell it
        again = consumer.result(consumer.add(start, max_tokens=TOKENS))
        assert again["all_token_ids"] == trio.alone(start), "the shared pages were written to"

    def test_others_with_the_same_prompt_do_not_wait_for_a_cache_that_will_not_come(self, trio, consumer):
        prompt = new_prompt()
        right, params, held = trio.alone(prompt), trio.offered(prompt), Held("piece", 1)
        with trio.between.doing(held.rule):
            bringing = consumer.add(prompt, params, max_tokens=TOKENS)
            step_until(consumer, held.come.is_set)
            waiting = consumer.add(prompt, max_tokens=TOKENS)
            consumer.step()
            consumer.engine.abort(bringing)
            assert consumer.result(waiting)["all_token_ids"] == right
            held.go.set()

    def test_who_loses_its_pages_while_they_are_written_to(self, trio, consumer):
        """Another grows into the pages that a cache is on its way to; what still comes is thrown away."""
        own, prompt = new_prompt(20), new_prompt()
        rights = [
            trio.producer.result(trio.producer.add(own, max_tokens=70))["token_ids"],
            trio.alone(prompt)[0],
        ]
        before = consumer.engine.stats().preemptions
        params, held = trio.offered(prompt), Held("piece", 3)
        with trio.between.doing(held.rule):
            growing = consumer.add(own, max_tokens=70)
            coming = consumer.add(prompt, params, max_tokens=TOKENS)
            losing = begin_to_load(consumer, coming, held)
            step_until(consumer, lambda: not losing.loading)
            held.go.set()
            found = [consumer.result(name)["token_ids"] for name in (growing, coming)]
        assert consumer.engine.stats().preemptions > before
        assert found == rights

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"remote_host": "10.0.0.1"}, "is another machine"),
            ({"remote_host": "no.such.host"}, "is another machine"),
            ({"kv_connector": "nixl"}, "offered by connector 'nixl'"),
            ({"remote_key": "x"}, "32 hex digits"),
            ({"do_remote_decode": True}, "cannot both be true"),
            ({"do_remote_prefill": False, "do_remote_decode": True}, "is a kv_consumer"),
        ],
        ids=str,
    )
    def test_references_that_this_consumer_will_not_follow(self, trio, consumer, change, message):
        params = trio.offered(new_prompt())
        with pytest.raises(ValueError, match=message):
            consumer.add(new_prompt(), params | change, max_tokens=TOKENS)
        trio.producer.engine.connector.release(params)

    def test_a_full_house_loads_what_it_has_pages_for_and_the_rest_later(self, trio, consumer):
        prompts = [new_prompt(60) for _ in range(4)]
        rights = [trio.alone(prompt) for prompt in prompts]
        names = [consumer.add(prompt, trio.offered(prompt), max_tokens=TOKENS) for prompt in prompts]
        assert [consumer.result(name)["all_token_ids"] for name in names] == rights
