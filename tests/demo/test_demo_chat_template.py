"""The built-in model's chat template renders conversations as GLM-5.2's does."""

import json

import pytest

HIGH, MAX = "<|system|>Reasoning Effort: High", "<|system|>Reasoning Effort: Max"
HELLO = [{"role": "user", "content": "Hi"}]
CALL = {"function": {"name": "add", "arguments": {"a": 1, "note": "<ü>\n", "list": ["é", None]}}}
CALLING = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "reasoning_content": "old", "content": " Two. "},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "reasoning_content": " new ", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": [{"type": "text", "text": "4"}]},
]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, f"{MAX}<|user|>Hi<|assistant|><think>"),
        ({"enable_thinking": True}, f"{MAX}<|user|>Hi<|assistant|><think>"),
        ({"enable_thinking": False}, "<|user|>Hi<|assistant|><think></think>"),
        ({"enable_thinking": False, "reasoning_effort": "high"}, "<|user|>Hi<|assistant|><think></think>"),
        ({"reasoning_effort": "high"}, f"{HIGH}<|user|>Hi<|assistant|><think>"),
        ({"reasoning_effort": "medium"}, f"{MAX}<|user|>Hi<|assistant|><think>"),
        ({"add_generation_prompt": False}, f"{MAX}<|user|>Hi"),
    ],
)
def test_thinking_and_its_effort_can_be_chosen(tokenizer, variables, expected):
    assert tokenizer.apply_chat_template(HELLO, **variables) == "[gMASK]<sop>" + expected


def test_a_conversation_with_tool_results(tokenizer):
    call = (
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>note</arg_key><arg_value><ü>\n"
        '</arg_value><arg_key>list</arg_key><arg_value>["é", null]</arg_value></tool_call>'
    )
    assert tokenizer.apply_chat_template(CALLING) == (
        f"[gMASK]<sop>{MAX}<|system|>Be brief.<|user|>One?<|assistant|><think></think>Two.<|user|>And?"
        f"<|assistant|><think>new</think>{call}{call}"
        "<|observation|><tool_response>3</tool_response><tool_response>4</tool_response><|assistant|><think>"
    )


def test_all_reasoning_is_kept_on_request(tokenizer):
    rendered = tokenizer.apply_chat_template(CALLING, clear_thinking=False)
    assert "<think>old</think>Two." in rendered and "<think>new</think>" in rendered


def test_only_turns_after_the_last_user_message_show_reasoning_even_if_users_repeat_themselves(tokenizer):
    turn = [*HELLO, {"role": "assistant", "content": "x", "reasoning_content": "why"}]
    rendered = tokenizer.apply_chat_template(turn + turn, add_generation_prompt=False)
    assert rendered.count("<think>why</think>") == 1 and rendered.endswith("<think>why</think>x")


def test_reasoning_left_in_an_answers_text_is_recognised(tokenizer):
    past = [*HELLO, {"role": "assistant", "content": "why</think>x"}]
    assert "<think>why</think>x" in tokenizer.apply_chat_template(past)
    assert "<think></think>x<|user|>" in tokenizer.apply_chat_template(past + HELLO)


def test_tools_are_listed_one_a_line(tokenizer):
    tools = [{"type": "function", "function": {"name": name, "description": "<ü>"}} for name in "fg"]
    rendered = tokenizer.apply_chat_template(HELLO, tools=tools)
    assert rendered.startswith(f"[gMASK]<sop>{MAX}<|system|>\n# Tools\n")
    listed = rendered.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert [json.loads(line) for line in listed.split("\n")] == tools and "<ü>" in listed
    assert rendered.endswith("</tool_call><|user|>Hi<|assistant|><think>")


def test_an_unknown_role_and_unparsed_arguments_are_refused(tokenizer):
    with pytest.raises(ValueError, match="no role is called critic; use system, user, assistant or tool"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "x"}])
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    with pytest.raises(ValueError, match="must be an object"):
        tokenizer.apply_chat_template([*HELLO, call])
