"""Caches handed over between engines behind an event loop: who is told when a request goes another way, and when."""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_async_engine import all_of, run, until
from tiny import GREEDY, PROMPT, SETTINGS, changed, tiny_llm

from glm_dcp_jax import SamplingParams
from glm_dcp_jax.config import engine_config
from glm_dcp_jax.engine.async_engine import AsyncEngine, EngineDead
from glm_dcp_jax.engine.outputs import RequestOutput

SIZES = SETTINGS | {"precompile_token_paddings": (64,)}
LEASE = 600.0
"""Seconds: nothing here is given back because a lease has ended."""
HERE = Path(__file__).parent


def start(directory: Path, role: str, **extra: object) -> AsyncEngine:
    transfer = {"kv_connector": "tcp", "kv_role": role}
    transfer["kv_connector_extra_config"] = {"lease_seconds": LEASE, **extra}
    return AsyncEngine.from_config(engine_config(str(directory), kv_transfer_config=transfer, **SIZES))


@pytest.fixture(scope="module")
def both(directory) -> Iterator[tuple[AsyncEngine, AsyncEngine]]:
    engines = start(directory, "kv_producer"), start(directory, "kv_consumer")
    run(until(lambda: all(engine.is_ready for engine in engines)))
    yield engines
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def producer(both) -> Iterator[AsyncEngine]:
    """Whatever a test does, all that was held is given back, and the pages of an idle engine with it."""
    yield both[0]
    run(until(lambda: held(both[0]) == 0 and both[0].stats().cache_usage == 0))


@pytest.fixture
def consumer(both) -> Iterator[AsyncEngine]:
    yield both[1]
    run(until(lambda: both[1]._engine.connector.usage()["loads"] == 0))


def held(engine: AsyncEngine) -> int:
    return engine.stats().transfers.sent.offers.held


def bringing(params: dict | None, **changes: object) -> SamplingParams:
    return changed(GREEDY, extra_args={"kv_transfer_params": params}, **changes)


LEAVING = bringing({"do_remote_decode": True}, max_tokens=1)


async def offered(producer: AsyncEngine) -> dict:
    """What the producer says of a prompt that it holds."""
    output = (await all_of(producer, PROMPT, LEAVING, "left"))[-1]
    assert output.kv_transfer_params is not None and held(producer) == 1
    return output.kv_transfer_params


def pause(engine: AsyncEngine) -> threading.Event:
    """Keep its thread from doing anything until the event is set."""
    go_on = threading.Event()
    engine._post(go_on.wait)
    return go_on


def test_a_cache_is_handed_over_and_an_idle_producer_has_its_pages_back(producer, consumer, greedy):
    async def hand_over() -> list[RequestOutput]:
        return await all_of(consumer, PROMPT, bringing(await offered(producer)), "brought")

    last = run(hand_over())[-1]
    assert last.outputs[0].token_ids == greedy
    assert last.num_cached_tokens == len(PROMPT) - 1
    assert consumer.stats().transfers.received.seconds.total > 0


def test_a_request_that_will_not_come_gives_its_cache_back(producer, consumer):
    consumer.drop_remote(run(offered(producer)))
    run(until(lambda: held(producer) == 0))


@pytest.mark.parametrize("params", [None, {}, 5, {"do_remote_prefill": True}, {"do_remote_decode": True}])
def test_what_names_no_cache_is_dropped_without_a_word(producer, consumer, params):
    before = consumer.stats().transfers.received.unheard
    consumer.drop_remote(params)
    producer.drop_remote(params)
    assert consumer.stats().transfers.received.unheard == before


def test_who_waits_for_a_cache_no_more_releases_it_at_the_producer(producer):
    params = run(offered(producer))
    assert not producer.release_remote({**params, "remote_key": "0" * 32})
    assert producer.release_remote(params) and not producer.release_remote(params)
    with pytest.raises(ValueError, match="remote_key"):
        producer.release_remote({**params, "remote_key": "short"})


def test_a_reader_that_leaves_before_the_engine_knows_takes_its_cache_along(producer, consumer):
    async def leave() -> None:
        params = bringing(await offered(producer))
        go_on = pause(consumer)
        reading = asyncio.ensure_future(all_of(consumer, PROMPT, params, "unseen"))
        await asyncio.sleep(0.05)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        go_on.set()
        await until(lambda: held(producer) == 0)

    computed = consumer.stats().prompt_tokens
    run(leave())
    assert consumer.stats().prompt_tokens == computed


def test_a_request_that_the_engine_refuses_gives_its_cache_back(producer, consumer):
    async def refused() -> None:
        with pytest.raises(ValueError, match="not in the vocabulary"):
            await all_of(consumer, [*PROMPT, 10**6], bringing(await offered(producer)), "wrong")
        await until(lambda: held(producer) == 0)

    run(refused())


def test_an_output_that_nobody_reads_takes_its_offer_back(producer):
    async def leave() -> None:
        reading = asyncio.ensure_future(all_of(producer, PROMPT, LEAVING, "unread"))
        await asyncio.sleep(0)
        stop = time.monotonic() + 60
        while held(producer) == 0 and time.monotonic() < stop:  # so long, this loop hears of nothing
            time.sleep(0.005)
        assert held(producer) == 1
        reading.cancel()
        await until(lambda: held(producer) == 0)

    run(leave())


def test_a_cache_that_does_not_arrive_fails_the_request_in_words(producer, consumer):
    async def fail() -> RequestOutput:
        assert await consumer.reset_prefix_cache()  # it would do without otherwise
        params = await offered(producer)
        assert producer.release_remote(params)
        return (await all_of(consumer, PROMPT, bringing(params), "late"))[-1]

    output = run(fail())
    assert [each.finish_reason for each in output.outputs] == ["error"]
    assert output.outputs[0].token_ids == []
    assert output.error == "the KV cache of its prompt did not arrive (dropped)"


def test_a_producer_that_stops_lets_its_last_cache_be_read_and_waits_no_longer(directory, consumer, greedy):
    async def hand_over() -> list[RequestOutput]:
        assert await consumer.reset_prefix_cache()  # it would do without otherwise
        params = await offered(mortal)
        stopping = asyncio.ensure_future(asyncio.to_thread(mortal.shutdown, 60.0))
        await until(lambda: mortal.is_dead)
        outputs = await all_of(consumer, PROMPT, bringing(params), "last")
        await asyncio.wait_for(stopping, 20)
        return outputs

    mortal = start(directory, "kv_producer")
    run(until(lambda: mortal.is_ready))
    last = run(hand_over())[-1]
    assert last.outputs[0].token_ids == greedy and last.num_cached_tokens == len(PROMPT) - 1


def silent(port: int) -> dict:
    """A cache at an address where connections are taken, and nothing is ever said."""
    return {
        "do_remote_prefill": True,
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "remote_key": "0" * 32,
        "remote_num_tokens": len(PROMPT),
        "kv_connector": "tcp",
    }


def test_a_shutdown_does_not_wait_for_a_producer_that_says_nothing(directory):
    async def shut_down() -> None:
        reading = asyncio.ensure_future(all_of(engine, PROMPT, bringing(silent(port)), "stuck"))
        await until(lambda: engine.stats().running == 1)
        began = time.monotonic()
        await asyncio.to_thread(engine.shutdown)
        assert time.monotonic() - began < 15
        with pytest.raises(EngineDead):
            await reading

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        engine = start(directory, "kv_consumer", handshake_seconds=300.0)
        run(until(lambda: engine.is_ready))
        run(shut_down())


SCRIPT = """
import sys, time
sys.path.insert(0, {here!r})
from tiny import GREEDY, PROMPT, SETTINGS, tiny_llm
from test_async_transfers import bringing, silent
transfer = {{"kv_connector": "tcp", "kv_connector_extra_config": {{"handshake_seconds": 300.0}}}}
llm = tiny_llm({model!r}, **SETTINGS | {{"precompile_token_paddings": (64,)}}, kv_transfer_config=transfer)
llm.engine.add_request("stuck", PROMPT, bringing(silent({port})))
while not llm.engine.scheduler.running:
    llm.engine.step()
time.sleep(0.2)
{end}
print("the end")
"""


@pytest.mark.parametrize("end", ["", "del llm"], ids=["exit", "garbage"])
def test_a_process_with_transfers_under_way_ends(directory, end):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        script = SCRIPT.format(here=str(HERE), model=str(directory), port=listener.getsockname()[1], end=end)
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=90, cwd=HERE.parents[1]
        )
    assert done.returncode == 0 and done.stdout == "the end\n", done.stderr
    assert "Traceback" not in done.stderr


def test_a_shut_down_llm_gives_back_what_it_holds(directory):
    settings = SIZES | {"kv_transfer_config": {"kv_connector": "tcp", "kv_role": "kv_producer"}}
    llm = tiny_llm(directory, **settings)
    (output,) = llm.generate([PROMPT], LEAVING, use_tqdm=False)
    assert output.kv_transfer_params is not None
    assert llm.engine.connector.usage()["held"] == 1
    llm.shutdown()
    assert llm.engine.connector.usage()["held"] == 0
