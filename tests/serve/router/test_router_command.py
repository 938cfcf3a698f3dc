"""The router as a command: its flags, its log, how it stops, and what its page says."""

import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fake_backend import Script, stream
from live import wait_until

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.serve.router import metrics
from glm_dcp_jax.serve.router.__main__ import main
from glm_dcp_jax.serve.router.backends import Backend
from glm_dcp_jax.serve.router.flags import make_parser, parse
from glm_dcp_jax.serve.router.settings import RouterSettings

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "router.md"
COMMAND = [sys.executable, "-m", "glm_dcp_jax.serve.router"]
BOTH = ["--prefill", "http://a:1", "--decode", "http://b:1"]


def test_servers_are_named_once_or_several_times():
    settings = parse(["--prefill", "http://a:1", "http://a:2/", "--prefill", "https://[::1]:3/p", *BOTH[2:]])
    assert settings.prefill == ("http://a:1", "http://a:2", "https://[::1]:3/p")
    assert settings.decode == ("http://b:1",)


def test_defaults():
    assert parse(BOTH) == RouterSettings(("http://a:1",), ("http://b:1",))
    assert (RouterSettings.host, RouterSettings.port) == ("127.0.0.1", 8100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--prefill is missing; name at least one server, as --prefill http://host:port"),
        (BOTH[:2], "--decode is missing"),
        (
            ["--prefill", "a:1", *BOTH],
            "--prefill 'a:1' must begin with http:// or https://; give it as http://",
        ),
        (["--decode", "localhost", *BOTH], "must begin with http://"),
        (["--decode", "ftp://a", *BOTH], "must begin with http://"),
        (["--decode", "http://", *BOTH], "does not name a host and a port that can be reached"),
        (["--decode", "http://a:0", *BOTH], "does not name a host and a port that can be reached"),
        (["--decode", "http://a b:1", *BOTH], "does not name a host and a port that can be reached"),
        (["--decode", "http://a:port", *BOTH], "is not a URL"),
        (["--decode", "http://a:70000", *BOTH], "is not a URL"),
        (["--decode", "http://a..b:1", *BOTH], "is not a URL"),
        (["--decode", "http://xn--a:1", *BOTH], "is not a URL"),
        (["--decode", "http://me:secret@a:1", *BOTH], "--decode must not hold a user or password"),
        (["--decode", "http://a:1/?x=1", *BOTH], "must end before its ? or #"),
        (["--prefill", "http://a:1/", *BOTH], "--prefill names http://a:1 twice"),
        (["--policy", "random", *BOTH], "--policy: invalid choice: 'random'"),
        (["--port", "70000", *BOTH], "--port must be from 0 (any free one) to 65535"),
        (["--prefill-timeout", "0", *BOTH], "--prefill-timeout must be more than 0 seconds, but is 0"),
        (["--decode-timeout", "nan", *BOTH], "--decode-timeout must be more than 0 seconds"),
        (["--health-interval", "inf", *BOTH], "--health-interval must be more than 0 seconds"),
        (["--shutdown-timeout", "-1", *BOTH], "--shutdown-timeout must be 0 or more seconds, but is -1"),
        (["--min-prefill-chars", "-1", *BOTH], "--min-prefill-chars must be 0 (off) or more, but is -1"),
        (["--prefiller", "http://a:1", *BOTH], "unrecognized arguments: --prefiller"),
    ],
)
def test_a_command_line_that_cannot_work_is_explained(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(arguments)


def test_the_page_has_the_flags_as_they_are():
    rows = re.findall(r"^\| `(--[\w-]+)` \| ([^|]*) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    actions = [each for each in make_parser()._actions if each.dest not in ("help", "version")]
    assert [row[0] for row in rows] == [each.option_strings[0] for each in actions]
    for (flag, default, _), action in zip(rows, actions, strict=True):
        shown = "(required)" if action.default == [] else f"`{str(action.default).removesuffix('.0')}`"
        assert default == (shown if flag != "--host" else "`127.0.0.1`"), flag


def test_the_page_has_the_metrics_as_they_are():
    exposed = metrics.Metrics([Backend("prefill", "http://a")]).exposition().decode()
    there = dict(re.findall(rf"^# TYPE {metrics.PREFIX}(\w+) (\w+)$", exposed, re.MULTILINE))
    assert "_created" not in exposed and "process_resident_memory_bytes" in exposed
    rows = re.findall(r"^\| `(\w+)`(?: `{[\w, ]+}`)? \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    assert dict(rows) == there
    for value in (*metrics.OUTCOMES, *metrics.FALLBACKS, *metrics.SKIPS):
        assert f"`{value}`" in PAGE.read_text()


def test_the_router_needs_no_jax():
    code = "import sys, glm_dcp_jax.serve.router.__main__; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "False\n"


@pytest.fixture
def process(fleet):
    """Start the command over the fleet; (process, URL)."""
    started = []

    def start(*flags: str) -> tuple[subprocess.Popen, str]:
        command = [
            *COMMAND,
            "--port",
            "0",
            "--prefill",
            fleet.prefill[0].url,
            "--decode",
            fleet.decode[0].url,
        ]
        process = subprocess.Popen([*command, *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        started.append(process)
        for line in process.stderr:
            if ready := re.search(r"the router is ready at (http://127.0.0.1:\d+)/v1, 1 prefill", line):
                return process, ready[1]
        raise AssertionError("the router ended without being ready")

    yield start
    for each in started:
        each.kill()
        each.communicate()


def test_it_serves_logs_and_stops_soon(process):
    router, url = process()
    assert httpx.post(f"{url}/v1/completions", json={}, headers={"x-request-id": "id-7"}).status_code == 200
    began = time.monotonic()
    router.send_signal(signal.SIGTERM)
    assert router.wait(timeout=10) == 0
    assert time.monotonic() - began < 2
    log = router.stderr.read()
    assert "request id-7: ok" in log and "Traceback" not in log and "/health" not in log


def test_a_signal_lets_running_requests_finish(process, fleet):
    router, url = process()
    fleet.decode[0].script = stream(*[b"data: 1\n\n"] * 4, b"data: [DONE]\n\n", pause=0.2)
    with httpx.stream("POST", f"{url}/v1/completions", json={}) as got:
        lines = got.iter_lines()
        next(lines)
        router.send_signal(signal.SIGINT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert router.wait(timeout=10) == 0


@pytest.mark.parametrize("signals", [1, 2], ids=["shutdown timeout", "second signal"])
def test_what_does_not_finish_is_ended_in_order(process, fleet, signals):
    router, url = process("--shutdown-timeout", "0.5" if signals == 1 else "30")
    fleet.decode[0].script = Script(hang_at=-1)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(httpx.post, f"{url}/v1/completions", json={}, timeout=20)
        wait_until(lambda: fleet.decode[0].running == 1)
        began = time.monotonic()
        for _ in range(signals):
            router.send_signal(signal.SIGTERM)
            time.sleep(0.3)  # two of the same signal at once are delivered as one
        got = answer.result()
    assert got.status_code == 503 and got.json()["error"]["message"] == "the server is shutting down"
    assert router.wait(timeout=10) == 0
    assert time.monotonic() - began < 5
    assert fleet.released and "Traceback" not in router.stderr.read()


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--prefill", "a:1"], 2, "error: --prefill 'a:1' must begin with http://"),
        ([*BOTH, "--host", "203.0.113.1"], 1, "error: cannot listen on 203.0.113.1 port 8100"),
    ],
)
def test_a_start_that_fails_is_explained(flags, code, message, capsys):
    assert main(flags) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)
