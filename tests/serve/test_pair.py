"""A pair as processes: it starts and ends as one, and answers as one server does."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from live import wait_until

sys.path.append(str(Path(__file__).parents[1] / "engine"))

from tiny import GREEDY, SETTINGS, generate, random_prompts, tiny_llm, write_tiny

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
STUBBED = """
import sys
from glm_dcp_jax.serve.pair import __main__ as entry, run
run.SERVER = run.ROUTER = "stub_server"
sys.exit(entry.main(["somewhere/fake", "--port", "0"]))
"""


class Pair:
    """A pair's process, and what it says."""

    def __init__(self, command: list[str], **environment: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | environment
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment | {"PYTHONPATH": f"{ROOT}:{HERE}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
        self._reader.start()

    def url(self) -> str:
        """Where it is ready; empty if it ends before that."""
        return self.process.stdout.readline().strip()

    def children(self) -> list[int]:
        """The ids of its processes."""
        pid = self.process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def ended(self, seconds: float = 30) -> int:
        """Its exit code, and all of its log has been read then."""
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code


def alive(pids: list[int]) -> list[int]:
    """Those that still run; one that has ended and was not waited for does not."""
    states = {pid: Path(f"/proc/{pid}/stat") for pid in pids}
    return [pid for pid, stat in states.items() if stat.exists() and ") Z " not in stat.read_text()]


@pytest.fixture
def start() -> Iterator[Callable[..., Pair]]:
    """Starts a pair of stubs; whatever a test does, nothing of it is left."""
    pairs: list[Pair] = []

    def make(**environment: str) -> Pair:
        pairs.append(Pair(["-c", STUBBED], **environment))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.process.kill()
        pair.process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_three_in_order(start, number):
    pair = start()
    assert re.fullmatch(r"http://127.0.0.1:\d+/v1", pair.url())
    children = pair.children()
    assert len(children) == 3
    pair.process.send_signal(number)
    assert pair.ended() == 0 and alive(children) == []
    log = "".join(pair.log)
    for name in ("prefill", "decode", "router"):
        assert f"[{name}] this is {name}\n" in log and f"] {name} is ready, after" in log
    assert log.index("[router] ending") < log.index("[prefill] ending")


@pytest.mark.parametrize(("dying", "code"), [("prefill", 7), ("decode", 1), ("router", 0)])
def test_when_one_ends_all_end_and_the_exit_code_is_told(start, dying, code):
    pair = start(STUB_ENDS=f"{dying} {code}")
    pair.url()
    assert pair.ended() == (code or 1)
    assert f"the {dying} server has ended with exit code {code}; stopping the others" in "".join(pair.log)


def test_a_second_signal_ends_what_does_not_end_by_itself(start):
    pair = start(STUB_STUBBORN="1")
    pair.url()
    children = pair.children()
    pair.process.send_signal(signal.SIGINT)
    wait_until(lambda: any("[router] ending" in line for line in pair.log))
    assert pair.process.poll() is None
    pair.process.send_signal(signal.SIGINT)
    assert pair.ended() == 1 and alive(children) == []


def test_nothing_outlives_a_pair_that_is_killed(start):
    pair = start(STUB_STUBBORN="1")
    pair.url()
    children = pair.children()
    pair.process.kill()
    wait_until(lambda: alive(children) == [])


def test_a_taken_port_is_said_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "glm_dcp_jax.serve.pair", "somewhere/fake", "--port", port]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"cannot listen on 127.0.0.1 port {port}" in done.stderr
    assert "Traceback" not in done.stderr


def flags_of(settings: dict) -> list[str]:
    return [
        f"--{name.replace('_', '-')}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in settings.items()
    ]


def text_of_stream(url: str, body: dict) -> str:
    with httpx.stream("POST", f"{url}/completions", json=body | {"stream": True}, timeout=120) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert answer.status_code == 200 and lines[-1] == "[DONE]"
    return "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"])


def arrived(pair: Pair) -> float:
    """Caches that the decode server has taken from the prefill server."""
    ready = next(line for line in pair.log if line.startswith("[decode]") and " is ready at " in line)
    text = httpx.get(ready.split(" is ready at ")[1].split("/v1")[0] + "/metrics").text
    return float(re.search(r"^vllm:nixl_xfer_time_seconds_count\{.*\} (.*)$", text, re.MULTILINE)[1])


def test_a_pair_answers_as_one_server_does_and_leaves_nothing_behind(tmp_path):
    model = write_tiny(tmp_path / "model")
    sizes = SETTINGS | {"precompile_token_paddings": (64,)}
    layouts = ["--prefill", "-tp 2 -dcp 1", "--decode", "-tp 4 -dcp 4 --cp-kv-cache-interleave-size 2"]
    command = ["-m", "glm_dcp_jax.serve.pair", str(model), "--port", "0", *layouts, *flags_of(sizes)]
    pair = Pair(command)
    try:
        url = pair.url()
        assert url, "".join(pair.log)
        prompts = random_prompts(70, 9)
        alone = tiny_llm(model, **sizes)
        expected = [output.outputs[0].text for output in generate(alone, prompts, GREEDY)]
        for count, (prompt, text) in enumerate(zip(prompts, expected, strict=True)):
            body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
            answer = httpx.post(f"{url}/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == text
            assert text_of_stream(url, body | {"cache_salt": "another"}) == text
            assert arrived(pair) == 2 * (count + 1)
        children = pair.children()
        began = time.monotonic()
        pair.process.send_signal(signal.SIGINT)
        assert pair.ended(60) == 0 and alive(children) == []
        assert time.monotonic() - began < 30
        assert "Traceback" not in "".join(pair.log)
    finally:
        pair.process.kill()
        pair.process.wait()
