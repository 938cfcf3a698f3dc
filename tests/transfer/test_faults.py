"""Faults between engines in processes of their own: never a wrong token, a hang or a page lost; the others go on."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from between import Ask, Message, Rule, alters, always, at, breaks
from engine_process import EngineProcess
from fault_engines import (
    LEASE,
    NEW_TOKENS,
    TRANSFER,
    Engines,
    expect,
    failures,
    idle,
    new_prompt,
)
from tiny import write_tiny

pytestmark = (
    pytest.mark.slow
)  # three engines of three processes; test_peer_faults has these faults without engines


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    model = write_tiny(tmp_path_factory.mktemp("model"))
    one_at_a_time: dict[str, Any] = {"max_num_seqs": 1, "precompile_bs_paddings": (1,)}
    engines = Engines.start(model, **one_at_a_time)
    yield engines
    engines.close()


@pytest.fixture
def consumer(policy: str, engines: Engines) -> EngineProcess:
    return getattr(engines, policy)


def both(name: str, cases: Iterable[str], slow: tuple[str, ...] = ()) -> Any:
    """Each case with one of the policies here, and with the other in the slow run."""
    params = [
        pytest.param(case, policy, marks=[pytest.mark.slow] if case in slow or (at + other) % 2 else [])
        for at, case in enumerate(cases)
        for other, policy in enumerate(("failing", "recomputing"))
    ]
    return pytest.mark.parametrize((name, "policy"), params)


@pytest.fixture(autouse=True)
def afterwards(engines: Engines) -> Iterator[None]:
    yield
    engines.check()


def pausing(engine: str, seconds: float) -> Any:
    """A rule that stops one of the engines, and lets it go on after a while."""

    def make(engines: Engines) -> Rule:
        def act(message: Message, ask: Ask) -> Message:
            getattr(engines, engine).pause()
            time.sleep(seconds)
            getattr(engines, engine).resume()
            return ask(message)

        return act

    return make


def late(engines: Engines) -> Rule:
    """Only when the lease is over; heartbeats do not get through."""

    def rule(message: Message, ask: Ask) -> Message:
        if message["do"] == "beat":
            return {"lost": []}
        if message["do"] == "confirm":
            time.sleep(LEASE + 0.2)
        return ask(message)

    return rule


def wrong_checksum(answer: Message) -> Message:
    return answer | {"crcs": [crc ^ 1 for crc in answer["crcs"]]}


def on(do: str, make: Any, number: int = 0) -> Any:
    return lambda engines: at(do, make(engines), number)


BREAKS = {
    "a connection that breaks when the key is opened": (lambda _: always("open", breaks), "lost"),
    "one that breaks in the middle": (lambda _: always("taken", breaks), "lost"),
    "one that breaks at the end": (lambda _: always("confirm", breaks), "lost"),
    "wrong bytes at the end": (lambda _: at("piece", alters(wrong_checksum), 6), "corrupt"),
    "a lease that is over at the end": (late, "expired"),
    "a producer that stands still when asked": (on("hello", pausing("producer", TRANSFER)), "timeout"),
    "one that stands still in the middle": (on("piece", pausing("producer", TRANSFER + 1), 4), "timeout"),
    "one that stands still at the end": (on("confirm", pausing("producer", TRANSFER + 1)), "timeout"),
}
"""What happens on the way, and the kind of failure that it is."""


@both("name", BREAKS, slow=("one that stands still in the middle", "one that stands still at the end"))
def test_a_transfer_that_fails(engines, consumer, name):
    make, kind = BREAKS[name]
    prompt = new_prompt()
    right, params, before = engines.alone(prompt), engines.offered(prompt), failures(consumer)
    with engines.between.doing(make(engines)):
        result = consumer.run(prompt, params, max_tokens=NEW_TOKENS)
    expect(consumer, engines, result, right)
    assert failures(consumer) == before | {kind: before.get(kind, 0) + 1}


REFERENCES = {
    "a forged key": ({"remote_key": "0" * 32}, "unknown"),
    "another engine": ({"remote_engine_id": "another"}, "wrong_engine"),
    "nobody there": ({"remote_port": 1}, "lost"),
}


@both("name", REFERENCES)
def test_a_reference_that_is_wrong(engines, consumer, name):
    change, kind = REFERENCES[name]
    prompt = new_prompt()
    right, params, before = engines.alone(prompt), engines.offered(prompt), failures(consumer)
    result = consumer.run(prompt, params | change, max_tokens=NEW_TOKENS)
    expect(consumer, engines, result, right)
    assert failures(consumer) == before | {kind: before.get(kind, 0) + 1}


@both("change", ["as long", "longer", "shorter"])
def test_another_prompt_than_the_producer_has_seen(engines, consumer, change):
    prompt, params = new_prompt(), None
    params = engines.offered(prompt)
    other = {
        "as long": [*prompt[:30], 7 + prompt[30] % 300, *prompt[31:]],
        "longer": [*prompt, 9],
        "shorter": prompt[:-1],
    }[change]
    assert other != prompt
    right = engines.alone(other)
    expect(consumer, engines, consumer.run(other, params, max_tokens=NEW_TOKENS), right)
    assert failures(consumer)["other_prompt"] >= 1


@pytest.mark.parametrize("first", ["failing", "recomputing"])
def test_a_reference_in_two_requests_one_after_the_other(engines, first):
    prompt = new_prompt()
    right, params = engines.alone(prompt), engines.offered(prompt)
    one, other = sorted(engines.consumers, key=lambda each: each is not getattr(engines, first))
    assert one.run(prompt, params, max_tokens=NEW_TOKENS)["token_ids"] == right
    expect(other, engines, other.run(prompt, params, max_tokens=NEW_TOKENS), right)


def test_a_reference_in_two_requests_at_once(engines):
    prompt = new_prompt()
    right, params = engines.alone(prompt), engines.offered(prompt)
    before = [failures(each).get("used", 0) for each in engines.consumers]
    names = [each.add(prompt, params, max_tokens=NEW_TOKENS) for each in engines.consumers]
    results = [each.result(name) for each, name in zip(engines.consumers, names, strict=True)]
    used = [failures(each).get("used", 0) for each in engines.consumers]
    assert sum(used) == sum(before) + 1
    assert results[1]["token_ids"] == right
    if results[0]["token_ids"] != right:
        expect(engines.failing, engines, results[0], right)


def test_a_reference_twice_on_one_consumer_at_once(engines):
    """One is served by the producer, the other by that or by itself."""
    prompt = new_prompt()
    right, params = engines.alone(prompt), engines.offered(prompt)
    names = [engines.recomputing.add(prompt, params, max_tokens=NEW_TOKENS) for _ in range(2)]
    assert [engines.recomputing.result(name)["token_ids"] for name in names] == [right, right]


@pytest.mark.parametrize(
    ("who", "do"),
    [
        ("producer", "open"),
        ("failing", "piece"),
        ("producer", "piece"),
        ("failing", "confirm"),
        ("producer", "ack"),
    ],
)
def test_a_pause_that_is_no_longer_than_any_deadline_changes_nothing(engines, who, do):
    prompt = new_prompt()
    right, params = engines.alone(prompt), engines.offered(prompt)
    with engines.between.doing(on(do, pausing(who, 0.6))(engines)):
        assert engines.failing.run(prompt, params, max_tokens=NEW_TOKENS)["token_ids"] == right


@both("do", ["open", "piece", "confirm"], slow=("open",))
def test_a_consumer_that_stands_still_loses_its_lease(engines, consumer, do):
    """The producer has its pages and its memory back meanwhile. When the consumer goes on, it notices."""
    prompt = new_prompt()
    right, params = engines.alone(prompt), engines.offered(prompt)

    def pause(message: Message, ask: Ask) -> Message:
        answer = ask(message) if do == "piece" else None  # published, and never taken
        consumer.pause()
        idle(engines.producer)
        consumer.resume()
        return answer or ask(message)

    with engines.between.doing(at(do, pause, 1 if do == "piece" else 0)):
        result = consumer.run(prompt, params, max_tokens=NEW_TOKENS)
    expect(consumer, engines, result, right)


@both("_", ["late"])
def test_a_consumer_that_comes_late_finds_nothing(engines, consumer, _):
    prompt = new_prompt()
    right, params, before = engines.alone(prompt), engines.offered(prompt), failures(consumer)
    consumer.pause()
    name = consumer.add(prompt, params, max_tokens=NEW_TOKENS)
    idle(engines.producer)
    consumer.resume()
    expect(consumer, engines, consumer.result(name), right)
    assert failures(consumer) == before | {"expired": before.get("expired", 0) + 1}


def test_heartbeats_keep_alive_what_waits_in_a_long_queue(engines):
    """The consumer runs one request at a time, and takes longer than a lease for all of them."""
    consumer, prompts, tokens = engines.failing, [new_prompt(12) for _ in range(8)], 80
    names = [engines.producer.add(prompt, max_tokens=tokens) for prompt in prompts]
    rights = [engines.producer.result(name)["token_ids"] for name in names]
    params = [engines.offered(prompt) for prompt in prompts]
    expired, began = engines.producer.state()["transfers"]["sent"]["offers"]["expired"], time.monotonic()

    def slowly(message: Message, ask: Ask) -> Message:
        time.sleep(LEASE / len(prompts))
        return ask(message)

    with engines.between.doing(always("open", slowly)):
        names = [
            consumer.add(prompt, each, max_tokens=tokens)
            for prompt, each in zip(prompts, params, strict=True)
        ]
        assert [consumer.result(name)["token_ids"] for name in names] == rights
    assert time.monotonic() - began > LEASE
    assert engines.producer.state()["transfers"]["sent"]["offers"]["expired"] == expired


@both("do", ["hello", "open", "piece", "confirm", "ack"])
def test_a_client_that_goes_away_while_its_cache_is_on_its_way(engines, consumer, do):
    prompt, names = new_prompt(), []
    params = engines.offered(prompt)

    def leave(message: Message, ask: Ask) -> Message:
        consumer.abort(names[0])
        time.sleep(0.1)
        return ask(message)

    with engines.between.doing(at(do, leave)):
        names.append(consumer.add(prompt, params, max_tokens=NEW_TOKENS))
        deadline = time.monotonic() + 20
        while not engines.between.count(do) and time.monotonic() < deadline:
            time.sleep(0.02)
        idle(consumer)
        idle(engines.producer, LEASE / 2)  # it was told, before the lease says so
    assert engines.between.count(do)


def test_loads_at_once_with_faults_in_some_of_them(engines):
    """Every other key's transfer breaks; the others do not notice."""
    consumer, prompts = engines.recomputing, [new_prompt() for _ in range(6)]
    rights = [engines.alone(prompt) for prompt in prompts]
    params = [engines.offered(prompt) for prompt in prompts]
    broken = {each["remote_key"] for each in params[::2]}

    def some(message: Message, ask: Ask) -> Message:
        return wrong_checksum(ask(message)) if message["key"] in broken else ask(message)

    before = failures(consumer).get("corrupt", 0)
    with engines.between.doing(always("piece", some)):
        names = [
            consumer.add(prompt, each, max_tokens=NEW_TOKENS)
            for prompt, each in zip(prompts, params, strict=True)
        ]
        assert [consumer.result(name)["token_ids"] for name in names] == rights
    assert failures(consumer)["corrupt"] == before + len(broken)
