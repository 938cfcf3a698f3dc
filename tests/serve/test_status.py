"""Models, health, version, keys, metrics, and the tokenizer's endpoints."""

import pytest
from fake_engine import FakeEngine, tokenizer
from prometheus_client.parser import text_string_to_metric_families

from glm_dcp_jax._version import __version__

pytestmark = pytest.mark.anyio


async def test_models_are_listed_under_all_their_names(client):
    cards = (await client.get("/v1/models")).json()
    assert cards["object"] == "list"
    assert [card["id"] for card in cards["data"]] == ["fake", "alias"]
    assert cards["data"][0]["root"] == "somewhere/fake" and cards["data"][0]["max_model_len"] == 64


async def test_health_is_200_only_when_requests_can_be_served(engine, client):
    engine.is_ready = False
    for path in ("/health", "/ping"):
        assert (await client.get(path)).status_code == 503
    refused = await client.post("/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503 and "loaded" in refused.json()["error"]["message"]
    engine.is_ready = True
    for path in ("/health", "/ping"):
        answer = await client.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert (await client.post("/ping")).status_code == 200
    engine.is_dead = True
    assert (await client.get("/health")).status_code == 503


async def test_version(client):
    assert (await client.get("/version")).json() == {"version": __version__}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/nothing"),
    ],
)
@pytest.mark.parametrize(
    "authorization", [None, "Bearer wrong", "Bearer ", "one", "Basic one", "Bearer one two", "Bearer \udcff"]
)
async def test_without_a_key_guarded_paths_are_closed(engine, client_of, method, path, authorization):
    client = client_of(engine, api_keys=("one", "two"))
    headers = {}
    if authorization:
        headers = {b"Authorization": authorization.encode("utf-8", "surrogateescape")}
    answer = await client.request(method, path, headers=headers)
    assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})


@pytest.mark.parametrize("key", ["one", "two"])
async def test_any_of_the_keys_opens(engine, client_of, key):
    client = client_of(engine, api_keys=("one", "two"))
    answer = await client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ping", "/metrics", "/version"])
async def test_what_operators_look_at_needs_no_key(engine, client_of, path):
    assert (await client_of(engine, api_keys=("one",)).get(path)).status_code == 200


async def test_tokenize_and_back(post):
    ids = tokenizer().encode("Hi 猫")
    answer = (await post("/tokenize", model="fake", prompt="Hi 猫")).json()
    assert answer == {"count": len(ids), "max_model_len": 64, "tokens": ids, "token_strs": None}
    assert (await post("/detokenize", tokens=ids)).json() == {"prompt": "Hi 猫"}
    strings = (await post("/tokenize", prompt="Hi", return_token_strs=True)).json()["token_strs"]
    assert "".join(strings) == "Hi"


async def test_detokenize_shows_special_tokens(post):
    assert (await post("/detokenize", tokens=[1])).json() == {"prompt": "<｜end▁of▁sentence｜>"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/detokenize", {"tokens": [129280]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
    ],
)
async def test_wrong_tokenizer_requests_are_named(post, path, body, param):
    answer = await post(path, **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


async def test_without_a_tokenizer_they_say_so(client_of):
    client = client_of(FakeEngine(with_tokenizer=False))
    for path, body in ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]}):
        answer = await client.post(path, json=body)
        assert answer.status_code == 400 and "loaded without" in answer.json()["error"]["message"]


async def scrape(client) -> dict[str, float]:
    """Samples by name and, where there is one, finish reason or path; the labels all have in common are checked."""
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake" and sample.labels["engine"] == "0"
            reason = sample.labels.get("finished_reason", sample.labels.get("path"))
            found[sample.name.removeprefix("glm_dcp:") + (f"[{reason}]" if reason else "")] = sample.value
            if sample.name.endswith("cache_config_info"):
                assert sample.labels["block_size"] == "64" and sample.labels["num_gpu_blocks"] == "17"
    return found


async def test_metrics_count_requests_tokens_and_time(client):
    before = await scrape(client)
    assert before["request_success_total[stop]"] == 0 and before["cache_config_info"] == 1
    await client.post("/v1/completions", json={"prompt": [[5], [6, 7]], "n": 2, "max_tokens": 3})
    await client.post("/v1/completions", json={"prompt": [5, 1], "max_tokens": 9})
    await client.post("/v1/completions", json={"prompt": [129280]})  # refused: not counted
    after = await scrape(client)
    assert after["request_success_total[length]"] == 4 and after["request_success_total[stop]"] == 1
    assert after["request_success_total[abort]"] == after["request_success_total[error]"] == 0
    assert after["prompt_tokens_total"] == 5 and after["generation_tokens_total"] == 14
    assert after["time_to_first_token_seconds_count"] == after["e2e_request_latency_seconds_count"] == 3
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    assert after["kv_cache_usage_perc"] == 0.25


async def test_metrics_say_what_decode_exchanged(client):
    found = await scrape(client)
    assert found["dcp_decode_steps_total[bulk]"] == 3 and found["dcp_decode_steps_total[queries]"] == 0
    assert found["dcp_received_bytes_total"] == 1000 and found["dcp_overflows_total"] == 1
    assert found["dcp_records_total"] == 60 and found["dcp_records_unique_ratio"] == 0.75


async def test_failures_are_counted(engine, client):
    engine.fails_after = 1
    await client.post("/v1/completions", json={"prompt": "a", "n": 2})
    assert (await scrape(client))["request_success_total[error]"] == 2
