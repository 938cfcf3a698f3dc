"""Models, health, version, keys, and the tokenizer's endpoints."""

import pytest
from fake_engine import FakeEngine, tokenizer

from glm_dcp_jax._version import __version__

pytestmark = pytest.mark.anyio


async def test_models_are_listed_under_all_their_names(client):
    cards = (await client.get("/v1/models")).json()
    for card in cards["data"]:
        assert (await client.get(f"/v1/models/{card['id']}")).json() == card
    unknown = await client.get("/v1/models/x/y")
    assert unknown.status_code == 404 and unknown.json()["error"]["param"] == "model"
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
        ("POST", "/reset_prefix_cache"),
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
