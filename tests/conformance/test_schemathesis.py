"""Requests made of the server's own OpenAPI document: none of them is answered with a 500."""

import importlib.util
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("schemathesis") is None, reason="needs the extra `conformance`"
    ),
]


@pytest.mark.timeout(900)
def test_no_request_breaks_the_server(url):
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
