"""Engines that are killed, or stand still for ever, at every stage of a hand-over; and hundreds of hand-overs.

All slow: whoever was killed is started again, and takes its place.
"""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from between import Ask, Message, at, passes
from engine_process import EngineProcess, Gone
from fault_engines import (
    LEASE,
    NEW_TOKENS,
    Engines,
    expect,
    failures,
    idle,
    new_prompt,
    settings,
)
from random_models import make_tensors, write_checkpoint
from tiny import CONFIG, random_prompts, write_drafting, write_tiny

pytestmark = pytest.mark.slow

STAGES = ["hello", "open", "piece", "confirm", "ack"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def port() -> int:
    """Of the producer, whenever it is started."""
    return free_port()


@pytest.fixture(scope="module")
def engines(model: Path, port: int) -> Iterator[Engines]:
    started = [
        EngineProcess(model, **settings("kv_producer", kv={"kv_port": port})),
        EngineProcess(model, **settings("kv_consumer")),
        EngineProcess(model, **settings("kv_consumer", "recompute")),
    ]
    engines = Engines(*[each.wait_until_ready() for each in started])
    yield engines
    engines.close()


@pytest.fixture(autouse=True)
def afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engines" in request.fixturenames:
        request.getfixturevalue("engines").check()


def restart_producer(engines: Engines, model: Path, port: int) -> None:
    engines.producer = EngineProcess(model, **settings("kv_producer", kv={"kv_port": port}))
    engines.producer.wait_until_ready()


class TestProducer:
    @pytest.mark.parametrize("do", STAGES)
    def test_killed(self, engines, model, port, do):
        """Both consumers know soon; the one that comes back on the same port knows nothing of old references."""
        prompts = [new_prompt() for _ in range(3)]
        rights = [engines.alone(prompt) for prompt in prompts]
        params = [engines.offered(prompt) for prompt in prompts]

        def kill(message: Message, ask: Ask) -> Message:
            answer = ask(message) if do == "piece" else None
            engines.producer.kill()
            return answer or ask(message)

        with engines.between.doing(at(do, kill, 2 if do == "piece" else 0)):
            began = time.monotonic()
            result = engines.failing.run(prompts[0], params[0], max_tokens=NEW_TOKENS)
            assert time.monotonic() - began < LEASE + 3
        if do == "ack":
            assert result["token_ids"] == rights[0], "all had come, and was confirmed"
        else:
            expect(engines.failing, engines, result, rights[0])
            assert failures(engines.failing)["lost"] >= 1
        gone = engines.recomputing.run(prompts[1], params[1], max_tokens=NEW_TOKENS)
        expect(engines.recomputing, engines, gone, rights[1])
        restart_producer(engines, model, port)
        old = engines.recomputing.run(prompts[2], params[2], max_tokens=NEW_TOKENS)
        expect(engines.recomputing, engines, old, rights[2])
        assert failures(engines.recomputing)["wrong_engine"] >= 1

    def test_killed_when_all_is_over(self, engines, model, port):
        prompt = new_prompt()
        right, params = engines.alone(prompt, 90 - len(prompt)), engines.offered(prompt)
        with engines.between.doing(passes):
            name = engines.failing.add(prompt, params, max_tokens=90 - len(prompt))
            while not engines.between.count("ack"):
                time.sleep(0.01)
        idle(engines.producer)
        engines.producer.kill()
        assert engines.failing.result(name)["token_ids"] == right
        restart_producer(engines, model, port)

    def test_killed_while_requests_wait_for_it(self, engines, model, port):
        """Heartbeats reach nobody; each request ends by its own policy."""
        prompts = [new_prompt() for _ in range(6)]
        rights = [engines.alone(prompt) for prompt in prompts]
        params = [engines.offered(prompt) for prompt in prompts]
        engines.producer.kill()
        for consumer in engines.consumers:
            names = [
                consumer.add(prompt, each, max_tokens=NEW_TOKENS)
                for prompt, each in zip(prompts, params, strict=True)
            ]
            for name, right in zip(names, rights, strict=True):
                expect(consumer, engines, consumer.result(name), right)
            idle(consumer)
        restart_producer(engines, model, port)

    @pytest.mark.parametrize("do", STAGES)
    def test_stands_still_for_ever(self, engines, model, port, do):
        prompt = new_prompt()
        right, params = engines.alone(prompt), engines.offered(prompt)

        def stop(message: Message, ask: Ask) -> Message:
            engines.producer.pause()
            return ask(message)

        with engines.between.doing(at(do, stop)):
            result = engines.recomputing.run(prompt, params, max_tokens=NEW_TOKENS)
        assert result["token_ids"] == right
        idle(engines.recomputing)
        engines.producer.kill()
        restart_producer(engines, model, port)


class TestConsumer:
    @pytest.mark.parametrize("end", ["kill", "pause"])
    @pytest.mark.parametrize("do", STAGES)
    def test_goes_away(self, engines, model, do, end):
        """The producer has its pages and its memory back when the lease is over, at the latest, and goes on."""
        prompt = new_prompt()
        params = engines.offered(prompt)

        def leave(message: Message, ask: Ask) -> Message:
            answer = ask(message)
            getattr(engines.failing, end)()
            return answer

        with engines.between.doing(at(do, leave)):
            engines.failing.add(prompt, params, max_tokens=NEW_TOKENS)
            while not engines.between.count(do):
                time.sleep(0.01)
            idle(engines.producer, LEASE + 3)
            other = new_prompt()
            result = engines.recomputing.run(other, engines.offered(other), max_tokens=NEW_TOKENS)
            assert result["token_ids"] == engines.alone(other)
        engines.failing.kill()
        engines.failing = EngineProcess(model, **settings("kv_consumer")).wait_until_ready()

    def test_killed_before_it_asks(self, engines, model):
        prompt = new_prompt()
        params = engines.offered(prompt)
        engines.failing.kill()
        with pytest.raises(Gone):
            engines.failing.run(prompt, params)
        assert idle(engines.producer, LEASE + 3)["transfers"]["sent"]["offers"]["expired"] >= 1
        engines.failing = EngineProcess(model, **settings("kv_consumer")).wait_until_ready()


UNLIKE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "other weights": ("trained on", {}, {}),
    "other layers": ("deeper", {}, {}),
    "drafts here only": (
        "drafting",
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
        {},
    ),
    "other records": ("tiny", {"kv_cache_dtype": "bfloat16"}, {}),
    "another secret": ("tiny", {}, {"secret": b"a secret of this test's"}),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_engines_that_do_not_fit_together(engines, model, tmp_path, name):
    kind, changes, extra = UNLIKE[name]
    directory = tmp_path / "model"
    if kind == "tiny":
        directory = model
    elif kind == "drafting":
        directory = write_drafting(directory)
    elif kind == "deeper":
        directory = write_tiny(directory, num_hidden_layers=3, index_topk_pattern="FSS")
    else:
        directory = write_tiny(directory)
        write_checkpoint(directory, CONFIG, make_tensors(CONFIG, seed=1))
    kv: dict[str, Any] = settings("kv_consumer", "recompute")["kv_transfer_config"]
    if extra:
        (tmp_path / "secret").write_bytes(extra["secret"])
        options = kv["kv_connector_extra_config"] | {"secret_file": str(tmp_path / "secret")}
        kv = kv | {"kv_connector_extra_config": options}
    other = EngineProcess(directory, **settings("kv_consumer", "recompute", kv=kv, **changes))
    other.wait_until_ready()
    prompt = new_prompt()
    params = engines.offered(prompt)
    result = other.run(prompt, params, max_tokens=NEW_TOKENS)
    assert result["token_ids"] == other.run(prompt, max_tokens=NEW_TOKENS)["token_ids"]
    assert failures(other) == {"auth" if extra else "unlike": 1}
    idle(other)
    other.close()


def test_a_part_of_a_cache_with_drafts_is_computed_anew(tmp_path):
    """What has come in part, the MTP layer's with it, is written over."""
    drafts = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
    directory = write_drafting(tmp_path / "model")
    started = [
        EngineProcess(directory, **settings("kv_producer", **drafts)),
        EngineProcess(directory, **settings("kv_consumer", **drafts)),
        EngineProcess(directory, **settings("kv_consumer", "recompute", **drafts)),
    ]
    engines = Engines(*[each.wait_until_ready() for each in started])
    for number in (0, 5, 10):
        for consumer in engines.consumers:
            prompt = new_prompt()
            right, params = engines.alone(prompt, 20), engines.offered(prompt)

            def wrong(message: Message, ask: Ask) -> Message:
                return ask(message) | {"crcs": []}

            with engines.between.doing(at("piece", wrong, number)):
                result = consumer.run(prompt, params, max_tokens=20)
            expect(consumer, engines, result, right)
    engines.check()
    engines.close()


@pytest.mark.parametrize("connector", ["tcp", "nixl", "jax"])
def test_hundreds_of_hand_overs_leave_nothing_behind(model, connector):
    """One after the other and eight at a time, with prefixes that both sides know: then as much memory as before."""
    from glm_dcp_jax.transfer.transports import available

    if connector not in available():
        pytest.skip(f"connector {connector} cannot be had here")
    kv = {"kv_connector": connector, "kv_connector_extra_config": {"piece_bytes": 4096}}
    room = {"num_gpu_blocks_override": 130, "max_num_seqs": 8, "precompile_bs_paddings": (8,)}
    producer = EngineProcess(model, **settings("kv_producer", kv=kv, **room))
    consumer = EngineProcess(model, **settings("kv_consumer", kv=kv, **room))
    producer.wait_until_ready()
    consumer.wait_until_ready()
    prefixes = random_prompts(16, 24, 40, 33, seed=9)

    def hand_over(number: int) -> None:
        """Eight at a time in every other round of eight."""
        tails = random_prompts(*(3 + (number * 7 + i) % 40 for i in range(8)), seed=number)
        prompts = [prefixes[(number + i) % 4] + tail for i, tail in enumerate(tails)]
        at_once = 8 if number % 16 else 1
        for first in range(0, 8, at_once):
            batch = prompts[first : first + at_once]
            offers = [producer.add(prompt, {"do_remote_decode": True}, max_tokens=1) for prompt in batch]
            alone = [producer.add(prompt, max_tokens=NEW_TOKENS) for prompt in batch]
            names = [
                consumer.add(prompt, producer.result(offer)["kv_transfer_params"], max_tokens=NEW_TOKENS)
                for prompt, offer in zip(batch, offers, strict=True)
            ]
            for name, right in zip(names, alone, strict=True):
                assert consumer.result(name)["token_ids"] == producer.result(right)["token_ids"]

    def measured() -> list[dict[str, Any]]:
        return [idle(producer), idle(consumer)]

    for number in range(0, 64, 8):
        hand_over(number)
    early = measured()
    for number in range(64, 264, 8):
        hand_over(number)
    late = measured()
    for before, after in zip(early, late, strict=True):
        assert after["resident_bytes"] < before["resident_bytes"] * 1.03 + 2**23, (before, after)
        for what in ("open_files", "threads"):  # a transport opens some connections only when it needs them
            assert after[what] <= before[what] + 8, (what, before, after)
    sent, received = (state["transfers"] for state in late)
    assert sent["sent"]["offers"]["offered"] == 264
    assert received["received"]["failed"] == {}
    producer.close()
    consumer.close()
