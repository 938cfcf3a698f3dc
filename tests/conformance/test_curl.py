"""What people type."""

import json
import subprocess

import pytest

pytestmark = pytest.mark.slow


def curl(*arguments: str) -> tuple[int, str]:
    """Status and body."""
    command = ["curl", "-sS", "--max-time", "120", "-w", "\n%{http_code}", *arguments]
    body, _, status = subprocess.run(command, capture_output=True, text=True, check=True).stdout.rpartition(
        "\n"
    )
    return int(status), body


def post(url: str, path: str, body: str, *more: str) -> tuple[int, str]:
    key, kind = "Authorization: Bearer secret", "Content-Type: application/json"
    return curl("-H", key, "-H", kind, "-d", body, *more, f"{url}{path}")


def test_models_want_the_key(url, model):
    assert curl(f"{url}/v1/models")[0] == 401
    status, body = curl("-H", "Authorization: Bearer secret", f"{url}/v1/models")
    assert status == 200 and json.loads(body)["data"][0]["id"] == model


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version", "/ping"])
def test_health_and_the_like_are_open(url, path):
    assert curl(f"{url}{path}")[0] == 200


def test_a_completion(url, model):
    status, body = post(
        url, "/v1/completions", json.dumps({"model": model, "prompt": "Hello", "max_tokens": 4})
    )
    answer = json.loads(body)
    assert (
        status == 200 and answer["object"] == "text_completion" and answer["usage"]["completion_tokens"] == 4
    )


def test_a_stream_ends_with_usage_and_done(url, model):
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    status, text = post(url, "/v1/chat/completions", json.dumps(body), "-N")
    events = [line for line in text.split("\n\n") if line]
    assert (
        status == 200 and all(event.startswith("data: ") for event in events) and events[-1] == "data: [DONE]"
    )
    chunks = [json.loads(event[6:]) for event in events[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ("{", 400, None),
        ("[]", 400, None),
        ("{}", 400, "prompt"),
        ('{"prompt": "a", "temperature": -1}', 400, "temperature"),
        ('{"prompt": "a", "temperature": NaN}', 400, None),
        ('{"prompt": "a", "max_tokens": "many"}', 400, "max_tokens"),
        ('{"prompt": "a", "max_tokens": 99999999999999999999}', 400, "max_tokens"),
        ('{"prompt": "a", "model": "no-such-model"}', 404, "model"),
    ],
)
def test_what_is_wrong_is_named(url, body, status, param):
    found, text = post(url, "/v1/completions", body)
    error = json.loads(text)["error"]
    assert (found, error["code"]) == (status, status) and (param is None or error["param"] == param)
    assert post(url, "/v1/completions", '{"prompt": "a", "max_tokens": 1}')[0] == 200


def test_100_mb_and_10_000_levels(url, tmp_path):
    large = tmp_path / "large.json"
    large.write_text('{"prompt": "' + "a" * 100_000_000 + '"}')
    assert post(url, "/v1/completions", f"@{large}")[0] == 413
    status, text = post(url, "/v1/completions", '{"prompt": ' + "[" * 10_000 + "]" * 10_000 + "}")
    assert status == 400 and "error" in json.loads(text)
    assert post(url, "/v1/completions", '{"prompt": "a", "max_tokens": 1}')[0] == 200
