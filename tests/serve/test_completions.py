"""/v1/completions, over an engine that echoes its prompt."""

import pytest
from answers import events
from fake_engine import EOS, FakeEngine, tokenizer

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


async def test_a_text_is_continued(post):
    answer = await post(PATH, model="fake", prompt="one two three", max_tokens=5)
    body = answer.json()
    prompt = tokenizer().encode("one two three")
    assert answer.status_code == 200
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-") and body["model"] == "fake"
    said = [*prompt, *prompt][:5]
    assert body["choices"] == [
        {
            "index": 0,
            "text": tokenizer().decode(said),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 5,
        "total_tokens": len(prompt) + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_sixteen_tokens_unless_asked_otherwise_and_less_where_they_do_not_fit(post):
    assert (await post(PATH, prompt=[5])).json()["usage"]["completion_tokens"] == 16
    assert (await post(PATH, prompt=[5] * 60)).json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ("ids", None),
        (["ids", "ids"], None),
    ],
)
async def test_prompts_are_texts_or_token_ids_one_or_many(post, prompt, texts):
    ids = tokenizer().encode("ab")
    prompt = ids if prompt == "ids" else [ids, ids] if prompt == ["ids", "ids"] else prompt
    texts = texts or ["ab"] * (len(prompt) if isinstance(prompt[0], list) else 1)
    body = (await post(PATH, prompt=prompt, max_tokens=len(ids))).json()
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))


async def test_n_outputs_for_each_prompt_in_order(post):
    ids = [tokenizer().encode("a")[0], tokenizer().encode("b")[0]]
    body = (await post(PATH, prompt=[ids, ids[::-1]], n=2, max_tokens=2)).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "ab"), (1, "ba"), (2, "ba"), (3, "ab")]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 8, 12)


async def test_a_stream_is_the_answer_in_pieces(post):
    body = {"prompt": ["猫 and 𒀀", "two"], "n": 2, "max_tokens": 9}
    whole = (await post(PATH, **body)).json()
    chunks = events(await post(PATH, **body, stream=True, stream_options={"include_usage": True}))
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in chunks[:-1]:
        assert chunk["object"] == "text_completion" and "usage" not in chunk
        [choice] = chunk["choices"]
        assert choice["index"] not in reasons, "nothing comes after the end"
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert set(reasons.values()) == {"length"} and len(reasons) == 4
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_usage_is_streamed_only_when_asked_for(post):
    chunks = events(await post(PATH, prompt="a", stream=True, stream_options={"include_usage": False}))
    assert all(chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("burst", [1, 4])
async def test_stop_strings_end_the_text_and_never_show(client_of, burst):
    client = client_of(FakeEngine(burst=burst))
    body = {"prompt": "hello there world", "max_tokens": 40, "stop": ["e w", "zzz"]}
    whole = (await client.post(PATH, json=body)).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == ("hello ther", "stop", "e w")
    chunks = events(await client.post(PATH, json={**body, "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert chunks[-1]["choices"][0]["stop_reason"] == "e w"


async def test_the_stop_string_may_be_asked_for(post):
    body = (await post(PATH, prompt="a b c", max_tokens=40, stop="b", include_stop_str_in_output=True)).json()
    assert body["choices"][0]["text"] == "a b"


async def test_end_of_sequence_and_stop_tokens(post):
    a, b = tokenizer().encode("a")[0], tokenizer().encode("b")[0]
    ended = (await post(PATH, prompt=[a, EOS])).json()["choices"][0]
    assert (ended["text"], ended["finish_reason"], ended["stop_reason"]) == ("a", "stop", None)
    ignored = (await post(PATH, prompt=[a, EOS], ignore_eos=True, max_tokens=4)).json()["choices"][0]
    assert (ignored["text"], ignored["finish_reason"]) == ("aa", "length")
    stopped = (await post(PATH, prompt=[a, b], stop_token_ids=[b])).json()["choices"][0]
    assert (stopped["text"], stopped["stop_reason"]) == ("a", b)


async def test_logprobs_name_the_sampled_token_and_the_likeliest(post):
    ids = tokenizer().encode("a b")
    body = (await post(PATH, prompt=ids, max_tokens=2, logprobs=2)).json()
    likeliest = [tokenizer().token_to_str(100), tokenizer().token_to_str(101)]
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", " b"],
        "token_logprobs": [-9999.0, -9999.0],  # minus infinity is no JSON
        "top_logprobs": [
            {likeliest[0]: 0.0, likeliest[1]: -1.0, "a": -9999.0},
            {likeliest[0]: 0.0, likeliest[1]: -1.0, " b": -9999.0},
        ],
        "text_offset": [0, 1],
    }


async def test_streamed_logprobs_are_the_same_in_pieces(post):
    body = {"prompt": "a b", "max_tokens": 5, "logprobs": 0, "stop": "never said"}
    whole = (await post(PATH, **body)).json()["choices"][0]["logprobs"]
    chunks = events(await post(PATH, **body, stream=True))
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert {name: [entry for piece in pieces for entry in piece[name]] for name in whole} == whole


async def test_token_ids_come_back_when_asked_for(post):
    body = {"prompt": [7, 8], "max_tokens": 3, "return_token_ids": True}
    choice = (await post(PATH, **body)).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([7, 8], [7, 8, 7])
    chunks = [chunk["choices"][0] for chunk in events(await post(PATH, **body, stream=True))]
    assert [chunk["token_ids"] for chunk in chunks] == [[7], [8], [7]]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[7, 8], None, None]


async def test_a_choice_that_has_ended_is_not_repeated_while_others_go_on(post):
    a = tokenizer().encode("a")[0]
    chunks = events(await post(PATH, prompt=[a, a, EOS], n=3, stream=True))
    ended = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert ended == [2, 1, 0]
    assert len(chunks) == 2 + 1 + 3  # two tokens of text and an end, one and an end, and an end alone


async def test_tokens_whose_text_is_held_back_are_still_streamed_when_asked_for(post):
    body = {"prompt": "a b", "max_tokens": 4, "stop": "a ba bc", "stream": True}
    held = events(await post(PATH, **body))
    assert [chunk["choices"][0]["text"] for chunk in held] == ["a ba b"]
    chunks = [chunk["choices"][0] for chunk in events(await post(PATH, **body, return_token_ids=True))]
    assert [chunk["text"] for chunk in chunks] == ["", "", "", "a ba b"]
    assert [len(chunk["token_ids"]) for chunk in chunks] == [1, 1, 1, 1]


async def test_sampling_reaches_the_engine_and_null_is_the_default(post, engine):
    sampling = {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3},
        **{"presence_penalty": 0.5, "frequency_penalty": -2, "repetition_penalty": 1.5, "min_tokens": 2},
    }
    await post(PATH, prompt="a", **sampling, skip_special_tokens=False)
    await post(PATH, prompt="a", **dict.fromkeys(sampling), stream=None, stop=None, n=None)
    first, second = engine.params
    assert {name: getattr(first, name) for name in sampling} == sampling and not first.skip_special_tokens
    assert (second.temperature, second.top_p, second.top_k, second.seed) == (1.0, 1.0, 0, None)
    assert not second.changes_logits and second.prompt_logprobs is None


async def test_without_a_tokenizer_token_ids_still_work(client_of):
    client = client_of(FakeEngine(with_tokenizer=False))
    body = {"prompt": [7, 8], "max_tokens": 3, "return_token_ids": True, "logprobs": 1}
    choice = (await client.post(PATH, json=body)).json()["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("", [7, 8, 7])
    assert choice["logprobs"]["tokens"] == ["token_id:7", "token_id:8", "token_id:7"]
    needing = {"prompt": {"prompt": "text"}, "stop": {"stop": "x"}, "bad_words": {"bad_words": ["x"]}}
    for param, wrong in needing.items():
        wrong = {"prompt": [7], **wrong}
        refused = await client.post(PATH, json=wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
        assert "loaded without" in refused.json()["error"]["message"]
    chat = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    assert chat.status_code == 400 and "loaded without" in chat.json()["error"]["message"]


async def test_fields_left_open_take_the_checkpoints_sampling_defaults(post, engine):
    engine.sampling_defaults = {"temperature": 0.25, "top_p": 0.5, "max_tokens": 3}
    await post(PATH, prompt=[5], max_tokens=1, top_p=0.75)
    used = engine.params[-1]
    assert (used.temperature, used.top_p, used.max_tokens) == (0.25, 0.75, 1)
