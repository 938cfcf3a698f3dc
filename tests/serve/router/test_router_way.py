"""The way of a request when all is well: what each server gets, and what the client gets back."""

import json
import threading
import time

import httpx
import pytest
from fake_backend import PARAMS, answer, stream
from live import wait_until


def test_prefill_computes_one_token_and_decode_gets_its_reference(router, fleet):
    got = router.post(prompt="Hello", max_tokens=7, temperature=0.5, seed=3, stream=True)
    assert got.status_code == 200 and 'data: {"text":"d0"}' in got.text
    prefill, decode = fleet.prefill[0].only, fleet.decode[0].only
    assert prefill.path == decode.path == "/v1/completions"
    assert prefill.body == {
        "prompt": "Hello",
        "temperature": 0.5,
        "seed": 3,
        "stream": False,
        "max_tokens": 1,
        "n": 1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    assert decode.body == {
        "prompt": "Hello",
        "max_tokens": 7,
        "temperature": 0.5,
        "seed": 3,
        "stream": True,
        "kv_transfer_params": PARAMS,
    }
    assert fleet.released == []
    wait_until(lambda: router.metric("requests_total", outcome="ok") == 1)


def test_fields_that_contradict_one_unread_token_stay_out_of_the_prefill(router, fleet):
    asked = {"min_tokens": 5, "best_of": 2, "logprobs": True, "top_logprobs": 3, "return_token_ids": True}
    asked |= {"stream": True, "stream_options": {"include_usage": True}, "n": 3, "max_completion_tokens": 9}
    router.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], **asked)
    sent = fleet.prefill[0].only.body
    assert (sent["n"], sent["stream"], sent["max_tokens"], sent["max_completion_tokens"]) == (1, False, 1, 1)
    assert not sent.keys() & {"min_tokens", "best_of", "logprobs", "top_logprobs", "stream_options"}
    assert "return_token_ids" not in sent and sent["messages"] == [{"role": "user", "content": "Hi"}]
    assert fleet.decode[0].only.body.items() >= asked.items()
    assert fleet.decode[0].only.path == "/v1/chat/completions"


def test_a_response_has_its_own_name_for_the_limit(router, fleet):
    asked = {"input": "Hi", "max_output_tokens": 9, "stream": True, "min_tokens": 2, "top_logprobs": 1}
    router.client.post("/v1/responses", json=asked)
    prefill, decode = fleet.prefill[0].only, fleet.decode[0].only
    assert prefill.path == decode.path == "/v1/responses"
    assert prefill.body == {
        "input": "Hi",
        "stream": False,
        "max_output_tokens": 1,
        "n": 1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    assert decode.body == {**asked, "kv_transfer_params": PARAMS}


@pytest.mark.parametrize(
    "raw", [b' {"prompt":"\xc3\xa9\\ud800", "seed": 1e2, "x": 9007199254740993} \n', b"{}"]
)
def test_decode_gets_the_body_to_the_byte(router, fleet, raw):
    router.client.post("/v1/completions", content=raw)
    sent = fleet.decode[0].only.raw
    assert sent.startswith(raw.rstrip()[:-1])
    assert json.loads(sent) == json.loads(raw) | {"kv_transfer_params": PARAMS}


@pytest.mark.parametrize("name", ["mine-1", "\xe9"], ids=["ascii", "latin-1"])
def test_both_legs_carry_the_clients_id_and_key(router, fleet, name):
    headers = {"X-Request-Id": name.encode("latin-1"), "Authorization": "Bearer secret"}
    got = router.post(headers=headers)
    for leg in (fleet.prefill[0].only, fleet.decode[0].only):
        assert leg.headers["x-request-id"] == name
        assert leg.headers["authorization"] == "Bearer secret"
    assert got.headers["x-request-id"] == name


def test_a_request_without_an_id_gets_one(router, fleet):
    first, second = router.post(), router.post()
    ids = [seen.headers["x-request-id"] for seen in fleet.decode[0].seen]
    assert [first.headers["x-request-id"], second.headers["x-request-id"]] == ids
    assert ids[0] != ids[1] and all(len(each) == 32 for each in ids)
    assert [seen.headers["x-request-id"] for seen in fleet.prefill[0].seen] == ids
    assert "authorization" not in fleet.decode[0].seen[0].headers


def test_a_stream_passes_as_it_comes(router, fleet):
    events = [f'data: {{"text":"{place}"}}\n\n'.encode() for place in range(3)]
    fleet.decode[0].script = stream(*events, b"data: [DONE]\n\n", pause=0.3)
    with router.client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as got:
        assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
        times, parts = [], []
        for part in got.iter_raw():
            times.append(time.monotonic())
            parts.append(part)
    assert b"".join(parts) == b"".join(events) + b"data: [DONE]\n\n"
    assert times[-1] - times[0] > 0.6


@pytest.mark.parametrize("cut", [1, 9, 15, 16, 17, 18])
def test_lines_cut_by_the_network_come_whole(router, fleet, cut):
    body = b'data: {"a": "b"}\r\n\r\ndata: [DONE]\n\ntail'
    fleet.decode[0].script = stream(body[:cut], body[cut : cut + 2], body[cut + 2 :])
    assert router.post(stream=True).content == body


def test_an_answer_that_is_no_stream_passes_with_its_headers(router, fleet):
    fleet.decode[0].script = answer({"choices": [{"text": "hi"}]}, headers={"x-other": "kept"})
    got = router.post()
    assert got.json() == {"choices": [{"text": "hi"}]}
    assert got.headers["content-type"] == "application/json" and got.headers["x-other"] == "kept"
    assert len(got.headers.get_list("date")) == len(got.headers.get_list("server")) == 1


def test_a_refusal_of_prefill_reaches_the_client_as_it_is(router, fleet):
    refusal = {"error": {"message": "no", "code": 422}}
    fleet.prefill[0].script = answer(refusal, status=422, headers={"x-why": "so"})
    got = router.post(stream=True)
    assert (got.status_code, got.json(), got.headers["x-why"]) == (422, refusal, "so")
    assert fleet.prefill[1].seen == fleet.decode[0].seen == fleet.decode[1].seen == []
    wait_until(lambda: router.metric("requests_total", outcome="rejected") == 1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": "x" * 99}, "short"),
        ({"prompt": [5] * 24}, "short"),
        ({"prompt": ["x" * 200, "y" * 200]}, "several_prompts"),
        ({"prompt": [[5] * 200, [6] * 200]}, "several_prompts"),
        ({"prompt": "x" * 200, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt": "x" * 200, "echo": True, "logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_prefill_could_not_help_goes_to_decode_as_it_came(router_of, fleet, body, reason):
    router = router_of(min_prefill_chars=100)
    assert router.post(**body).status_code == 200
    assert fleet.decode[0].only.body == body and fleet.prefill[0].seen == []
    assert router.metric("prefill_skips_total", reason=reason) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"input": "x" * 100},
        {"input": [{"role": "user", "content": "x" * 60}], "instructions": "x" * 60},
        {"prompt": "x" * 100},
        {"prompt": ["x" * 100]},
        {"prompt": [5] * 25},
        {"prompt": [[5] * 25]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 100}]}]},
        {"messages": [], "tools": [{"type": "function", "function": {"description": "x" * 100}}]},
    ],
)
def test_a_prompt_that_is_long_enough_goes_to_prefill(router_of, fleet, body):
    router_of(min_prefill_chars=100).client.post("/v1/chat/completions", json=body)
    assert len(fleet.prefill[0].seen) == 1


def test_prefill_without_a_reference_leaves_all_to_decode(router, fleet):
    fleet.prefill[0].script = answer({"choices": [], "kv_transfer_params": None})
    assert router.post(stream=True).status_code == 200
    assert fleet.decode[0].only.body == {"prompt": "Hello", "stream": True}
    assert fleet.prefill[1].seen == [] and fleet.released == []
    assert router.metric("fallbacks_total", reason="no_params") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "the body is not valid JSON"),
        (b"\xff{}", "the body is not UTF-8, at byte 0"),
        (b'{"n": 1, "n": 2}', "the key 'n' is there twice; give it once"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1]", "the body must be a JSON object"),
        (
            b'{"kv_transfer_params": {"remote_host": "elsewhere"}}',
            "kv_transfer_params is what the router adds",
        ),
    ],
)
def test_a_body_that_no_server_should_see_is_refused(router, fleet, content, message):
    got = router.client.post("/v1/completions", content=content)
    assert got.status_code == 400 and message in got.json()["error"]["message"]
    assert fleet.prefill[0].seen == fleet.decode[0].seen == []
    assert router.metric("requests_total", outcome="rejected") == 1


def test_a_body_that_is_too_large_is_refused(router, fleet):
    got = router.client.post("/v1/completions", content=b'{"prompt": "' + b"x" * 2**26 + b'"}')
    assert got.status_code == 413 and fleet.prefill[0].seen == []


def test_a_path_that_is_not_there_is_refused(router):
    error = router.client.post("/v1/embeddings", json={}).json()["error"]
    assert error["code"] == 404 and "/v1/responses, and GET of /v1/models" in error["message"]


def test_requests_at_once_do_not_mix(router, fleet):
    def prefilled(seen):
        return answer({"kv_transfer_params": {"key": seen.body["prompt"]}}, delay=0.02)

    def decoded(seen):
        assert seen.body["kv_transfer_params"] == {"key": seen.body["prompt"]}
        return stream(*([f"data: {seen.body['prompt']}\n\n".encode()] * 5), pause=0.005)

    for backend in fleet.prefill:
        backend.script = prefilled
    for backend in fleet.decode:
        backend.script = decoded
    texts = {}

    def ask(place: int) -> None:
        texts[place] = httpx.post(
            f"{router.url}/v1/completions", json={"prompt": f"p{place}"}, timeout=20
        ).text

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {place: f"data: p{place}\n\n" * 5 for place in range(40)}
    assert all(backend.seen for backend in fleet.all), "the load is spread"
    wait_until(lambda: all(backend.in_flight == 0 for backend in router.context.backends))
