"""The body of POST /v1/responses, and the chat that it asks for."""

import re
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    PrivateAttr,
    StrictInt,
    ValidationError,
    model_validator,
)

from glm_dcp_jax.serve.body import Body, refuse, refuse_for
from glm_dcp_jax.serve.conversation import Effort
from glm_dcp_jax.serve.protocol import ChatRequest, SamplingRequest
from glm_dcp_jax.serve.responses.input import InputItem, input_item, messages_of
from glm_dcp_jax.serve.unsupported import NOTHING

LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
_CHATS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
"""Fields of a chat, and what they are called here."""
_ECHOED = (
    "instructions",
    "max_tool_calls",
    "metadata",
    "tools",
    "text",
    "user",
    "safety_identifier",
    "prompt_cache_key",
)
"""Fields that come back as they are."""
_FUNCTION = re.compile(r"^(tools\.\d+)\.function\b")


class ResponseChat(ChatRequest):
    """The chat that a request for a response asks for."""

    def called(self, field: str) -> str:
        """The request's own name of a field."""
        return called(field)


def called(field: str) -> str:
    """The name here of a chat's field, which may be one within another: `tools.0.name`."""
    name, dot, rest = field.partition(".")
    if name == "messages":
        return "input"
    return _FUNCTION.sub(r"\1", _CHATS.get(name, name) + dot + rest)


def _items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    return value


def _tool(value: Any) -> dict[str, Any]:
    """A tool, as it came."""
    if not isinstance(value, dict) or value.get("type") != "function":
        raise refuse("type", 'must be "function"; other kinds of tools are not supported')
    if "function" in value:
        raise refuse("function", "has no place here: name and parameters stand beside type")
    _require_strictness(value)
    return value


def _tool_choice(value: Any) -> str | dict[str, Any]:
    if value in ("auto", "none", "required"):
        return str(value)
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("name"), str):
        return {"type": "function", "name": value["name"]}
    raise ValueError('must be none, auto, required or {"type": "function", "name": ...}')


def _format(value: Any) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("text", "json_object", "json_schema"):
        raise ValueError("must be an object whose type is text, json_object or json_schema")
    if kind == "json_schema" and not isinstance(value.get("schema"), dict):
        raise refuse("schema", "must be a JSON schema, an object")
    if kind == "json_schema" and not isinstance(value.get("name"), str):
        raise refuse("name", "must be a string")
    _require_strictness(value)
    return value


def _require_strictness(value: dict[str, Any]) -> None:
    """Schemas are always kept to, but what is said about it comes back."""
    if not isinstance(value.get("strict"), bool | None):
        raise refuse("strict", "must be true or false")


class Text(Body):
    """What the text must look like."""

    format: Annotated[dict[str, Any], PlainValidator(_format, json_schema_input_type=dict[str, Any])] = Field(
        default_factory=lambda: {"type": "text"}
    )
    verbosity: Literal["medium"] = "medium"


class Reasoning(Body):
    """How hard to think. No summaries are made: `auto` gets none."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    mode: Literal["standard"] = "standard"
    context: Literal["auto"] = "auto"


class ResponsesRequest(SamplingRequest):
    """POST /v1/responses. input: a user's text, or items. instructions: a system message before them.

    include: `message.output_text.logprobs` gives logprobs, with top_logprobs alternatives per token. The fields that a
    chat has too mean the same. max_tool_calls, which counts calls of built-in tools, prompt_cache_key,
    safety_identifier, metadata and user come back as they are.
    """

    input: Annotated[
        list[Annotated[InputItem, PlainValidator(input_item, json_schema_input_type=InputItem)]],
        BeforeValidator(_items, json_schema_input_type=str | list[InputItem]),
        Field(min_length=1),
    ]
    instructions: str | None = None
    max_output_tokens: StrictInt | None = None
    max_tool_calls: StrictInt | None = None
    metadata: dict[str, str] = Field({}, max_length=16)
    include: list[Includable] = []
    top_logprobs: StrictInt = 0
    tools: list[Annotated[dict[str, Any], PlainValidator(_tool, json_schema_input_type=dict[str, Any])]] = []
    tool_choice: Annotated[
        str | dict[str, Any],
        PlainValidator(
            _tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | dict[str, Any]
        ),
    ] = "auto"
    parallel_tool_calls: bool = True
    text: Text = Field(default_factory=Text)
    reasoning: Reasoning = Field(default_factory=Reasoning)
    truncation: Literal["disabled"] = "disabled"
    service_tier: Literal["auto", "default"] = "auto"
    store: bool = False
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True
    kv_transfer_params: dict[str, Any] | None = None
    unsupported = {
        "add_generation_prompt": (None, True),
        "add_special_tokens": (None, False),
        "background": NOTHING,
        "thinking": NOTHING,
        "context_management": NOTHING,
        "conversation": NOTHING,
        "moderation": NOTHING,
        "n": (None, 1),
        "previous_response_id": NOTHING,
        "prompt": NOTHING,
        "prompt_cache_retention": (None, "in_memory"),
        "prompt_logprobs": (None,),
        "return_token_ids": NOTHING,
        "stream_options": (*NOTHING, {"include_obfuscation": False}, {"include_usage": True}),
    }
    _chat: ResponseChat = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _no_fields_of_chats(cls, fields: Any) -> Any:
        if isinstance(fields, dict):
            for name, here in _CHATS.items():
                if fields.get(name) not in NOTHING:
                    raise refuse(name, f"is a field of chats; here it is {here}")
        return fields

    @model_validator(mode="after")
    def _logprobs_are_included(self) -> "ResponsesRequest":
        if self.top_logprobs and not self.wants_logprobs:
            raise refuse("top_logprobs", f"needs {LOGPROBS} in include")
        return self

    @model_validator(mode="after")
    def _one_form(self) -> "ResponsesRequest":
        if self.structured_outputs and self.text.format["type"] != "text":
            raise refuse("structured_outputs", "cannot be given with text.format")
        return self

    @model_validator(mode="after")
    def _can_come_back(self) -> "ResponsesRequest":
        for name in _ECHOED:
            value = getattr(self, name)
            try:
                orjson.dumps(value.format if isinstance(value, Text) else value)
            except orjson.JSONEncodeError as error:
                raise refuse(name, f"cannot be repeated in the answer: {error}") from None
        return self

    @model_validator(mode="after")
    def _can_be_a_chat(self) -> "ResponsesRequest":
        given = self.model_fields_set
        alike = (given & SamplingRequest.model_fields.keys()) - {"stream"}
        try:
            self._chat = ResponseChat.model_validate(
                {name: getattr(self, name) for name in alike}
                | {
                    "messages": self._messages(),
                    "tools": [_of_chat(tool) for tool in self.tools],
                    "tool_choice": self.tool_choice
                    if isinstance(self.tool_choice, str)
                    else _of_chat(self.tool_choice),
                    "parallel_tool_calls": self.parallel_tool_calls,
                    "max_completion_tokens": self.max_output_tokens,
                    "logprobs": self.wants_logprobs,
                    "top_logprobs": self.top_logprobs,
                    "response_format": _format_of_chat(self.text.format),
                    "reasoning_effort": self.reasoning.effort,
                    "chat_template_kwargs": self.chat_template_kwargs,
                    "include_reasoning": self.include_reasoning,
                    "kv_transfer_params": self.kv_transfer_params,
                }
            )
        except ValidationError as error:
            raise refuse_for(error, called) from None
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether a message's text comes with the logprobs of its tokens."""
        return LOGPROBS in self.include

    @property
    def chat(self) -> ResponseChat:
        """The chat that this asks for."""
        return self._chat

    def _messages(self) -> list[dict[str, Any]]:
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return first + messages_of(self.input)


def _of_chat(function: dict[str, Any]) -> dict[str, Any]:
    """A tool, or the choice of one, as chats have it."""
    inner = {name: value for name, value in function.items() if name != "type" and value is not None}
    return {"type": "function", "function": inner}


def _format_of_chat(wanted: dict[str, Any]) -> dict[str, Any]:
    if wanted["type"] != "json_schema":
        return {"type": wanted["type"]}
    return {"type": "json_schema", "json_schema": {"schema": wanted["schema"]}}
