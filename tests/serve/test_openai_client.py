"""The openai package, as people use it, against a server on a real port."""

import asyncio

import openai
import pytest
from fake_engine import FakeEngine, tokenizer
from live import live_server

MESSAGES = [{"role": "user", "content": "Hi 猫"}]


@pytest.fixture(scope="module")
def url():
    with live_server(FakeEngine(delay=0.001, burst=2), api_keys=("secret",)) as url:
        yield url


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["fake"]


def test_completion(client):
    made = client.completions.create(model="fake", prompt="a b c", max_tokens=6, n=2, logprobs=1)
    assert [choice.text for choice in made.choices] == ["a b ca b c", " b ca b ca"]
    assert [choice.finish_reason for choice in made.choices] == ["length", "length"]
    assert made.choices[0].logprobs.tokens[0] == "a"
    assert made.usage.total_tokens == 3 + 12


def test_streamed_completion(client):
    options = {"include_usage": True}
    stream = client.completions.create(
        model="fake", prompt="a b c", max_tokens=6, stream=True, stream_options=options
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "a b ca b c"
    assert last.choices == [] and last.usage.completion_tokens == 6


def test_chat(client):
    made = client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_completion_tokens=40,
        stop=["<go>"],
        logprobs=True,
        top_logprobs=1,
    )
    assert made.choices[0].message.role == "assistant"
    assert made.choices[0].message.content == "<user>Hi 猫"
    assert made.choices[0].finish_reason == "stop"
    assert bytes(made.choices[0].logprobs.content[0].bytes) == b"<"


def test_streamed_chat(client):
    stream = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=8, stream=True)
    first, *rest = list(stream)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    text = "".join(chunk.choices[0].delta.content for chunk in rest)
    ids = tokenizer().encode("<user>Hi 猫<go>", add_special_tokens=False)
    assert text == tokenizer().decode([*ids, *ids][:8])
    assert rest[-1].choices[0].finish_reason == "length"


def test_vllms_extra_fields_travel_in_extra_body(client):
    made = client.completions.create(
        model="fake", prompt=[5, 6], max_tokens=2, extra_body={"top_k": 3, "return_token_ids": True}
    )
    assert made.choices[0].token_ids == [5, 6]


def test_many_at_once(url):
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
            requests = [
                client.completions.create(model="fake", prompt=f"number {i}", max_tokens=8) for i in range(40)
            ]
            return [made.choices[0].text for made in await asyncio.gather(*requests)]

    texts = asyncio.run(run())
    assert all(text.startswith(f"number {i}") for i, text in enumerate(texts))


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"model": "other"}, openai.NotFoundError, "does not exist"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 1000}, openai.BadRequestError, "maximum context length is 64 tokens"),
        ({"prompt": "word " * 100}, openai.BadRequestError, "maximum context length is 64 tokens"),
        ({"suffix": "x"}, openai.BadRequestError, "suffix"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_errors_arrive_as_the_clients_own(client, wrong, error, says, stream):
    with pytest.raises(error, match=says):
        client.completions.create(**{"model": "fake", "prompt": "a", "stream": stream, **wrong})
    assert client.completions.create(model="fake", prompt="a").choices


def test_a_wrong_key_is_an_authentication_error(url):
    guess = openai.OpenAI(base_url=f"{url}/v1", api_key="guess", max_retries=0)
    with guess as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
