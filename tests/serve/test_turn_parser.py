"""What a model writes, taken apart: the same however it is cut, and never a failure."""

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written import glm_tokenizer, spelled, written

from glm_dcp_jax.engine.detokenizer import Detokenizer
from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.serve.parsing.parameters import Parameters
from glm_dcp_jax.serve.parsing.parsers import begins_in_reasoning
from glm_dcp_jax.serve.parsing.tags import CALL_TAGS, REASONING_TAGS, Tag, TagTable
from glm_dcp_jax.serve.parsing.turn import CallArguments, CallStart, Content, Reasoning, TurnParser

STRING = {"type": "string"}
TOOLS = {
    "time": Parameters(None),
    "find": Parameters(
        {
            "type": "object",
            "properties": {
                "text": STRING,
                "limit": {"type": "integer"},
                "deep": {"type": "object"},
                "maybe": {"type": ["string", "null"]},
                "list": {"anyOf": [STRING, {"type": "array"}]},
            },
        }
    ),
}
ALL_TAGS = (*REASONING_TAGS, *CALL_TAGS)
AS_TOKENS = TagTable.of(glm_tokenizer(), ALL_TAGS)
IN_TEXT = TagTable({}, ALL_TAGS)


@dataclass
class Turn:
    reasoning: str = ""
    content: str = ""
    calls: list = field(default_factory=list)
    cut: bool = False

    @property
    def parsed(self) -> tuple:
        return self.reasoning, self.content, [(name, json.loads(text)) for name, text in self.calls]


def bursts_of(ids: list[int], size: int) -> list[list[int]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def read(bursts, thinks=False, table=AS_TOKENS, one_call=False, **params) -> Turn:
    """A turn that came in bursts of tokens. Each part must fit those before it."""
    detokenizer = Detokenizer(
        glm_tokenizer(),
        SamplingParams(marked_token_ids=list(table.tokens), skip_special_tokens=False, **params),
    )
    parser = TurnParser(table, thinks, TOOLS, one_call)
    turn = Turn()
    characters = marks = 0
    for burst in [*bursts, None]:
        if burst is None:
            detokenizer.finish()
        else:
            detokenizer.push(burst)
        text = detokenizer.text
        parts = parser.feed(text[characters:], detokenizer.marks[marks:])
        characters, marks = len(text), len(detokenizer.marks)
        for part in parts if burst is not None else [*parts, *parser.finish()]:
            match part:
                case Reasoning(text):
                    assert text
                    turn.reasoning += text
                case Content(text):
                    assert text
                    turn.content += text
                case CallStart(index, name):
                    assert index == len(turn.calls) and name
                    turn.calls.append([name, ""])
                case CallArguments(index, text):
                    assert text and index == len(turn.calls) - 1
                    turn.calls[index][1] += text
    assert parser.calls == len(turn.calls)
    turn.cut = parser.cut
    return turn


CALL = "<tool_call>find<arg_key>text</arg_key><arg_value>a</arg_value></tool_call>"
FOUND = ("find", {"text": "a"})
FIND = "<tool_call>find<arg_key>"
CASES = {
    "content alone": ("Hi\n猫", ("", "Hi\n猫", [])),
    "nothing": ("", ("", "", [])),
    "blanks alone": ("\n", ("", "\n", [])),
    "reasoning and content": ("<think>hm 猫</think>\n\nHi", ("hm 猫", "\n\nHi", [])),
    "empty reasoning": ("<think>\n</think>Hi", ("", "Hi", [])),
    "unclosed reasoning": ("<think>hm", ("hm", "", [])),
    "repeated think tags": ("<think><think>hm</think></think>Hi", ("hm", "Hi", [])),
    "a stray end of reasoning": ("</think>Hi", ("", "Hi", [])),
    "think tags that are spoken of": (
        "Use <think> and </think>.",
        ("", "Use <think> and </think>.", []),
    ),
    "a call": (CALL, ("", "", [FOUND])),
    "no arguments": ("<tool_call>time</tool_call>", ("", "", [("time", {})])),
    "line ends between tags": (
        "<tool_call>find\n<arg_key>text</arg_key>\n<arg_value> a\n</arg_value>\n<arg_key>limit</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>\n",
        ("", "", [("find", {"text": " a\n", "limit": 3}), ("time", {})]),
    ),
    "text around calls": (f"First.\n{CALL}then{CALL} last", ("", "First.\nthen last", [FOUND, FOUND])),
    "reasoning, then a call": (f"<think>hm</think>\n{CALL}", ("hm", "", [FOUND])),
    "a call out of reasoning": (f"<think>hm{CALL}</think>Hi", ("hm", "Hi", [FOUND])),
    "reasoning after a call": (f"{CALL}\n<think>hm</think>Hi", ("hm", "Hi", [FOUND])),
    "nested JSON": (
        f'{FIND}deep</arg_key><arg_value>{{"a": [1, {{"b": "</x>\\n"}}]}}</arg_value></tool_call>',
        ("", "", [("find", {"deep": {"a": [1, {"b": "</x>\n"}]}})]),
    ),
    "a string with all that needs escapes": (
        f'{FIND}text</arg_key><arg_value>"\\\n\t{{}}\x07 𒀀 é</arg_value></tool_call>',
        ("", "", [("find", {"text": '"\\\n\t{}\x07 𒀀 é'})]),
    ),
    "a string that looks like JSON": (
        f"{FIND}text</arg_key><arg_value>[1]</arg_value></tool_call>",
        ("", "", [("find", {"text": "[1]"})]),
    ),
    "an empty string": (
        f"{FIND}text</arg_key><arg_value></arg_value></tool_call>",
        ("", "", [("find", {"text": ""})]),
    ),
    "a number that is none": (
        f"{FIND}limit</arg_key><arg_value>many</arg_value></tool_call>",
        ("", "", [("find", {"limit": "many"})]),
    ),
    "NaN is no JSON": (
        f"{FIND}limit</arg_key><arg_value>NaN</arg_value></tool_call>",
        ("", "", [("find", {"limit": "NaN"})]),
    ),
    "parameters that nobody knows": (
        f"{FIND}x</arg_key><arg_value>[1]</arg_value><arg_key>y</arg_key><arg_value>it's</arg_value></tool_call>",
        ("", "", [("find", {"x": [1], "y": "it's"})]),
    ),
    "null or text": (
        f"{FIND}maybe</arg_key><arg_value>null</arg_value></tool_call>"
        f"{FIND}maybe</arg_key><arg_value>nullable</arg_value></tool_call>",
        ("", "", [("find", {"maybe": None}), ("find", {"maybe": "nullable"})]),
    ),
    "an array or text": (
        f'{FIND}list</arg_key><arg_value>["a", 1]</arg_value></tool_call>'
        f"{FIND}list</arg_key><arg_value>[a</arg_value></tool_call>",
        ("", "", [("find", {"list": ["a", 1]}), ("find", {"list": "[a"})]),
    ),
    "a tool that nobody knows": ("<tool_call>fly</tool_call>", ("", "", [("fly", {})])),
    "a key twice": (
        f"{FIND}text</arg_key><arg_value>a</arg_value><arg_key>text</arg_key><arg_value>b</arg_value></tool_call>",
        ("", "", [FOUND]),
    ),
    "tags in a string": (
        f"{FIND}text</arg_key><arg_value><arg_key>k</arg_key></think><tool_call></arg_value></tool_call>",
        ("", "", [("find", {"text": "<arg_key>k</arg_key></think><tool_call>"})]),
    ),
    "an unclosed value": (f"{FIND}text</arg_key><arg_value>a</tool_call>Hi", ("", "Hi", [FOUND])),
    "an unclosed key": (f"{FIND}text<arg_value>a</arg_value></tool_call>", ("", "", [FOUND])),
    "a key without a value": (f"{FIND}text</arg_key></tool_call>", ("", "", [("find", {})])),
    "a value without a key": (
        "<tool_call>find<arg_key></arg_key><arg_value>a</arg_value></tool_call>",
        ("", "", [("find", {})]),
    ),
    "an unclosed call before another": (
        f"{FIND}text</arg_key><arg_value>a</arg_value>{CALL}<tool_call>time<tool_call>time",
        ("", "", [FOUND, FOUND, ("time", {}), ("time", {})]),
    ),
    "repeated call tags": (f"<tool_call>{CALL}</tool_call>Hi", ("", "Hi", [FOUND])),
    "an unclosed call": (f"{FIND}text</arg_key><arg_value>a</arg_value>", ("", "", [FOUND])),
    "an unclosed name of no tool": ("<tool_call>fi", ("", "<tool_call>fi", [])),
    "an empty call": ("<tool_call></tool_call>", ("", "<tool_call></tool_call>", [])),
    "what is no name": (
        "<think>Write <tool_call> first</think>and </tool_call> <arg_key>",
        ("Write <tool_call> first", "and </tool_call> <arg_key>", []),
    ),
    "a name with other tags": (
        "<tool_call>find</arg_key>x</tool_call>",
        ("", "<tool_call>find</arg_key>x</tool_call>", []),
    ),
    "text within a call": (
        "<tool_call>find<arg_key>text</arg_key>:<arg_value>a</arg_value> and</arg_value></think></tool_call>Hi",
        ("", "Hi", [FOUND]),
    ),
}
cases = pytest.mark.parametrize("name", CASES)


@cases
def test_bursts_of_any_size_are_read_alike(name):
    text, expected = CASES[name]
    for size in (1, 2, 3, 4, 5, 6, 7, 8, 1000):
        assert read(bursts_of(written(text), size)).parsed == expected


@cases
def test_a_cut_anywhere_changes_nothing(name):
    text, expected = CASES[name]
    ids = written(text)
    for place in range(len(ids)):
        assert read([ids[:place], ids[place:]]).parsed == expected


@cases
def test_tags_that_are_no_tokens_are_found_in_the_text(name):
    text, expected = CASES[name]
    ids = spelled(text)
    for size in (1, 3, 7, 1000):
        assert read(bursts_of(ids, size), table=IN_TEXT).parsed == expected


@cases
def test_a_turn_that_ends_anywhere_has_arguments_that_are_JSON(name):
    ids = written(CASES[name][0])
    for end in range(len(ids)):
        turn = read(bursts_of(ids[:end], 4))
        assert all(isinstance(arguments, dict) for _, arguments in turn.parsed[2])


def test_letters_that_spell_a_tag_are_text():
    assert read([spelled(CALL)]).parsed == ("", CALL, [])


def test_a_prompt_that_opened_reasoning_needs_no_tag():
    turn = read(bursts_of(written("hm</think>Hi"), 3), thinks=True)
    assert turn.parsed == ("hm", "Hi", [])


def test_an_end_in_the_middle_of_a_character():
    half = spelled("é")[:1]
    assert read([[*written("<think>a"), *half]]).parsed == ("a\ufffd", "", [])
    value = written(f"{FIND}text</arg_key><arg_value>a")
    assert read([[*value, *half]]).parsed == ("", "", [("find", {"text": "a\ufffd"})])
    assert read([[*value, *half, *written("</arg_value></tool_call>")]]).parsed[2] == [
        ("find", {"text": "a\ufffd"})
    ]


def test_a_stop_string_may_cut_a_call():
    ids = written(f"{FIND}text</arg_key><arg_value>one. two</arg_value></tool_call>")
    for size in (1, 2, 8):
        turn = read(bursts_of(ids, size), stop=". t")
        assert turn.parsed == ("", "", [("find", {"text": "one"})]) and turn.cut


def test_a_closing_tag_may_be_a_stop_string():
    turn = read(bursts_of(written(f"a {CALL} b"), 2), stop="</tool_call>")
    assert turn.parsed == ("", "a ", [FOUND]) and not turn.cut


def test_a_string_comes_as_it_is_written():
    ids = written(f"{FIND}text</arg_key><arg_value>one two")
    parser = TurnParser(TagTable.of(glm_tokenizer(), ALL_TAGS), False, TOOLS)
    detokenizer = Detokenizer(glm_tokenizer(), SamplingParams(marked_token_ids=list(AS_TOKENS.tokens)))
    detokenizer.push(ids)
    parts = parser.feed(detokenizer.text, detokenizer.marks)
    assert "".join(part.text for part in parts if isinstance(part, CallArguments)) == '{"text": "one two'


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        (f"{FIND}te", True),
        (f"{FIND}text</arg_key>", True),
        (f"{FIND}text</arg_key><arg_value>a", True),
        (f"{FIND}text</arg_key><arg_value>a</arg_value>", False),
        ("<tool_call>time", False),
        (CALL, False),
    ],
)
def test_a_call_is_cut_where_its_last_argument_is_not_whole(text, cut):
    turn = read([written(text)])
    assert len(turn.calls) == 1 and turn.cut is cut


def test_of_one_call_only_the_first_and_what_is_before_it_counts():
    ids = written(f"a {CALL} b {CALL}")
    for size in (1, 4, 1000):
        assert read(bursts_of(ids, size), one_call=True).parsed == ("", "a ", [FOUND])


TEXTS = st.text(st.sampled_from('ab{}[]",:1 \n<>/é猫𒀀\\'), max_size=6)
WORDS = st.sampled_from(["find", "time", "text", "limit", "maybe", "null", "[1]", '{"a": 2}', " ", "\n"])
TURNS = st.lists(st.one_of(st.sampled_from([tag.value for tag in Tag]), WORDS, TEXTS), max_size=25)


@given(
    pieces=TURNS,
    cuts=st.lists(st.integers(0, 100), max_size=12),
    thinks=st.booleans(),
    stop=st.lists(st.sampled_from(["a1", "</think>", "<", "\n\n", "find<"]), max_size=2),
)
@settings(max_examples=150, deadline=None)
def test_whatever_is_written_is_read_alike_and_has_valid_arguments(pieces, cuts, thinks, stop):
    ids = written("".join(pieces))
    edges = [0, *sorted(place % (len(ids) + 1) for place in cuts), len(ids)]
    bursts = [ids[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    one_by_one = read(bursts_of(ids, 1), thinks, stop=stop)
    assert read(bursts, thinks, stop=stop) == one_by_one
    assert all(isinstance(arguments, dict) for _, arguments in one_by_one.parsed[2])


JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    text=st.text(max_size=12),
    deep=st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3),
    size=st.integers(1, 8),
)
@settings(max_examples=100, deadline=None)
def test_arguments_come_back_as_they_were_written(text, deep, size):
    arguments = {"text": text.replace("<", "("), "deep": deep, "x": [deep]}
    pairs = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value if key == 'text' else json.dumps(value)}</arg_value>"
        for key, value in arguments.items()
    )
    ids = written(f"<tool_call>find{pairs}</tool_call>")
    assert read(bursts_of(ids, size)).parsed == ("", "", [("find", arguments)])


@pytest.mark.parametrize(
    ("prompt", "thinks"),
    [
        ("<|user|>Hi<|assistant|><think>", True),
        ("<|user|>Hi<|assistant|><think>I was", True),
        ("<|user|>Hi<|assistant|><think></think>", False),
        ("<|user|>What is <think>?<|assistant|>", False),
        ("<|user|>What is <think>?", True),
        ("no tags at all", False),
    ],
)
@pytest.mark.parametrize("table", [AS_TOKENS, IN_TEXT], ids=["tokens", "text"])
def test_whether_a_prompt_ends_in_reasoning(prompt, thinks, table):
    ids = glm_tokenizer().encode(prompt)
    assert begins_in_reasoning(glm_tokenizer(), table, ids) is thinks
