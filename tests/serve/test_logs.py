"""What the log says of requests, for people and for machines."""

import io
import json
import logging
import re
import sys
import threading
import warnings
from datetime import datetime

import httpx
import pytest
from answers import events
from live import signalled_server
from tqdm import tqdm

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.serve import __main__ as entry
from glm_dcp_jax.serve import logs
from glm_dcp_jax.serve.generation import asked_for

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
HEADERS = {"X-Request-Id": "mine-1"}


async def test_a_request_is_logged_with_its_id_and_what_it_asks_for_but_not_its_prompt(
    engine, client_of, capsys
):
    client = client_of(engine, enable_log_requests=True)
    logs.configure("info")
    body = {
        "prompt": ["a secret", "b"],
        "max_tokens": 3,
        "top_p": 0.5,
        "stop": "END",
        "kv_transfer_params": {},
    }
    assert (await client.post(COMPLETIONS, json=body, headers=HEADERS)).status_code == 200
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"INFO [\d :-]+ \[generation.py:\d+\] \[request mine-1\] cmpl-mine-1-[0-9a-f]{8}-0: 2 prompt tokens, "
        r"max_tokens=3, top_p=0.5, stop=\('END',\)",
        first,
    )
    assert "-1: 1 prompt tokens" in second and "secret" not in first


async def test_requests_are_not_logged_unless_that_is_asked_for(client, capsys):
    logs.configure("info")
    assert (await client.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_as_json_each_event_is_one_object_with_its_request(engine, client_of, capsys, stream):
    engine.fails_after = 1
    client = client_of(engine, enable_log_requests=True)
    logs.configure("info", "json")
    body = {"prompt": "a b", "max_tokens": 5, "stream": stream}
    answer = await client.post(COMPLETIONS, json=body, headers=HEADERS)
    assert answer.status_code == (200 if stream else 500)
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    request = said[0]
    assert datetime.fromisoformat(request["time"]).tzinfo is not None
    assert (request["level"], request["logger"]) == ("info", "glm_dcp_jax.serve.generation")
    assert (request["request_id"], request["prompt_tokens"]) == ("mine-1", 2)
    assert request["params"] == {"max_tokens": 5} and request["engine_request_id"].startswith("cmpl-mine-1")
    for failure in said[1:]:
        assert failure["level"] == "error" and failure["request_id"] == "mine-1"
        assert "secret detail" in failure["exception"]
    assert len(said) == 2


def test_whatever_is_logged_is_one_line_of_json(capsys):
    logs.configure("info", "json")
    logger = logging.getLogger("glm_dcp_jax.test")
    logger.info("two\nlines of %s", "\ud800", extra={"request_id": "engine's", "thing": object()})
    [line] = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    assert event["message"] == "two\nlines of \ud800" and event["request_id"] == "engine's"
    assert event["thing"].startswith("<object")


def test_warnings_and_what_ends_a_thread_are_lines_of_json_too(capsys):
    logs.configure("info", "json")
    warnings.warn("two\nlines", stacklevel=1)
    thread = threading.Thread(target=lambda: 1 / 0, name="worker")
    thread.start()
    thread.join()
    sys.excepthook(ValueError, ValueError("a\nb"), None)
    warning, failure, last = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (warning["level"], warning["logger"]) == ("warning", "py.warnings")
    assert "two\nlines" in warning["message"]
    assert failure["message"] == "worker has failed" and "ZeroDivisionError" in failure["exception"]
    assert last["level"] == "error" and "ValueError: a\nb" in last["exception"]


@pytest.mark.parametrize("thing", [float("nan"), {(1, 2): 3}, {"a": float("inf")}], ids=str)
def test_what_json_has_not_is_text(capsys, thing):
    logs.configure("info", "json")
    logging.getLogger("glm_dcp_jax").info("said", extra={"thing": thing})
    [line] = capsys.readouterr().err.splitlines()
    event = json.loads(line, parse_constant=pytest.fail)
    assert event["message"] == "said" and event["thing"] == str(thing)


def test_a_start_that_fails_is_a_line_of_json(capsys, monkeypatch):
    def bind(host: str, port: int) -> None:
        raise ConfigError("port is taken")

    monkeypatch.setattr(entry.run, "bind", bind)
    assert entry.main(["m", "--log-format", "json"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    assert (event["level"], event["message"]) == ("error", "--port is taken")


def test_of_parameters_what_is_unusual_is_shown_and_of_long_lists_the_length():
    params = SamplingParams(
        max_tokens=16,
        temperature=0.0,
        allowed_token_ids=list(range(20)),
        logit_bias={5: 1.0},
        extra_args={"kv_transfer_params": {"remote_key": "k"}},
    )
    assert asked_for(params) == {
        "max_tokens": 16,
        "temperature": 0.0,
        "allowed_token_ids": "(20 entries)",
        "logit_bias": {5: 1.0},
    }


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing", COMPLETIONS])
async def test_every_answer_is_called_as_its_request(client, path):
    assert (await client.get(path, headers=HEADERS)).headers.get_list("x-request-id") == ["mine-1"]
    made = (await client.get(path, headers={"X-Request-Id": "two words"})).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", made)


async def test_streams_and_failures_and_refusals_have_it_too(engine, client_of):
    client = client_of(engine, api_keys=("key",))
    allowed = {**HEADERS, "Authorization": "Bearer key"}
    streamed = await client.post(COMPLETIONS, json={"prompt": "a", "stream": True}, headers=allowed)
    assert streamed.headers.get_list("x-request-id") == ["mine-1"]
    assert events(streamed)[0]["id"] == "cmpl-mine-1"
    assert (await client.get("/v1/models", headers=HEADERS)).headers["x-request-id"] == "mine-1"
    engine.fails_after = 0
    failed = await client.post(COMPLETIONS, json={"prompt": "a"}, headers=allowed)
    assert failed.status_code == 500 and failed.headers.get_list("x-request-id") == ["mine-1"]


async def test_without_a_name_the_answer_and_its_header_say_the_same(post):
    answer = await post(COMPLETIONS, prompt="a")
    assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"


def test_the_access_line_says_which_request_it_is_about(engine, capsys):
    with signalled_server(engine) as (url, *_):
        logs.configure("info")
        httpx.get(f"{url}/v1/models", headers=HEADERS)
        httpx.get(f"{url}/health")
    [line] = [line for line in capsys.readouterr().err.splitlines() if "GET /" in line]
    assert "[request mine-1] " in line and "GET /v1/models" in line


def test_the_access_line_has_no_query_and_not_all_of_a_long_path(engine, capsys):
    with signalled_server(engine) as (url, *_):
        logs.configure("debug")
        httpx.get(f"{url}/v1/models?api_key=secret")
        httpx.get(f"{url}/{'a' * 5000}")
    first, second = [line for line in capsys.readouterr().err.splitlines() if "GET /" in line]
    assert '"GET /v1/models HTTP/1.1" 200' in first
    assert f'"GET /{"a" * 199}... HTTP/1.1" 404' in second


def test_a_line_has_no_part_of_a_progress_bar_in_it(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    logs.configure("info")
    with tqdm(total=2, desc="Loading", file=screen, mininterval=0, delay=0, ncols=40) as bar:
        bar.update()
        logging.getLogger("glm_dcp_jax").info("between")
        bar.update()
    shown = screen.getvalue()
    line = next(line for line in shown.split("\n") if line.endswith("between"))
    assert line.rpartition("\r")[2].startswith("INFO ") and "Loading" in shown
