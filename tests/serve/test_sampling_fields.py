"""Fields that change logits, on both endpoints, and what comes back of the prompt: `prompt_logprobs` and `echo`."""

import pytest
from answers import events
from fake_engine import FakeEngine, tokenizer

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
FIELDS = {
    "logit_bias": {"5": -100, "17": 2.5},
    "bad_words": ["one", "two"],
    "allowed_token_ids": [1, 2, 3],
    "stop_token_ids": [9],
}


def text_of(ids: list[int]) -> str:
    return tokenizer().decode(ids, skip_special_tokens=False)


@pytest.fixture(params=[COMPLETIONS, CHAT], ids=["completions", "chat"])
def ask(request, post):
    """Send fields to an endpoint, with a prompt of its kind."""
    prompt = {COMPLETIONS: {"prompt": "a b"}, CHAT: {"messages": [{"role": "user", "content": "a b"}]}}

    async def send(**fields) -> dict:
        answer = await post(request.param, **prompt[request.param], **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return send


async def test_they_reach_the_engine(ask, engine):
    await ask(**FIELDS, max_tokens=4)
    [params] = engine.params
    assert params.logit_bias == {5: -100.0, 17: 2.5}
    assert (params.bad_words, params.allowed_token_ids) == (("one", "two"), (1, 2, 3))
    assert params.stop_token_ids == (9,)


async def test_null_is_as_good_as_absent(ask, engine):
    await ask(**dict.fromkeys([*FIELDS, "prompt_logprobs", "min_tokens", "presence_penalty"]))
    assert not engine.params[0].changes_logits


async def test_prompt_logprobs_come_back_by_token_id(post, engine):
    ids = tokenizer().encode("a b")
    body = (await post(COMPLETIONS, prompt="a b", max_tokens=1, prompt_logprobs=1, n=2)).json()
    expected = [
        None,
        {
            str(ids[1]): {"logprob": -9999.0, "rank": 129280, "decoded_token": " b"},
            "100": {"logprob": 0.0, "rank": 1, "decoded_token": tokenizer().token_to_str(100)},
        },
    ]
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [expected, expected]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    messages = [{"role": "user", "content": "a b"}]
    body = (await post(CHAT, messages=messages, max_tokens=1, prompt_logprobs=0)).json()
    tokens = tokenizer().encode("<user>a b<go>", add_special_tokens=False)
    first, *scores = body["prompt_logprobs"]
    assert first is None and [list(entry) for entry in scores] == [[str(id)] for id in tokens[1:]]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_prompt_logprobs_and_streams_exclude_each_other(post, path):
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    answer = await post(path, **prompt, prompt_logprobs=1, stream=True)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt_logprobs"


async def test_max_logprobs_bounds_them(client_of, engine):
    client = client_of(engine, max_logprobs=2)
    answer = await client.post(COMPLETIONS, json={"prompt": "a", "prompt_logprobs": 3})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("as_ids", [False, True])
async def test_echo_puts_the_prompt_before_each_output(post, as_ids):
    prompts = ["one two", "three four five"]
    ids = [tokenizer().encode(prompt) for prompt in prompts]
    sent = {"prompt": ids if as_ids else prompts, "n": 2, "max_tokens": 3}
    said = (await post(COMPLETIONS, **sent)).json()
    body = (await post(COMPLETIONS, **sent, echo=True)).json()
    texts = [text_of(own) if as_ids else prompt for own, prompt in zip(ids, prompts, strict=True)]
    expected = [texts[place // 2] + choice["text"] for place, choice in enumerate(said["choices"])]
    assert [choice["text"] for choice in body["choices"]] == expected
    assert body["usage"] == said["usage"]


async def test_an_echo_with_logprobs_scores_the_prompt_too(post):
    body = {"prompt": "a b", "max_tokens": 2, "logprobs": 1, "echo": True, "return_token_ids": True}
    choice = (await post(COMPLETIONS, **body)).json()["choices"][0]
    likeliest = tokenizer().token_to_str(100)
    assert choice["text"] == "a ba b"
    assert choice["logprobs"] == {
        "tokens": ["a", " b", "a", " b"],
        "token_logprobs": [None, -9999.0, -9999.0, -9999.0],
        "top_logprobs": [None, *({likeliest: 0.0, token: -9999.0} for token in (" b", "a", " b"))],
        "text_offset": [0, 1, 3, 4],
    }
    assert choice["token_ids"] == choice["prompt_token_ids"] == tokenizer().encode("a b")
    assert "prompt_logprobs" not in choice


async def test_with_max_tokens_0_only_the_prompt_comes_back(post, engine):
    body = {"prompt": "a b", "max_tokens": 0, "logprobs": 0, "echo": True, "return_token_ids": True}
    answer = (await post(COMPLETIONS, **body)).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("a b", [], "length")
    assert choice["logprobs"]["tokens"] == ["a", " b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -9999.0]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 0, 2)
    assert (engine.params[0].max_tokens, engine.params[0].prompt_logprobs) == (1, 0)
    refused = await post(COMPLETIONS, prompt="a b", max_tokens=0)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("max_tokens", [0, 5])
async def test_a_streamed_echo_is_the_same_in_pieces(post, max_tokens):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"prompt": ["a b", "c 猫"], "n": 2, "max_tokens": max_tokens, "logprobs": 1, "echo": True}
    whole = (await post(COMPLETIONS, **body)).json()
    *chunks, last = events(await post(COMPLETIONS, **body, **options))
    for expected in whole["choices"]:
        own = [
            choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == expected["index"]
        ]
        assert "".join(choice["text"] for choice in own) == expected["text"]
        assert own[-1]["finish_reason"] == expected["finish_reason"] == "length"
        pieces = [choice["logprobs"] for choice in own]
        joined = {name: [entry for piece in pieces for entry in piece[name]] for name in expected["logprobs"]}
        assert joined == expected["logprobs"]
    assert last["usage"] == whole["usage"]


async def test_without_a_tokenizer_an_echo_has_token_ids_and_logprobs(client_of):
    client = client_of(FakeEngine(with_tokenizer=False))
    body = {"prompt": [7, 8], "max_tokens": 1, "logprobs": 0, "echo": True}
    choice = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
    assert choice["text"] == "" and choice["logprobs"]["tokens"] == ["token_id:7", "token_id:8", "token_id:7"]
