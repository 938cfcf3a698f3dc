"""A server of two processes, each with half of the devices, answers what one process with all of them does."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

sys.path.append(str(Path(__file__).parents[1] / "engine"))

from tiny import GREEDY, MIXED, SETTINGS, changed, generate, tiny_llm, tokens_of, write_drafting

SIZES = SETTINGS | {"precompile_token_paddings": (64,), "num_gpu_blocks_override": 40}
SMALL = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "dcp_decode_path": "records"}
LARGE = {
    "tensor_parallel_size": 8,
    "decode_context_parallel_size": 4,
    "dcp_decode_path": "bulk",
    "speculative_config": '{"method": "mtp", "num_speculative_tokens": 2}',
}
START_SECONDS = 150


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_drafting(tmp_path_factory.mktemp("drafting"))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(model: Path, process: int, coordinator: str, mesh: dict, *more: str) -> subprocess.Popen:
    flags = [
        f"--{name.replace('_', '-')}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in (mesh | SIZES).items()
    ]
    command = [sys.executable, "-m", "glm_dcp_jax.serve", str(model), "--port", "0", *flags, *more]
    command += ["--num-processes", "2", "--process-id", str(process), "--coordinator-address", coordinator]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def read(process: subprocess.Popen, lines: list[str]) -> threading.Thread:
    reader = threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)
    reader.start()
    return reader


@pytest.fixture(params=[SMALL, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["2 devices", "8 devices"])
def mesh(request) -> dict:
    return request.param


@pytest.fixture
def running(model, mesh) -> Iterator[tuple[str, list[subprocess.Popen], list[list[str]]]]:
    """The server's address, both processes, and what each has said."""
    coordinator = f"127.0.0.1:{free_port()}"
    both = [start(model, process, coordinator, mesh) for process in (1, 0)][::-1]
    said: list[list[str]] = [[], []]
    for process, lines in zip(both, said, strict=True):
        read(process, lines)
    try:
        end = time.monotonic() + START_SECONDS
        while not (ready := [line for line in said[0] if " is ready at " in line]):
            assert time.monotonic() < end and all(process.poll() is None for process in both), said
            time.sleep(0.2)
        yield ready[0].split(" is ready at ")[1].split("/v1")[0], both, said
    finally:
        for process in both:
            process.kill()
            process.wait()


def ask(url: str, prompt: list[int], **fields: object) -> list[list[int]]:
    body = {"prompt": prompt, "ignore_eos": True, "return_token_ids": True, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def test_two_processes_answer_as_one(running, model, mesh, devices):
    url, both, said = running
    devices(mesh["tensor_parallel_size"])
    params = [
        changed(GREEDY, max_tokens=20),
        changed(GREEDY, temperature=0.8, top_p=0.9, seed=7, n=2),
        changed(GREEDY, presence_penalty=1.0, min_tokens=2),
    ]
    fields = [
        {"temperature": 0, "max_tokens": 20},
        {"temperature": 0.8, "top_p": 0.9, "seed": 7, "n": 2, "max_tokens": 8},
        {"temperature": 0, "presence_penalty": 1.0, "min_tokens": 2, "max_tokens": 8},
    ]
    with ThreadPoolExecutor(len(MIXED)) as pool:
        wrong = pool.submit(httpx.post, f"{url}/v1/completions", json={"prompt": [10**6]})
        found = list(pool.map(lambda at: ask(url, MIXED[at], **fields[at % 3]), range(len(MIXED))))
        assert wrong.result().status_code == 400
    alone = tiny_llm(model, **{**mesh, **SIZES})
    outputs = generate(alone, MIXED, [params[at % 3] for at in range(len(MIXED))])
    assert [tokens for answers in found for tokens in answers] == tokens_of(outputs)

    both[0].send_signal(signal.SIGINT)
    both[1].send_signal(signal.SIGINT)  # as a terminal does
    assert [process.wait(60) for process in both] == [0, 0], said


def test_processes_with_other_flags_do_not_serve(model):
    coordinator = f"127.0.0.1:{free_port()}"
    both = [start(model, 1, coordinator, SMALL, "--seed", "1"), start(model, 0, coordinator, SMALL)]
    try:
        for process in both:
            _, said = process.communicate(timeout=START_SECONDS)
            assert process.returncode != 0
            assert "processes 1 were started with other flags" in said
    finally:
        for process in both:
            process.kill()
            process.wait()
