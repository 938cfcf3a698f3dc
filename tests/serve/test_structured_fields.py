"""What a request's output must look like: the fields that say so, and what is wrong with them."""

import pytest

from glm_dcp_jax.engine.structured_outputs import StructuredOutputs
from glm_dcp_jax.serve.protocol import ChatRequest, CompletionRequest

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "a"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}


def asked(**fields) -> StructuredOutputs | None:
    """What the engine is told; the same from both kinds of request."""
    chat = ChatRequest(messages=MESSAGES, **fields)
    completion = CompletionRequest(prompt="a", **fields)
    found, same = chat.structured, completion.structured
    assert found == same and chat.structured_by == completion.structured_by
    assert chat.structured_by == ("" if found is None else next(iter(fields)))
    return found


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"response_format": {"type": "structural_tag", **TAG}}, {"structural_tag": TAG}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"json": SCHEMA}),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            {"json_object": True, "disable_any_whitespace": True},
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"guided_json": '{"type": "object"}'}, {"json": {"type": "object"}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"], "guided_decoding_backend": "auto"}, {"choice": ["a"]}),
        ({"guided_grammar": "start: X"}, {"grammar": "start: X"}),
    ],
    ids=str,
)
def test_fields_become_one_wish(fields, expected):
    assert asked(**fields) == (None if expected is None else StructuredOutputs(**expected))


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {}}, "response_format", "whose type is text, json_object, json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "whose type is text"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema.schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "structures"),
        ({"response_format": "json"}, "response_format", "dict"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "json and regex"),
        ({"structured_outputs": {"jsn": SCHEMA}}, "structured_outputs", "has no 'jsn'; use json"),
        ({"structured_outputs": {"regex": 7}}, "structured_outputs", "text that is not empty"),
        ({"guided_regex": ""}, "guided_regex", "text that is not empty"),
        ({"guided_choice": []}, "guided_choice", "list of 1 to"),
        ({"guided_json": "{"}, "guided_json", "must be a JSON object"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "cannot be given with response_format",
        ),
        (
            {"guided_regex": "a", "ignore_eos": True},
            "ignore_eos",
            "cannot be combined with structured outputs",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
async def test_what_is_wrong_is_said_of_the_field(post, chat, fields, param, message):
    path, rest = ("chat/completions", {"messages": MESSAGES}) if chat else ("completions", {"prompt": "a"})
    answer = await post(f"/v1/{path}", **rest, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and message in error["message"]


async def test_an_engine_without_a_tokenizer_says_so(client_of):
    from fake_engine import FakeEngine

    async with client_of(FakeEngine(with_tokenizer=False)) as client:
        answer = await client.post("/v1/completions", json={"prompt": [5], "guided_regex": "a"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "guided_regex"
