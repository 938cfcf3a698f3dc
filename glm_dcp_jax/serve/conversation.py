"""Messages and tools of a request, and what the chat template gets of them."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator

from glm_dcp_jax.config.json_file import parse_json
from glm_dcp_jax.serve.body import Body, Request, refuse
from glm_dcp_jax.serve.parsing.turn import NAME

MOST_TOOLS = 128
MOST_TOOL_BYTES = 256 * 1024
"""Of all tools together, as JSON."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def text_of(value: Any, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a message: a string, or a list of text parts, which are joined by newlines (as in vLLM).

    kinds: the types that a part may have. Raises ValueError for anything but text.
    """
    parts = [{"type": kinds[0], "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise ValueError("must be a string or a list of text parts")
    texts = []
    for part in parts:
        if (
            not isinstance(part, dict)
            or part.get("type") not in kinds
            or not isinstance(part.get("text"), str)
        ):
            allowed = " or ".join(f'{{"type": "{kind}", "text": "..."}}' for kind in kinds)
            raise ValueError(f"only text is supported, as a string or as parts {allowed}")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool(value: Any) -> dict[str, Any]:
    """A tool, as it came: templates show it to the model to the letter."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or value.get("type") != "function":
        raise refuse("type", 'must be "function"; other kinds of tools are not supported')
    if not isinstance(function, dict):
        raise refuse("function", "must be an object with name, description and parameters")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise refuse("function.name", "must be 1 to 128 letters, digits, underscores, dashes and dots")
    if not isinstance(function.get("description", ""), str | None):
        raise refuse("function.description", "must be a string")
    if parameters is not None:
        _require_object_schema(parameters)
    return value


def _require_object_schema(parameters: Any) -> None:
    param = "function.parameters"
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise refuse(param, 'must be the JSON schema of an object: {"type": "object", "properties": {...}}')
    properties = parameters.get("properties", {})
    if not isinstance(properties, dict) or not all(
        isinstance(schema, dict | bool) for schema in properties.values()
    ):
        raise refuse(f"{param}.properties", "must be an object that maps names to JSON schemas")


def _arguments(value: Any) -> dict[str, Any] | str:
    """A past call's arguments: the object that they are, or say; text that says none stays text."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise ValueError("must be a string with a JSON object, or an object")
    try:
        said = parse_json(value) if value.strip() else {}
    except ValueError:
        return value
    return said if isinstance(said, dict) else value


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: "ToolName"


class ToolName(Body):
    """Which tool."""

    name: str


def _tool_choice(value: Any) -> "str | NamedTool":
    """Whether tools may be called, or must be."""
    if isinstance(value, NamedTool) or (isinstance(value, str) and value in ("auto", "none", "required")):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return NamedTool.model_validate(value)
    raise ValueError('must be none, auto, required or {"type": "function", "function": {"name": ...}}')


class CalledFunction(Body):
    """Which tool was called, and how."""

    name: str
    arguments: Annotated[
        dict[str, Any] | str,
        PlainValidator(_arguments, json_schema_input_type=str | dict[str, Any]),
    ] = Field(default_factory=dict)


class ToolCall(Body):
    """A call that an assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One turn of a conversation.

    reasoning, reasoning_content: two names for what an assistant thought, for templates that show it. tool_calls: of an
    assistant. tool_call_id: which of them a message of role `tool` answers.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None, PlainValidator(text_of, json_schema_input_type=str | list[dict[str, Any]])
    ] = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _fields_of_its_role(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise refuse("tool_calls", f"are made by assistants, not by {self.role}")
        if self.tool_call_id is not None and self.role != "tool":
            raise refuse("tool_call_id", f"is for messages of role tool, not {self.role}")
        both = (self.reasoning, self.reasoning_content)
        if None not in both and both[0] != both[1]:
            raise refuse("reasoning", "differs from reasoning_content, its other name; give one")
        says_something = self.tool_calls or self.reasoning_content or self.reasoning
        if self.content is None and not (self.role == "assistant" and says_something):
            raise refuse("content", "is required, but for assistants with tool_calls or reasoning")
        return self

    def for_template(self) -> dict[str, Any]:
        """What the chat template sees. `developer` is OpenAI's newer name for `system`; templates know only that."""
        fields = self.model_dump(exclude_none=True, exclude={"tool_calls"} if not self.tool_calls else None)
        fields["content"] = self.content or ""
        thought = self.reasoning_content or self.reasoning
        if thought is not None:
            fields |= {"reasoning": thought, "reasoning_content": thought}
        return {**fields, "role": "system"} if self.role == "developer" else fields


class Thinking(Body):
    """Whether to reason, as GLM's own API has it."""

    type: Literal["enabled", "disabled"]


class Conversation(Request):
    """Messages and tools, and how the chat template makes a prompt of them."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Annotated[dict[str, Any], PlainValidator(_tool, json_schema_input_type=dict[str, Any])]] = (
        Field([], max_length=MOST_TOOLS)
    )
    tool_choice: Annotated[
        str | NamedTool,
        PlainValidator(_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool),
    ] = "auto"
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None

    @model_validator(mode="after")
    def _reserved_names(self) -> "Conversation":
        reserved = {"messages", "chat_template", "add_generation_prompt", "tools", "documents", "self"}
        for name in sorted(reserved & set(self.chat_template_kwargs or {})):
            raise refuse("chat_template_kwargs", f"must not hold {name}")
        return self

    @model_validator(mode="after")
    def _tools_together(self) -> "Conversation":
        names = [tool["function"]["name"] for tool in self.tools]
        twice = next((place for place, name in enumerate(names) if name in names[:place]), None)
        if twice is not None:
            raise refuse(f"tools.{twice}.function.name", f"{names[twice]} is there twice")
        if self.tools and (size := len(json.dumps(self.tools))) > MOST_TOOL_BYTES:
            raise refuse("tools", f"must be at most {MOST_TOOL_BYTES} bytes of JSON, but are {size}")
        return self

    @model_validator(mode="after")
    def _choice_among_tools(self) -> "Conversation":
        if self.tool_choice in ("auto", "none"):
            return self
        if not self.tools:
            raise refuse("tool_choice", "forces a call, but there are no tools")
        if not self.forced_tools:
            raise refuse("tool_choice", "names a function that is not among tools")
        return self

    @property
    def messages_for_template(self) -> list[dict[str, Any]]:
        """What the chat template sees. Results of several calls come in the calls' order: templates show no ids."""
        ordered: list[Message] = []
        places: dict[str | None, int] = {}
        for of_tools, together in groupby(self.messages, lambda message: message.role == "tool"):
            group = list(together)
            if of_tools and all(message.tool_call_id in places for message in group):
                group.sort(key=lambda message: places[message.tool_call_id])
            ordered += group
            calls = group[-1].tool_calls
            places = {call.id: place for place, call in enumerate(calls) if call.id is not None}
        return [message.for_template() for message in ordered]

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The tools of which one must be called; none if none must be."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [tool for tool in self.tools if tool["function"]["name"] == choice.function.name]
        return self.tools if choice == "required" else []
