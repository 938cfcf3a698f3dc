"""LangChain's OpenAI client."""

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def chat(url, model):
    langchain_openai = pytest.importorskip("langchain_openai", reason="needs the extra `conformance`")
    return langchain_openai.ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="secret",
        model=model,
        temperature=0,
        max_tokens=24,
        max_retries=0,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )


def test_an_answer_and_its_stream(chat):
    whole = chat.invoke("Hello")
    assert isinstance(whole.content, str) and whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream("Hello")) == whole.content


def test_many_at_once(chat):
    assert len(chat.batch([f"Hello {number}" for number in range(6)])) == 6


def test_structured_output(chat):
    schema = {
        "title": "Answer",
        "type": "object",
        "properties": {"sure": {"type": "boolean"}, "mark": {"enum": ["a", "b"]}},
        "required": ["sure", "mark"],
        "additionalProperties": False,
    }
    patient = chat.model_copy(update={"max_tokens": 1000})  # random weights like blanks
    found = patient.with_structured_output(schema, method="json_schema").invoke("Is it?")
    assert found["mark"] in ("a", "b") and isinstance(found["sure"], bool)


def test_a_forced_tool_call(chat):
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a day",
            "parameters": {
                "type": "object",
                "properties": {"day": {"enum": ["today", "tomorrow"]}, "hours": {"enum": [1, 24]}},
                "required": ["day", "hours"],
            },
        },
    }
    answer = chat.bind_tools([tool], tool_choice="weather").invoke("Weather?")
    [call] = answer.tool_calls
    assert call["name"] == "weather" and call["args"]["day"] in ("today", "tomorrow")
    assert call["args"]["hours"] in (1, 24)
