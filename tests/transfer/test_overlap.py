"""Caches travel beside what both engines do otherwise."""

import sys
import time
from pathlib import Path

import pytest

from glm_dcp_jax import LLM, SamplingParams
from glm_dcp_jax.transfer.transports import TransportError

sys.path.append(str(Path(__file__).parents[1] / "engine"))

from tiny import random_prompts, tiny_llm, write_tiny

SLOW = 0.15
LONG, SHORT, OTHER = random_prompts(70, 5, 6)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def engine(directory: Path, role: str, **layout: int) -> LLM:
    transfer = {
        "kv_connector": "inproc",
        "kv_role": role,
        "kv_connector_extra_config": {"piece_bytes": 4096},
    }
    return tiny_llm(directory, kv_transfer_config=transfer, **layout)


@pytest.fixture(scope="module")
def pair(devices, tmp_path_factory):
    """A producer whose pieces take a while, and a consumer."""
    devices(2)
    directory = write_tiny(tmp_path_factory.mktemp("model"))
    producer = engine(directory, "kv_producer")
    consumer = engine(directory, "kv_consumer", tensor_parallel_size=2, decode_context_parallel_size=2)
    packing = producer.engine.connector._producer
    pack = packing._pack
    packing._pack = lambda *arguments: (time.sleep(SLOW), pack(*arguments))[1]
    yield producer.engine, consumer.engine
    consumer.engine.close()
    producer.engine.close()


def run_until(engine, done) -> dict[str, list]:
    """Steps until `done`; when each request had how many tokens."""
    moments: dict[str, list] = {}
    while not done():
        for progress in engine.step():
            now = time.monotonic()
            moments.setdefault(progress.request_id, []).append(now)
    return moments


def offered(producer, prompt: list[int]) -> dict:
    params = SamplingParams(
        temperature=0, max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}}
    )
    producer.add_request("p", prompt, params)
    outputs = []
    while not outputs:
        outputs = [progress.output() for progress in producer.step()]
    return outputs[0].kv_transfer_params


def bringing(params: dict) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=2, ignore_eos=True, extra_args={"kv_transfer_params": params}
    )


def test_the_consumer_decodes_while_a_cache_comes(pair):
    producer, consumer = pair
    params = offered(producer, LONG)
    consumer.add_request("own", SHORT, GREEDY)
    consumer.add_request("remote", LONG, bringing(params))
    began = time.monotonic()
    moments = run_until(consumer, lambda: not consumer.has_unfinished)
    assert moments["remote"][0] - began > 4 * SLOW, "the cache came in several slow pieces"
    assert sum(moment < moments["remote"][0] for moment in moments["own"]) >= 10, "tokens meanwhile"


def test_the_producer_computes_prompts_while_a_cache_leaves(pair):
    producer, consumer = pair
    params = offered(producer, LONG[::-1])
    consumer.add_request("remote", LONG[::-1], bringing(params))
    for _ in range(3):
        consumer.step()
    producer.add_request("next", OTHER, GREEDY)
    run_until(producer, lambda: not producer._requests)
    held = producer.connector.usage()["held"]
    assert held == 1, "the cache was still leaving when the next request was done"
    run_until(consumer, lambda: not consumer.has_unfinished)
    producer.step()
    deadline = time.monotonic() + 10
    while producer.scheduler.allocator.num_used and time.monotonic() < deadline:
        producer.step()
        time.sleep(0.01)
    assert producer.scheduler.allocator.num_used == consumer.scheduler.allocator.num_used == 0


def test_a_producer_without_room_is_asked_again(pair, monkeypatch):
    producer, consumer = pair
    transport = producer.connector._transport
    publish, refusals = transport.publish, iter(range(5))

    def full_at_times(*arguments):
        if next(refusals, None) is not None:
            raise TransportError("busy", "no room")
        return publish(*arguments)

    monkeypatch.setattr(transport, "publish", full_at_times)
    prompt = LONG[10:60]
    params = offered(producer, prompt)
    consumer.add_request("remote", prompt, bringing(params))
    run_until(consumer, lambda: not consumer.has_unfinished)
    received = consumer.stats().transfers.received
    assert next(refusals, None) is None and not received.failed
