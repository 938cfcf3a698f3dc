"""The engine behind an event loop: concurrent requests, closing early, bad requests, failures and shutdown."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import GREEDY, MIXED, PROMPT, SETTINGS, changed, generate, random_prompts, tokens_of

from glm_dcp_jax import SamplingParams
from glm_dcp_jax.config import engine_config
from glm_dcp_jax.engine.async_engine import AsyncEngine, EngineDead, _Mailbox
from glm_dcp_jax.engine.outputs import RequestOutput
from glm_dcp_jax.engine.runner import Runner
from glm_dcp_jax.engine.sequence import Progress, Request, Sequence
from glm_dcp_jax.engine.waiting import QueueFull

LONG = changed(GREEDY, max_tokens=80)
PATIENCE = 90
"""Seconds after which something that should have happened has not; enough for compilations on a busy machine."""


def run(coroutine: Awaitable) -> object:
    """Run to its end; a hang fails."""

    async def limited() -> object:
        return await asyncio.wait_for(coroutine, PATIENCE)

    return asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    stop = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < stop, "waited in vain"
        await asyncio.sleep(0.005)


async def all_of(
    engine: AsyncEngine, prompt: list[int], params: SamplingParams, request_id: str
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, request_id)]


async def last_of(
    engine: AsyncEngine, prompt: list[int], params: SamplingParams, request_id: str
) -> list[int]:
    return (await all_of(engine, prompt, params, request_id))[-1].outputs[0].token_ids


def progress_of(request_id: str) -> Progress:
    sequence = Sequence(0, list(PROMPT), len(PROMPT), len(PROMPT) + 1, 0, GREEDY)
    return Request(request_id, None, PROMPT, [sequence]).progress()


def start(directory: Path) -> AsyncEngine:
    """Pages for four of the longest requests, which run at once; prefills of 64 rows only, for a quick start."""
    sizes = {**SETTINGS, "precompile_token_paddings": (64,), "num_gpu_blocks_override": 100}
    return AsyncEngine.from_config(engine_config(str(directory), **sizes))


def slow_down(engine: AsyncEngine, patch: pytest.MonkeyPatch) -> None:
    """Give every step 20 ms more, so that a test finds LONG requests running."""
    step = engine._engine.step
    patch.setattr(engine._engine, "step", lambda: (time.sleep(0.02), step())[1])


@pytest.fixture(scope="module")
def shared(directory) -> Iterator[AsyncEngine]:
    engine = start(directory)
    run(until(lambda: engine.is_ready))
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(shared) -> Iterator[AsyncEngine]:
    """An engine that every test must leave alive and empty."""
    yield shared
    run(until(lambda: (shared.stats().running, shared.stats().waiting) == (0, 0)))
    assert shared.is_ready and not shared.is_dead and shared.failure is None
    assert shared.stats().cache_usage == 0


@pytest.fixture
def mortal(directory) -> Iterator[AsyncEngine]:
    """An engine of the test's own, which it may kill."""
    engine = start(directory)
    run(until(lambda: engine.is_ready))
    yield engine
    engine.shutdown()


def test_a_line_says_what_is_served(shared):
    assert shared.summary == (
        "tensor parallel size 1, decode context parallel size 1, dtype float32, weights not quantised, "
        "KV cache float32, max model len 100, no drafts"
    )


class TestRequests:
    def test_concurrent_requests_give_what_llm_gives(self, engine, llm):
        params = [changed(GREEDY, temperature=row % 2, seed=row, max_tokens=12) for row in range(len(MIXED))]

        async def together() -> list[list[int]]:
            parts = zip(MIXED, params, strict=True)
            return await asyncio.gather(
                *(last_of(engine, prompt, own, str(row)) for row, (prompt, own) in enumerate(parts))
            )

        assert run(together()) == tokens_of(generate(llm, MIXED, params))

    def test_outputs_are_cumulative_and_the_last_one_is_finished(self, engine, greedy):
        outputs = run(all_of(engine, PROMPT, GREEDY, "a"))
        assert outputs[-1].finished and outputs[-1].outputs[0].token_ids == greedy
        assert not any(output.finished for output in outputs[:-1])
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == sorted(lengths)
        assert all(
            output.outputs[0].token_ids == greedy[:n] for output, n in zip(outputs, lengths, strict=True)
        )
        assert {output.request_id for output in outputs} == {"a"}

    def test_a_slow_reader_misses_outputs_but_not_the_last(self, engine, greedy):
        async def read_slowly() -> list[RequestOutput]:
            seen = []
            async for output in engine.generate(PROMPT, LONG, "slow"):
                seen.append(output)
                await asyncio.sleep(0.2)
            return seen

        seen = run(read_slowly())
        assert len(seen) < 80 and len(seen[-1].outputs[0].token_ids) == 80

    def test_an_output_is_taken_once(self):
        """The wake-up of an output that was taken together with an older one must not show it a second time."""

        async def two_puts() -> None:
            box = _Mailbox()
            box.put(progress_of("first"))
            await asyncio.sleep(0)
            box.put(progress_of("second"))
            assert (await box.take()).request_id == "second"
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(box.take(), 0.05)

        run(two_puts())

    @pytest.mark.parametrize(
        ("prompt", "params", "message"),
        [
            ([], GREEDY, "the prompt is empty"),
            ([10**6], GREEDY, "token id 1000000 is not in the vocabulary"),
            ([7] * 100, GREEDY, "maximum context length is 100 tokens"),
        ],
        ids=["empty", "unknown token", "too long"],
    )
    def test_a_bad_request_is_a_value_error_and_the_engine_lives(
        self, engine, greedy, prompt, params, message
    ):
        async def bad_beside_good() -> list[int]:
            good = asyncio.create_task(last_of(engine, PROMPT, GREEDY, "good"))
            with pytest.raises(ValueError, match=message):
                await all_of(engine, prompt, params, "bad")
            return await good

        assert run(bad_beside_good()) == greedy

    def test_an_id_in_use_is_refused_and_its_owner_goes_on(self, engine, greedy):
        async def twice() -> list[int]:
            first = engine.generate(PROMPT, LONG, "same")
            await anext(first)
            with pytest.raises(ValueError, match="request id 'same' is in use"):
                await all_of(engine, PROMPT, GREEDY, "same")
            return [output async for output in first][-1].outputs[0].token_ids

        assert run(twice())[: len(greedy)] == greedy

    def test_a_full_queue_refuses_and_the_engine_lives(self, engine, greedy, monkeypatch):
        limited = replace(engine.config.scheduler, max_num_queued_reqs=1)
        monkeypatch.setattr(engine._engine, "config", replace(engine.config, scheduler=limited))

        async def together() -> list[list[int] | BaseException]:
            each = (last_of(engine, PROMPT, GREEDY, str(row)) for row in range(8))
            return await asyncio.gather(*each, return_exceptions=True)

        slow_down(engine, monkeypatch)
        ended = run(together())
        assert greedy in ended
        assert {type(result) for result in ended if result != greedy} == {QueueFull}

    def test_priority_and_salt_go_with_a_request(self, engine, monkeypatch):
        limited = replace(engine.config.scheduler, scheduling_policy="priority")
        monkeypatch.setattr(engine._engine._maker, "_config", replace(engine.config, scheduler=limited))
        scheduler, queued = engine._engine.scheduler, []
        add = scheduler.add
        monkeypatch.setattr(
            scheduler, "add", lambda sequence: (queued.append(sequence.priority), add(sequence))
        )
        prompt = random_prompts(20, seed=9)[0]

        async def cached(priority: int, salt: str) -> int:
            outputs = engine.generate(prompt, GREEDY, "a", priority=priority, cache_salt=salt)
            return [output async for output in outputs][-1].num_cached_tokens

        asked = [(3, "one"), (-1, "two"), (0, "one")]
        assert [run(cached(*fields)) for fields in asked] == [0, 0, 19]
        assert queued == [3, -1, 0]

    def test_a_reset_forgets_what_nobody_uses(self, engine, monkeypatch):
        prompt = random_prompts(20, seed=11)[0]

        async def reset_while_running() -> list[bool]:
            running = engine.generate(prompt, LONG, "running")
            await anext(running)
            refused = await engine.reset_prefix_cache()
            await running.aclose()
            return [refused, await engine.reset_prefix_cache()]

        slow_down(engine, monkeypatch)
        assert run(reset_while_running()) == [False, True]
        outputs = run(all_of(engine, prompt, GREEDY, "again"))
        assert outputs[-1].num_cached_tokens == 0

    def test_stats_count_what_was_done(self, engine):
        before = engine.stats()
        run(all_of(engine, PROMPT, GREEDY, "counted"))
        run(until(lambda: engine.stats().generation_tokens == before.generation_tokens + 8))
        assert engine.stats().prompt_tokens == before.prompt_tokens + len(PROMPT)


class TestEnding:
    @pytest.fixture(autouse=True)
    def slow(self, engine, monkeypatch) -> None:
        slow_down(engine, monkeypatch)

    def test_closing_a_generator_aborts_its_request_and_frees_its_pages(self, engine):
        async def close_early() -> None:
            outputs = engine.generate(PROMPT, LONG, "closed")
            await anext(outputs)
            await until(lambda: engine.stats().cache_usage > 0)
            await outputs.aclose()
            await until(lambda: engine.stats().cache_usage == 0)

        began = engine.stats().generation_tokens
        run(close_early())
        assert engine.stats().generation_tokens - began < 80

    @pytest.mark.parametrize("delay", [0.0, 0.001, 0.1])
    def test_cancelling_a_reader_aborts_too(self, engine, delay):
        async def cancel() -> None:
            task = asyncio.create_task(all_of(engine, PROMPT, LONG, "cancelled"))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: engine.stats().running == engine.stats().waiting == 0)

        began = engine.stats().generation_tokens
        run(cancel())
        assert engine.stats().generation_tokens - began < 80

    def test_abort_ends_the_generator_with_a_last_output(self, engine):
        async def abort() -> RequestOutput:
            outputs = engine.generate(PROMPT, LONG, "aborted")
            await anext(outputs)
            await engine.abort("aborted")
            await engine.abort("unknown")
            return [output async for output in outputs][-1]

        output = run(abort())
        assert output.finished and output.outputs[0].finish_reason == "abort"
        assert 1 <= len(output.outputs[0].token_ids) < 80

    def test_who_waits_gets_the_place_of_one_that_is_closed(self, engine, greedy):
        async def fifth() -> list[int]:
            holders = [engine.generate(PROMPT, LONG, str(number)) for number in range(4)]
            for holder in holders:
                await anext(holder)
            waiting = asyncio.create_task(last_of(engine, PROMPT, GREEDY, "waiting"))
            await until(lambda: engine.stats().waiting == 1)
            await holders[2].aclose()
            tokens = await waiting
            for holder in holders:
                await holder.aclose()
            return tokens

        assert run(fifth()) == greedy


class TestDeath:
    def test_a_failed_step_ends_every_request_and_the_engine_is_dead(self, mortal, monkeypatch):
        def fail(*_: object) -> None:
            raise RuntimeError("device lost")

        async def many() -> list[BaseException]:
            tasks = [asyncio.create_task(all_of(mortal, PROMPT, LONG, str(n))) for n in range(6)]
            await until(lambda: mortal.stats().running == 4)
            monkeypatch.setattr(mortal._engine.runner, "launch", fail)
            return await asyncio.gather(*tasks, return_exceptions=True)

        slow_down(mortal, monkeypatch)
        errors = run(many())
        assert [type(error) for error in errors] == [EngineDead] * 6
        assert all("the engine failed: device lost" in str(error) for error in errors)
        assert mortal.is_dead and not mortal.is_ready and str(mortal.failure) == "device lost"
        with pytest.raises(EngineDead, match="device lost"):
            run(all_of(mortal, PROMPT, GREEDY, "late"))
        with pytest.raises(EngineDead):
            run(mortal.abort("0"))
        mortal.shutdown()

    @pytest.mark.parametrize("ending", ["failure", "shutdown"])
    def test_a_request_that_arrives_during_the_last_step_ends_too(self, mortal, monkeypatch, ending):
        """It is posted while the step runs, and looked at only after the engine has stopped."""
        in_step, leave_step = threading.Event(), threading.Event()

        def last_step() -> list[Progress]:
            in_step.set()
            leave_step.wait(PATIENCE)
            if ending == "failure":
                raise RuntimeError("device lost")
            return []

        monkeypatch.setattr(mortal._engine, "step", last_step)

        async def arrive_late() -> list[BaseException]:
            first = asyncio.create_task(all_of(mortal, PROMPT, LONG, "first"))
            await until(in_step.is_set)
            late = asyncio.create_task(all_of(mortal, PROMPT, LONG, "late"))
            await until(lambda: len(mortal._calls) == 1)
            if ending == "shutdown":
                threading.Thread(target=mortal.shutdown).start()
                await until(lambda: mortal.is_dead)
            leave_step.set()
            return await asyncio.wait_for(asyncio.gather(first, late, return_exceptions=True), 5)

        assert [type(error) for error in run(arrive_late())] == [EngineDead] * 2

    def test_shutdown_ends_every_request_and_the_thread(self, mortal, monkeypatch):
        async def shut_down() -> list[BaseException]:
            tasks = [asyncio.create_task(all_of(mortal, PROMPT, LONG, str(n))) for n in range(6)]
            await until(lambda: mortal.stats().running == 4)
            await asyncio.to_thread(mortal.shutdown)
            return await asyncio.gather(*tasks, return_exceptions=True)

        slow_down(mortal, monkeypatch)
        errors = run(shut_down())
        assert [type(error) for error in errors] == [EngineDead] * 6
        assert {str(error) for error in errors} == {"the engine was shut down"}
        assert mortal.is_dead and not mortal.is_ready and mortal.failure is None
        assert not mortal._thread.is_alive()
        mortal.shutdown()
        with pytest.raises(EngineDead, match="the engine was shut down"):
            run(all_of(mortal, PROMPT, GREEDY, "late"))

    def test_a_shutdown_while_steps_are_compiled_ends_what_waits(self, directory):
        async def at_once() -> list[BaseException]:
            engine = start(directory)
            early = asyncio.create_task(all_of(engine, PROMPT, GREEDY, "early"))
            await until(lambda: len(engine._calls) == 1)
            assert not engine.is_ready
            await asyncio.to_thread(engine.shutdown)
            return await asyncio.wait_for(asyncio.gather(early, return_exceptions=True), 5)

        assert [type(error) for error in run(at_once())] == [EngineDead]

    def test_a_failed_compilation_kills_the_engine_with_its_reason(self, directory, monkeypatch):
        def fail(*_: object) -> None:
            raise RuntimeError("cannot compile")

        monkeypatch.setattr(Runner, "warm_up", fail)
        engine = start(directory)
        run(until(lambda: engine.is_dead))
        assert str(engine.failure) == "cannot compile" and not engine.is_ready
        engine.shutdown()
