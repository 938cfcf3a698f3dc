"""The producer's process: a child that does what lines of JSON ask for, and the handle that the benchmark has of it.

    python -m lib.transfer_child pools PRODUCER CACHE_SIZES         caches without an engine
    python -m lib.transfer_child engine MODEL SETTINGS              an engine

It ends when its stdin does, so that it never outlives the benchmark.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lib.transfer_failures import MeasurementFailed
from lib.transfer_flags import EngineLayout

from glm_dcp_jax import environment
from glm_dcp_jax.config import ConfigError

SCRIPTS = Path(__file__).parents[1]
ANSWER_SECONDS = 1800.0
_END_SECONDS, _SHOWN_LINES = 10.0, 15

Answer = dict[str, Any]


class Child:
    """A producer in a process of its own, started at once; `ready` waits for it."""

    def __init__(self, kind: str, *arguments: str, environ: Mapping[str, str]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the child)
        self._answers: queue.Queue[Answer | None] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lib.transfer_child", kind, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            cwd=SCRIPTS,
            env=environ,
            start_new_session=True,  # Ctrl+C is the benchmark's, which ends it
        )
        threading.Thread(target=self._read, daemon=True).start()

    def ready(self) -> Answer:
        """Its first word. Raises as `ask` does."""
        return self._answer()

    def ask(self, do: str, **what: Any) -> Answer:
        """Have something done. Raises ConfigError for what cannot be on this machine, MeasurementFailed if it ends,
        with the end of what it wrote.
        """
        assert self._process.stdin is not None
        try:
            print(json.dumps({"do": do, **what}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise MeasurementFailed(self._last_words()) from None
        return self._answer()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _answer(self) -> Answer:
        try:
            answer = self._answers.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            raise MeasurementFailed(f"the producer said nothing for {ANSWER_SECONDS:.0f} s") from None
        if answer is None:
            raise MeasurementFailed(self._last_words())
        if "refused" in answer:
            raise ConfigError(answer["refused"])
        return answer

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").splitlines()[-_SHOWN_LINES:]
        return "\n".join(["the producer's process ended; the end of what it said:", *lines])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)


class PoolsChild:
    """What the child does for `pools`."""

    def __init__(self, producer: str, sizes: str) -> None:
        engine = EngineLayout.of(producer)
        environment.prepare(engine.tp)
        from lib.transfer_ends import PoolProducer
        from lib.transfer_pools import BareCaches, CacheSizes

        self._make, self._current = PoolProducer, None
        self._caches = BareCaches(engine, CacheSizes(**json.loads(sizes)))
        self._caches.fill()

    def produce(self, connector: str) -> Answer:
        """From now on over this transport."""
        if self._current is not None:
            self._current.close()
        self._current = self._make(self._caches, connector)
        return {}

    def offer(self, tokens: int) -> Answer:
        """kv_transfer_params for so many."""
        return {"params": self._current.offer(tokens)}


class EngineChild:
    """What the child does for `engine`."""

    def __init__(self, model: str, settings: str) -> None:
        from glm_dcp_jax import LLM

        self._engine = LLM(model, **json.loads(settings)).engine
        self._engine.runner.warm_up()

    def prefill(self, prompt: list[int]) -> Answer:
        """Compute a prompt and keep its cache: params, seconds it took, and when it was done, of time.monotonic()."""
        wish = {"kv_transfer_params": {"do_remote_decode": True}}
        began = time.monotonic()
        output = self._run(prompt, max_tokens=1, extra_args=wish)
        done = time.monotonic()
        return {"params": output.kv_transfer_params, "seconds": done - began, "done_at": done}

    def alone(self, prompt: list[int], tokens: int) -> Answer:
        """So many tokens that it says to a prompt by itself."""
        return {"tokens": self._run(prompt, max_tokens=tokens).outputs[0].token_ids}

    def _run(self, prompt: list[int], **sampling: Any) -> Any:
        from glm_dcp_jax import SamplingParams

        params = SamplingParams(temperature=0, ignore_eos=True, **sampling)
        self._engine.add_request("request", prompt, params)
        while True:
            for progress in self._engine.step():
                if progress.finished:
                    return progress.output()


def _commands() -> "queue.Queue[Answer]":
    """What stdin asks for; its end is the process's, whatever it does then."""
    commands: queue.Queue[Answer] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return commands


def main(kind: str, *arguments: str) -> None:
    """Do what stdin says."""
    # Libraries may print: answers have a file of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    commands = _commands()

    def answer(do: Callable[[], Answer]) -> None:
        try:
            said = do()
        except ConfigError as error:
            said = {"refused": str(error)}
        print(json.dumps(said), file=answers, flush=True)

    served: list[Any] = []

    def start() -> Answer:
        served.append({"pools": PoolsChild, "engine": EngineChild}[kind](*arguments))
        return {}

    answer(start)
    while True:
        command = commands.get()
        name = command.pop("do")
        answer(lambda name=name, command=command: getattr(served[0], name)(**command))


if __name__ == "__main__":
    main(*sys.argv[1:])
