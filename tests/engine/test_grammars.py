"""Which tokens a structured output may go on with, and what cannot be asked for."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.demo.tokenizer import make_tokenizer
from glm_dcp_jax.engine.grammars import Grammars, mask_words, token_masks
from glm_dcp_jax.engine.logit_rules import LogitRules
from glm_dcp_jax.engine.sampling import forbid
from glm_dcp_jax.engine.sampling_params import ParameterError, SamplingParams, check_vocabulary
from glm_dcp_jax.engine.structured_outputs import StructuredOutputs, StructuredOutputsError
from glm_dcp_jax.engine.tokenizer import Tokenizer

VOCABULARY = 1000
MANY = " | ".join(f'"{n}"' for n in range(2500))
"""More alternatives than llguidance follows at a time."""
MANY_TAGS = {
    "structures": [{"begin": f"<f{n}>", "schema": {"type": "object"}, "end": ""} for n in range(5000)],
    "triggers": ["<f"],
}
"""More rules than it takes."""
CALL = {
    "structures": [
        {
            "begin": "<tool_call>f",
            "schema": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
            "end": "</tool_call>",
        }
    ],
    "triggers": ["<tool_call>"],
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(make_tokenizer(960))


@pytest.fixture(scope="module")
def ends(tokenizer) -> list[int]:
    return [tokenizer.added_tokens[name] for name in ("<|endoftext|>", "<|user|>")]


@pytest.fixture(scope="module")
def grammars(tokenizer, ends) -> Grammars:
    return Grammars(tokenizer, ends, VOCABULARY)


def allowed(mask: np.ndarray, token: int) -> bool:
    return bool(mask.view(np.uint32)[token // 32] >> token % 32 & 1)


@pytest.fixture(scope="module")
def takes(tokenizer, grammars, ends):
    """Whether an output may begin with these tokens, and whether it may then end: as drafts, and one by one."""

    def look(wanted: StructuredOutputs, output: str | list[int]) -> tuple[bool, bool]:
        ids = tokenizer.encode(output, False) if isinstance(output, str) else output
        masks = token_masks({0: (grammars.compile(wanted), ids)}, len(ids) + 1, VOCABULARY)
        goes_on = all(allowed(masks[row], token) for row, token in enumerate(ids))
        may_end = goes_on and allowed(masks[-1], ends[0]) and allowed(masks[-1], ends[1])
        slowly = grammars.compile(wanted)
        for row, token in enumerate(ids):
            (mask,) = token_masks({0: (slowly, ())}, 1, VOCABULARY)
            np.testing.assert_array_equal(mask, masks[row])
            if not allowed(mask, token):
                break
            slowly.append(token)
        return goes_on, may_end

    return look


INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("wanted", "output", "goes_on", "may_end"),
    [
        ({"json": INTEGER}, '{"a": 12}', True, True),
        ({"json": json.dumps(INTEGER)}, '{\n "a":12', True, False),
        ({"json": INTEGER}, '{"b', False, False),
        ({"json": INTEGER}, "{" + 64 * " " + '"a":1}', True, True),
        ({"json": INTEGER}, "{" + 65 * " " + '"a":1}', False, False),
        ({"json": INTEGER, "disable_any_whitespace": True}, '{"a":12}', True, True),
        ({"json": INTEGER, "disable_any_whitespace": True}, '{"a": 12}', False, False),
        ({"json": INTEGER, "whitespace_pattern": "~"}, '{~"a":~12}', True, True),
        ({"json_object": True}, '{"a": [1, {"b":null}]}', True, True),
        ({"json_object": True}, "[1]", False, False),
        ({"regex": "[a-c]+x?"}, "abcx", True, True),
        ({"regex": "[a-c]+x?"}, "abd", False, False),
        ({"choice": ["yes", 'n\n"\\\x01é']}, 'n\n"\\\x01é', True, True),
        ({"choice": ["yes", "no"]}, "yes", True, True),
        ({"regex": "[a-c]{3}"}, "ab", True, False),
        ({"choice": ["yes", "no"]}, "maybe", False, False),
        ({"grammar": 'start: "a" /[0-9]+/'}, "a12", True, True),
        ({"grammar": 'root ::= "a" [0-9]+'}, "a12", True, True),
        ({"structural_tag": CALL}, 'hello <tool_call>f{"x": 3}</tool_call> bye', True, True),
        ({"structural_tag": CALL}, "hello <tool_call>g", False, False),
        ({"structural_tag": json.dumps(CALL)}, "hello", True, True),
    ],
)
def test_what_may_come(takes, wanted, output, goes_on, may_end):
    assert takes(StructuredOutputs(**wanted), output) == (goes_on, may_end)


def test_a_tag_of_plain_text(takes):
    tag = {"begin": "<fn=f>", "schema": INTEGER, "end": "</fn>"}
    wanted = StructuredOutputs(structural_tag={"structures": [tag], "triggers": ["<fn="]})
    assert takes(wanted, 'so <fn=f>{"a": 3}</fn> then') == (True, True)
    assert takes(wanted, "so <fn=g") == (False, False)


def test_markup_is_never_part_of_a_text(takes, tokenizer):
    call = tokenizer.added_tokens["<tool_call>"]
    start = tokenizer.encode('{"a": "', False)
    wanted = StructuredOutputs(json_object=True)
    assert takes(wanted, [*start, call]) == (False, False)
    assert takes(wanted, '{"a": "<tool" "') == (False, False)


def test_all_is_free_up_to_a_token_but_the_end(takes, tokenizer, ends):
    closing = tokenizer.added_tokens["</think>"]
    wanted = StructuredOutputs(choice=["yes"], after_token=closing)
    thought = tokenizer.encode("hm {", False)
    assert takes(wanted, thought) == (True, False)
    assert takes(wanted, [*thought, closing, *tokenizer.encode("yes", False)]) == (True, True)
    assert takes(wanted, [*thought, closing, *tokenizer.encode("no", False)]) == (False, False)
    assert takes(wanted, [*thought, ends[1]]) == (False, False)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=12))
def test_no_drafts_disturb_an_output(grammars, tokenizer, drafts):
    wanted = StructuredOutputs(json=INTEGER)
    grammar, other = grammars.compile(wanted), grammars.compile(wanted)
    for token in tokenizer.encode('{"a": 1', False):
        token_masks({0: (grammar, drafts)}, len(drafts) + 1, VOCABULARY)
        for each in (grammar, other):
            each.append(token)
        found, expected = (token_masks({0: (each, ())}, 1, VOCABULARY) for each in (grammar, other))
        np.testing.assert_array_equal(found, expected)


def test_what_ends_an_output_is_no_text(tokenizer):
    """As in models that end with a token of ordinary text."""
    (end,) = tokenizer.encode("&", False)
    grammar = Grammars(tokenizer, [end], 960).compile(StructuredOutputs(regex='"[^"]*"'))
    (mask,) = token_masks({0: (grammar, ())}, 1, 960)
    assert not allowed(mask, end)
    for token in tokenizer.encode('"a', False):
        grammar.append(token)
    (mask,) = token_masks({0: (grammar, ())}, 1, 960)
    assert not allowed(mask, end) and allowed(mask, tokenizer.encode("*", False)[0])
    for token in tokenizer.encode('"', False):
        grammar.append(token)
    (mask,) = token_masks({0: (grammar, ())}, 1, 960)
    assert [token for token in range(960) if allowed(mask, token)] == [end]


def test_rows_of_others_are_free(grammars):
    masks = token_masks({2: (grammars.compile(StructuredOutputs(regex="a")), (7,))}, 6, VOCABULARY)
    assert masks.shape == (6, mask_words(VOCABULARY))
    assert (masks[[0, 1, 4, 5]] == -1).all() and (masks[2] != -1).any()
    assert token_masks({}, 4, VOCABULARY) is None


def test_a_mask_forbids_and_keeps_nan():
    logits = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    logits[1, 0] = np.nan
    found = forbid(logits, np.array([[0b101], [0b110]], np.int32))
    np.testing.assert_array_equal(found, [[0, -np.inf, 2], [np.nan, 4, 5]])


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"json": {"type": "foo"}}, "json cannot be used: Invalid type: foo"),
        ({"json": {"type": "object", "unevaluatedProperties": False}}, "unevaluatedProperties"),
        ({"json": {"$ref": "#/nope"}}, "'/nope' does not exist"),
        ({"regex": "(a"}, "regex cannot be used: .*unclosed group"),
        ({"grammar": "start: foo"}, "grammar cannot be used: .*foo"),
        ({"grammar": "root ::= foo"}, "grammar cannot be used: .*foo"),
        ({"json_object": True, "whitespace_pattern": "("}, "json_object cannot be used"),
        ({"regex": r"[^\x00-\x{10FFFF}]"}, "regex cannot be used"),
        ({"grammar": f'start: "x" many\nmany: {MANY}'}, "grammar cannot be used: .*2501 items"),
        ({"structural_tag": MANY_TAGS}, r"structural_tag cannot be used: .*u16::MAX as usize - 10$"),
        ({"grammar": 'start: a "x"\na[stop="q"]: /.*/'}, "grammar cannot be used: .*rollback"),
    ],
)
def test_what_cannot_be_compiled_is_refused(grammars, wanted, message):
    with pytest.raises(ParameterError, match=message) as refused:
        grammars.compile(StructuredOutputs(**wanted))
    assert refused.value.field == "structured_outputs" and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("wanted", "field", "message"),
    [
        ({}, "json", "exactly one of json, json_object, .*but there is none"),
        ({"json": {}, "regex": "a"}, "regex", "but there is json and regex"),
        ({"json": "[1]"}, "json", "must be a JSON object, but is"),
        ({"json": "{"}, "json", "must be a JSON object"),
        ({"json": '{"a":' * 5000}, "json", "must be a JSON object"),
        ({"json": {"a": float("nan")}}, "json", "must be a JSON object"),
        ({"json": {"a": "x" * (1 << 20)}}, "json", "at most 1048576 bytes"),
        ({"choice": []}, "choice", "list of 1 to 10000 texts"),
        ({"choice": ["a", 1]}, "choice", "texts that are not empty"),
        ({"choice": ["\ud800"]}, "choice", "texts that are not empty"),
        ({"regex": ""}, "regex", "a text that is not empty"),
        ({"json_object": 1}, "json_object", "True or False"),
        ({"structural_tag": {}}, "structural_tag", "lists that are not empty"),
        ({"structural_tag": CALL | {"triggers": ["x"]}}, "structural_tag", "begin with a trigger"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace", "for JSON, not for regex"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)
def test_what_cannot_be_meant_is_refused(wanted, field, message):
    with pytest.raises(StructuredOutputsError, match=message) as refused:
        StructuredOutputs(**wanted)
    assert refused.value.field == field and len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "other",
    [{"min_tokens": 1}, {"ignore_eos": True}, {"bad_words": ["a"]}, {"allowed_token_ids": [1]}],
    ids=lambda other: next(iter(other)),
)
def test_what_would_contradict_it_is_refused(other):
    with pytest.raises(ParameterError, match="cannot be combined with structured outputs") as refused:
        SamplingParams(structured_outputs=StructuredOutputs(json_object=True), **other)
    assert refused.value.field in other


def test_a_token_that_is_not_there_is_refused():
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a", after_token=VOCABULARY))
    with pytest.raises(ParameterError, match="structured_outputs"):
        check_vocabulary(params, VOCABULARY)
    with pytest.raises(ParameterError, match="must be StructuredOutputs"):
        SamplingParams(structured_outputs={"regex": "a"})


def test_rules_that_only_bind_adjust_no_logits(grammars):
    wanted = StructuredOutputs(regex="a+")
    rules = [
        LogitRules(
            SamplingParams(structured_outputs=wanted, **more),
            [1],
            (),
            (),
            VOCABULARY,
            grammars.compile(wanted),
        )
        for more in ({}, {"presence_penalty": 1.0})
    ]
    assert [each.needs_history for each in rules] == [True, True]
    assert [each.adjusts for each in rules] == [False, True]


def test_equal_grammars_are_compiled_once(grammars, monkeypatch):
    compiled = []
    compile_ = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda wanted: compiled.append(wanted) or compile_(wanted))
    for after in (None, 3, None):
        grammars.compile(StructuredOutputs(regex="only here", after_token=after))
    assert len(compiled) == 1


def test_a_grammar_that_cannot_go_on_says_why(grammars):
    wanted = StructuredOutputs(regex="a+")
    params = SamplingParams(structured_outputs=wanted)
    rules = LogitRules(params, [1], (), (), VOCABULARY, grammars.compile(wanted))
    assert rules.failure is None
    rules.append(7)  # what a mask would have forbidden
    assert "the output's grammar could not go on: " in rules.failure and len(rules.failure) < 400


def test_a_grammar_that_broke_lets_no_output_end_and_is_compiled_anew(grammars, tokenizer, ends):
    """llguidance would have it end as if it were whole."""
    wanted = StructuredOutputs(grammar=f"start: A B A B A many\nA: /[x-z]/\nB: /[w-z]/\nmany: {MANY}")
    grammar, (x,) = grammars.compile(wanted), tokenizer.encode("x", False)
    (mask,) = token_masks({0: (grammar, ())}, 1, VOCABULARY)
    assert allowed(mask, x) and not grammar.error
    for token in tokenizer.encode("xyxyx", False):
        grammar.append(token)
    masks = token_masks({0: (grammar, ()), 1: (grammar, (x,))}, 3, VOCABULARY)
    assert not masks.any() and "items" in grammar.error
    again = grammars.compile(wanted)
    (mask,) = token_masks({0: (again, ())}, 1, VOCABULARY)
    assert not again.error and allowed(mask, x)


def test_a_grammar_that_leads_nowhere_says_so(grammars, tokenizer, ends):
    grammar = grammars.compile(StructuredOutputs(grammar='start: "a" <|endoftext|>'))
    grammar.append(*tokenizer.encode("a", False))
    assert not token_masks({0: (grammar, ())}, 1, VOCABULARY).any()
    assert "no token may come next" in grammar.error


def test_ten_thousand_choices(takes):
    wanted = StructuredOutputs(choice=[f"choice {number}" for number in range(10_000)])
    assert takes(wanted, "choice 987") == (True, True)
    assert takes(wanted, "choice 98x") == (False, False)


def test_any_character_may_be_in_a_choice(takes, tokenizer):
    for code in (*range(128), 0x85, 0x2028, 0xFEFF, 0xFFFF, 0x10FFFF):
        assert takes(StructuredOutputs(choice=[f"a{chr(code)}b"]), f"a{chr(code)}b") == (True, True)


@pytest.mark.parametrize("kind", ["json", "grammar"])
def test_rules_may_refer_to_one_another_as_deep_as_they_like(grammars, kind):
    """Each level is a frame of llguidance's stack, which a thread's own is too small for."""
    deep = 8_000
    schemas = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(deep)} | {f"a{deep}": {"const": 7}}
    rules = "\n".join(f'r{n}: "x" r{n + 1}' for n in range(deep))
    wanted = {
        "json": {"$ref": "#/$defs/a0", "$defs": schemas},
        "grammar": f'start: r0\n{rules}\nr{deep}: "y"',
    }
    grammar = grammars.compile(StructuredOutputs(**{kind: wanted[kind]}))
    assert token_masks({0: (grammar, ())}, 1, VOCABULARY).any() and not grammar.error


@pytest.mark.parametrize("text", ["a<tool_call>b", "</arg_key>", "<|user|><|user|>"])
def test_text_that_spells_markup_is_text(tokenizer, grammars, ends, text):
    """Where only one text may come, llguidance asks the tokenizer which tokens it is."""
    grammar, output = grammars.compile(StructuredOutputs(choice=[text])), []
    while ends[0] not in output:
        (mask,) = token_masks({0: (grammar, ())}, 1, VOCABULARY)
        output.append(next(token for token in range(VOCABULARY) if allowed(mask, token)))
        grammar.append(output[-1])
    assert not set(output[:-1]) & set(tokenizer.added_tokens.values())
    assert b"".join(map(tokenizer.token_to_bytes, output[:-1])) == text.encode()


def test_long_grammars_are_not_kept_without_end(tokenizer, ends, monkeypatch):
    monkeypatch.setattr("glm_dcp_jax.engine.grammars._KEPT_BYTES", 1000)
    made = Grammars(tokenizer, ends, VOCABULARY)
    for number in range(9):
        made.compile(StructuredOutputs(choice=[f"{number}{'x' * 250}"]))
    assert len(made._compiled) == 3
    made.compile(StructuredOutputs(choice=["y" * 2000]))
    assert len(made._compiled) == 1
