"""Calls that must be made: whatever the model would like to write, they are calls, and their arguments fit."""

import json
import random
from collections.abc import Sequence

import jsonschema
import numpy as np
import pytest
from written import ARGUMENTS, CALL, FIND, HELLO, TIME, engine_that_says, glm_tokenizer, written

from glm_dcp_jax.demo.description import VOCABULARY
from glm_dcp_jax.engine.grammars import Grammars, token_masks
from glm_dcp_jax.engine.outputs import Mark
from glm_dcp_jax.engine.structured_outputs import StructuredOutputs
from glm_dcp_jax.serve.parsing.forced_calls import forced_calls, json_answer
from glm_dcp_jax.serve.parsing.parameters import Parameters
from glm_dcp_jax.serve.parsing.tags import CALL_TAGS, REASONING_TAGS, Tag, TagTable
from glm_dcp_jax.serve.parsing.turn import CallArguments, CallStart, Content, TurnParser

ALL_SORTS = {
    "type": "function",
    "function": {
        "name": "all-sorts.1",
        "parameters": {
            "type": "object",
            "$defs": {
                "point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
            },
            "properties": {
                "kind": {"type": "string", "enum": ["round", "sq<uare", 'a "b"']},
                "count": {"type": "integer", "minimum": 1, "maximum": 30},
                "maybe": {"type": ["boolean", "null"]},
                "where": {"$ref": "#/$defs/point"},
                "sizes": {"type": "array", "items": {"enum": [1, 2.5]}, "maxItems": 2},
                "note": {"type": "string"},
                "anything": {},
            },
            "required": ["kind", "where"],
        },
    },
}
TOOLS = [FIND, TIME, ALL_SORTS]


@pytest.fixture(scope="module")
def table() -> TagTable:
    return TagTable.of(glm_tokenizer(), (*REASONING_TAGS, *CALL_TAGS))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(glm_tokenizer(), [0], VOCABULARY)


def walk(grammars: Grammars, grammar: str, seed: int, most: int = 400) -> list[int] | None:
    """What a model writes that likes every token equally, but tags and the end a little more; None if it never ends."""
    rng = random.Random(seed)
    tags = {glm_tokenizer().token_id(tag.value) for tag in Tag}
    state, output = grammars.compile(StructuredOutputs(grammar=grammar)), []
    while len(output) < most:
        (mask,) = token_masks({0: (state, ())}, 1, VOCABULARY)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCABULARY]
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, "nothing may come"
        liked = [token for token in allowed if token in tags or token == 0]
        token = rng.choice(liked if liked and rng.random() < 0.4 else allowed)
        if token == 0:
            return output
        output.append(token)
        state.append(token)
    return None


def parsed(
    output: Sequence[int], table: TagTable, tools: Sequence[dict]
) -> tuple[str, list[tuple[str, dict]]]:
    """What is said, and the calls with their arguments."""
    functions = {tool["function"]["name"]: Parameters(tool["function"].get("parameters")) for tool in tools}
    raw, marks = b"", []
    for token in output:
        if token in table.tokens:
            raw = raw.decode(errors="replace").encode()
            marks.append(Mark(len(raw.decode()), token))
        else:
            raw += glm_tokenizer().token_to_bytes(token)
    parser = TurnParser(table, False, functions)
    parts = [*parser.feed(raw.decode(errors="replace"), marks), *parser.finish()]
    assert not parser.cut
    names = [part.name for part in parts if isinstance(part, CallStart)]
    arguments = [
        json.loads("".join(p.text for p in parts if isinstance(p, CallArguments) and p.index == index))
        for index in range(len(names))
    ]
    said = "".join(part.text for part in parts if isinstance(part, Content))
    return said, list(zip(names, arguments, strict=True))


def check_call(name: str, arguments: dict) -> None:
    [tool] = [tool["function"] for tool in TOOLS if tool["function"]["name"] == name]
    schema = tool.get("parameters") or {"type": "object"}
    jsonschema.validate(arguments, schema)


@pytest.mark.parametrize("several", [True, False])
def test_whatever_the_model_likes_to_write_it_calls(grammars, table, several):
    grammar = forced_calls(TOOLS, table, several)
    ended, counts = 0, set()
    for seed in range(25):
        output = walk(grammars, grammar, seed)
        if output is not None:
            said, calls = parsed(output, table, TOOLS)
            assert said == "" and calls
            for call in calls:
                check_call(*call)
            ended, counts = ended + 1, counts | {len(calls)}
    assert ended > 15
    assert (counts == {1}) != several


def test_an_answer_in_json_or_calls(grammars, table):
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    schema["additionalProperties"] = False
    grammar = forced_calls(TOOLS, table, True, json_answer(StructuredOutputs(json=schema)))
    kinds = set()
    for seed in range(30):
        output = walk(grammars, grammar, seed)
        if output is not None:
            said, calls = parsed(output, table, TOOLS)
            assert bool(said) != bool(calls)
            if said:
                jsonschema.validate(json.loads(said), schema)
            for call in calls:
                check_call(*call)
            kinds.add(bool(said))
    assert kinds == {True, False}


def test_a_parameter_that_may_be_anything_is_text(grammars, table):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": True}}}}
    call = "<tool_call>f<arg_key>a</arg_key><arg_value>x {</arg_value></tool_call>"
    state = grammars.compile(StructuredOutputs(grammar=forced_calls([tool], table, False)))
    for token in written(call):
        (mask,) = token_masks({0: (state, ())}, 1, VOCABULARY)
        assert np.unpackbits(mask.view(np.uint8), bitorder="little")[token]
        state.append(token)


def test_a_tokenizer_without_the_tags_cannot_force():
    with pytest.raises(ValueError, match="no tokens for <tool_call>"):
        forced_calls(TOOLS, TagTable({}, (Tag.CALL,)), True)


NAMED = {"type": "function", "function": {"name": "find"}}


@pytest.mark.anyio
class TestRequests:
    @pytest.fixture
    def ask(self, client_of):
        async def send(engine, **body):
            async with client_of(engine) as client:
                return await client.post("/v1/chat/completions", json={"messages": HELLO, **body})

        return send

    @pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
    async def test_the_engine_is_told_and_the_answer_says_why_it_ended(self, ask, choice, reason):
        engine = engine_that_says(f"hm</think>{CALL}")
        answer = await ask(engine, tools=[FIND, TIME], tool_choice=choice)
        assert answer.status_code == 200, answer.text
        [choice_] = answer.json()["choices"]
        [call] = choice_["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == ARGUMENTS and choice_["finish_reason"] == reason
        wanted = engine.params[-1].structured_outputs
        assert wanted.after_token == glm_tokenizer().token_id("</think>")
        assert ('"time"' in wanted.grammar) == (choice == "required")
        assert ("call+" in wanted.grammar) == (choice == "required")

    async def test_one_call_where_no_more_are_wanted(self, ask):
        engine = engine_that_says(f"</think>{CALL}")
        await ask(engine, tools=[FIND], tool_choice="required", parallel_tool_calls=False)
        assert "call+" not in engine.params[-1].structured_outputs.grammar

    async def test_without_thinking_it_holds_from_the_start(self, ask):
        engine = engine_that_says(CALL)
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        await ask(engine, tools=[FIND], tool_choice="required", **off)
        assert engine.params[-1].structured_outputs.after_token is None
        await ask(engine, response_format={"type": "json_object"}, **off)
        assert engine.params[-1].structured_outputs == StructuredOutputs(json_object=True)

    async def test_a_format_holds_behind_reasoning(self, ask):
        engine = engine_that_says("hm</think>{}")
        await ask(engine, response_format={"type": "json_object"})
        end = glm_tokenizer().token_id("</think>")
        assert engine.params[-1].structured_outputs == StructuredOutputs(json_object=True, after_token=end)

    async def test_json_beside_tools_is_json_or_calls(self, ask):
        engine = engine_that_says(f"</think>{CALL}")
        answer = await ask(engine, tools=[FIND], response_format={"type": "json_object"})
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
        assert "| %json" in engine.params[-1].structured_outputs.grammar


def test_a_call_as_models_write_it_is_taken(grammars, table):
    state = grammars.compile(StructuredOutputs(grammar=forced_calls([FIND], table, True)))
    tokens = glm_tokenizer().encode(CALL + CALL, False)
    masks = token_masks({0: (state, tokens)}, len(tokens) + 1, VOCABULARY)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert all(bits[row, token] for row, token in enumerate([*tokens, 0]))


COLOUR = {"type": "string", "enum": ["red", "dark\nblue", ""]}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
MARKUP = 'a\n"b\\</arg_key><tool_call>\x7f'


def _one(schema: dict, **more: object) -> dict:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **more}


@pytest.mark.parametrize(
    "schema",
    [
        _one({"type": ["string", "null"], "enum": ["x", "y", None]}),
        _one({"anyOf": [COLOUR, {"type": "null"}]}),
        _one({"$ref": "#/$defs/C"}, **{"$defs": {"C": COLOUR}}),
        _one({"allOf": [{"$ref": "#/definitions/C"}], "default": "red"}, definitions={"C": COLOUR}),
        _one({"oneOf": [{"const": "m"}, {"const": " n "}]}),
        _one({"enum": ["x", 1, None, True]}),
        _one({"enum": ["null", "x", None]}),
        _one({"type": ["string", "integer"], "enum": [1, 2]}),
        _one({"type": ["string", "array"], "items": DIGIT, "maxItems": 1}),
        _one(
            {"anyOf": [{"enum": ["x", "[0]"]}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]}
        ),
        _one({"type": "array", "items": {"$ref": "#"}, "maxItems": 1}),
        {"type": "object", "properties": {"a": DIGIT, "b": {"$ref": "#/properties/a"}}, "required": ["b"]},
        {"$ref": "#/$defs/A", "$defs": {"A": _one(DIGIT)}},
        {"type": "object", "required": ["x"], "additionalProperties": DIGIT},
        {"type": "object", "properties": {" a": DIGIT}, "required": [" a"], "additionalProperties": False},
        {"type": "object", "properties": {MARKUP: {"enum": [MARKUP]}}, "required": [MARKUP]},
        {"type": "object", "properties": {"a": False, "b": True}, "required": ["b"]},
        _one({"enum": [f"word {number}" for number in range(3000)]}),
    ],
    ids=range(18),
)
def test_arguments_are_what_their_schema_says(grammars, table, schema):
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    grammar, ended = forced_calls([tool], table, False), 0
    for seed in range(4):
        output = walk(grammars, grammar, seed)
        if output is not None:
            [(name, arguments)] = parsed(output, table, [tool])[1]
            assert name == "f"
            jsonschema.validate(arguments, schema)
            ended += 1
    assert ended > 0


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (_one(DIGIT, anyOf=[{"required": ["a"]}]), "calls of f cannot be forced: its parameters have anyOf"),
        (_one(DIGIT, minProperties=1), "have minProperties"),
        (
            {"type": "object", "properties": {"": DIGIT}, "required": [""]},
            "'' is required, but cannot be given",
        ),
        ({"type": "object", "required": ["x"], "additionalProperties": False}, "'x' is required, but cannot"),
        (
            _one({"type": ["string", "integer"], "allOf": [{"enum": ["x"]}, {"enum": ["y"]}]}),
            "allows nothing",
        ),
    ],
    ids=range(5),
)
def test_what_cannot_be_enforced_is_refused(table, schema, message):
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(ValueError, match=message):
        forced_calls([tool], table, True)


@pytest.mark.parametrize("bound", [True, False])
def test_where_calls_have_a_form_none_is_made_within_reasoning(table, bound):
    """The grammar holds behind `</think>` only."""
    parser, parts = TurnParser(table, True, {"find": Parameters(None)}, bound=bound), []
    for place, piece in enumerate(["I ", "<tool_call>", "other", "</tool_call>", "no", "</think>", "yes"]):
        id = glm_tokenizer().token_id(piece)
        length = sum(map(len, ["I ", "other", "no"][: place // 2]))
        parts += parser.feed(piece, ()) if id is None else parser.feed("", [Mark(length, id)])
    parts += parser.finish()
    assert bool(parser.calls) != bound
    if bound:
        assert parts[-1] == Content("yes")


def test_whitespace_that_was_asked_for_holds_beside_tools(table):
    wanted = StructuredOutputs(json_object=True, whitespace_pattern="~")
    assert "~" in json_answer(wanted)


@pytest.mark.parametrize("required", [2.5, True, "a", [1, None], {"a": 1}, None], ids=range(6))
def test_a_list_of_required_names_that_is_none_requires_nothing(table, required):
    schema = {"type": "object", "properties": {"a": DIGIT}, "required": required}
    assert (
        Parameters(schema).required == [] and Parameters(schema).has("a") and not Parameters(schema).has("b")
    )
    assert "tool_0_0?" in forced_calls([{"function": {"name": "f", "parameters": schema}}], table, True)
