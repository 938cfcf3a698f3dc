"""Requests made of the server's own OpenAPI document: none of them is answered with a 500."""

import importlib.util
import subprocess
import sys

import pytest
from server import served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("schemathesis") is None, reason="needs the extra `conformance`"
    ),
]


@pytest.mark.timeout(900)
def test_no_request_breaks_the_server():
    """Its answers are short: what asks for nothing else gets as many tokens as there is room for."""
    flags = ("--max-model-len", "64", "--max-num-seqs", "4", "--precompile-bs-paddings", "4")
    with served("--api-key", "secret", *flags) as running:
        run(running.url)


def run(url):
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"]
    command += [
        "--checks",
        "not_a_server_error",
        "--max-examples",
        "40",
        "--seed",
        "7",
        "--request-timeout",
        "60",
    ]
    command += ["--header", "Authorization: Bearer secret", "--suppress-health-check", "all", "--no-color"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
