"""The server as a process: its log, and how it stops."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.serve import run

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from fake_engine import FakeEngine
from glm_dcp_jax.serve import __main__ as entry
engine = FakeEngine(delay=0.05)
engine.is_dead = {dead!r}
engine.is_ready = not engine.is_dead
entry._load = lambda command: engine
sys.exit(entry.main(["somewhere/fake", "--port", "0"]))
"""


def start(dead: bool) -> subprocess.Popen:
    script = SCRIPT.format(folder=str(Path(__file__).parent), dead=dead)
    return subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def server():
    process = start(dead=False)
    yield process
    process.kill()
    process.communicate()


def url_in_log(process: subprocess.Popen) -> str:
    for line in process.stderr:
        ready = re.search(r"somewhere/fake is ready at (http://127.0.0.1:\d+)/v1", line)
        if ready:
            assert re.match(r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[run.py:\d+\] ", line)
            return ready[1]
    raise AssertionError("the server ended without being ready")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_running_requests_finish_and_ends_with_0(server, number):
    url = url_in_log(server)
    assert httpx.get(f"{url}/health").status_code == 200
    body = {"prompt": [5], "max_tokens": 20, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        server.send_signal(number)
        *_, last, done = [line for line in lines if line]
        assert '"finish_reason":"length"' in last and done == "data: [DONE]"
    assert server.wait(timeout=10) == 0
    log = server.stderr.read()
    assert "Traceback" not in log and "POST /v1/completions" in log
    assert "/health" not in log, "polls would bury everything else"


def test_an_idle_server_stops_at_once(server):
    url_in_log(server)
    began = time.monotonic()
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=10) == 0
    assert time.monotonic() - began < 3


def test_an_engine_that_dies_while_warming_up_ends_the_server_with_1():
    process = start(dead=True)
    _, log = process.communicate(timeout=20)
    assert process.returncode == 1
    assert log.splitlines()[-1] == "error: the engine failed before it was ready; the log above says why"


def test_a_second_sigint_ends_running_requests_without_a_traceback(server):
    url = url_in_log(server)
    body = {"prompt": [5], "max_tokens": 60, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        server.send_signal(signal.SIGINT)
        time.sleep(0.3)  # two of the same signal at once are delivered as one
        server.send_signal(signal.SIGINT)
        *_, last, done = [line for line in lines if line]
        assert "the server is shutting down" in last and done == "data: [DONE]"
    assert server.wait(timeout=10) == 0
    assert "Traceback" not in server.stderr.read()


def test_a_signal_while_steps_are_compiled_ends_it_within_seconds(tmp_path):
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "glm_dcp_jax.serve", "--port", "0", "-tp", "1"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    seen = ""
    while "Compiling steps" not in seen:
        seen += process.stderr.read(1)
    time.sleep(0.5)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=60)
    assert time.monotonic() - began < 10
    assert process.returncode == 0, rest
    assert "Traceback" not in seen + rest


def test_streams_that_are_closed_leave_their_numbers_to_nobody():
    code = (
        "import os\nfrom glm_dcp_jax.serve.__main__ import _open_closed_streams\n_open_closed_streams()\n"
        "taken = os.dup(0)\nprint('out')\nos.write(9, str(taken > 2).encode())"
    )
    here, there = os.pipe()
    script = f'exec 9>&{there} 0<&- 1>&- 2>&-; exec "$@"'
    command = ["bash", "-c", script, "bash", sys.executable, "-c", code]
    subprocess.run(command, cwd=ROOT, check=True, pass_fds=(there,))
    os.close(there)
    assert os.read(here, 10) == b"True"
    os.close(here)


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("no.such.host.invalid", "no.such.host.invalid: "),
        ("a" * 80 + ".example", "'a{80}.example': that is no host's name"),
        ("\udcff", r"'\\udcff': that is no host's name"),
    ],
)
def test_a_host_that_is_not_ours_is_said(host, said):
    with pytest.raises(ConfigError, match=f"cannot listen on {said}"):
        run.bind(host, 0)
