"""An engine in a process of its own, told what to do by lines of JSON; and the handle that tests have of it.

As a program: `python engine_process.py MODEL '{"tensor_parallel_size": 4, ...}'`. It answers on stdout, a line each.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
READY_SECONDS, ANSWER_SECONDS = 240.0, 120.0


class Gone(Exception):
    """The process has ended."""


class EngineProcess:
    """One engine. Requests run side by side; `result` waits for one of them."""

    def __init__(self, model: Path, **settings: Any) -> None:
        """Starts it; `wait_until_ready` says when it can be used."""
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._results: dict[str, dict[str, Any]] = {}
        self._names = 0
        self.stderr: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(model), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    def wait_until_ready(self) -> "EngineProcess":
        """Until everything is compiled."""
        assert self._next(READY_SECONDS) == {"ready": True}
        return self

    def add(self, prompt: list[int], params: dict[str, Any] | None = None, **sampling: Any) -> str:
        """Queue a request; params are its kv_transfer_params. Returns its name."""
        self._names += 1
        name = str(self._names)
        extra = {"extra_args": {"kv_transfer_params": params}} if params else {}
        sampling = {"temperature": 0, "ignore_eos": True} | sampling | extra
        self._tell({"do": "add", "id": name, "prompt": prompt, "sampling": sampling})
        return name

    def result(self, name: str, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """What became of a request: token_ids, finish_reason, logprobs, cached, kv_transfer_params; or error."""
        deadline = time.monotonic() + seconds
        while name not in self._results:
            line = self._next(deadline - time.monotonic())
            self._results[line["done"]] = line
        return self._results.pop(name)

    def run(self, prompt: list[int], params: dict[str, Any] | None = None, **sampling: Any) -> dict[str, Any]:
        """`add` and `result`."""
        return self.result(self.add(prompt, params, **sampling))

    def abort(self, name: str) -> None:
        """Somebody goes away."""
        self._tell({"do": "abort", "id": name})

    def state(self) -> dict[str, Any]:
        """used pages, usage and counts of the connector, running, waiting, compiles after warm-up, resident bytes, open
        files, threads."""
        self._tell({"do": "state"})
        while True:
            line = self._next(ANSWER_SECONDS)
            if "state" in line:
                return line["state"]
            self._results[line["done"]] = line

    def wait_idle(self, seconds: float = 20.0) -> dict[str, Any]:
        """Until nothing is held, on its way or in use; the last state, even if something still is."""
        deadline = time.monotonic() + seconds
        while True:
            state = self.state()
            busy = (
                state["used"]
                or state["usage"]["held"]
                or state["usage"]["loads"]
                or state["usage"]["tickets"]
            )
            if not busy or time.monotonic() > deadline:
                return state
            time.sleep(0.05)

    def kill(self) -> None:
        """At once, without a word."""
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        """Stops it where it stands."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on."""
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends it, if it has not ended."""
        if self.process.poll() is None:
            self.resume()
            try:
                self._tell({"do": "stop"})
                self.process.wait(20)
            except (Gone, subprocess.TimeoutExpired):
                self.kill()

    def _tell(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise Gone("".join(self.stderr[-30:])) from None

    def _next(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(seconds, 0.01))
        except queue.Empty:
            raise TimeoutError("".join(self.stderr[-30:])) from None
        if line is None:
            self._lines.put(None)
            raise Gone("".join(self.stderr[-30:]))
        return line

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr.append(line)


def main(model: str, settings: dict[str, Any]) -> None:
    """Run the engine until stdin ends or says stop."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from glm_dcp_jax import LLM, SamplingParams

    engine = LLM(model, **settings).engine
    commands: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))
            engine.wake()
        commands.put({"do": "stop"})

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), flush=True)

    engine.runner.warm_up()
    threading.Thread(target=read, daemon=True).start()
    say({"ready": True})
    while True:
        waits = not engine.has_unfinished
        try:
            command = commands.get(timeout=0.02) if waits else commands.get_nowait()
        except queue.Empty:
            command = {"do": "nothing"}
        name = command.get("id", "")
        if command["do"] == "stop":
            break
        if command["do"] == "add":
            try:
                engine.add_request(name, command["prompt"], SamplingParams(**command["sampling"]))
            except ValueError as error:
                say({"done": name, "error": str(error)})
        elif command["do"] == "abort":
            engine.abort(name)
        elif command["do"] == "state":
            say({"state": state(engine)})
        for progress in engine.step():
            if progress.finished:
                say(result(progress.output()))
    engine.close()


def result(output: Any) -> dict[str, Any]:
    """A finished request, as JSON."""
    first = output.outputs[0]
    logprobs = [
        {str(token): entry.logprob for token, entry in entries.items()} for entries in first.logprobs or []
    ]
    return {
        "done": output.request_id,
        "token_ids": first.token_ids,
        "all_token_ids": [each.token_ids for each in output.outputs],
        "finish_reason": first.finish_reason,
        "logprobs": logprobs,
        "cached": output.num_cached_tokens,
        "kv_transfer_params": output.kv_transfer_params,
    }


def state(engine: Any) -> dict[str, Any]:
    """What is held, as JSON."""
    stats = engine.stats()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "used": engine.scheduler.allocator.num_used,
        "usage": engine.connector.usage() if engine.connector is not None else {},
        "running": stats.running,
        "waiting": stats.waiting,
        "compiles_after_warm_up": stats.compiles_after_warm_up,
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "open_files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "transfers": None if stats.transfers is None else asdict(stats.transfers),
    }


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
