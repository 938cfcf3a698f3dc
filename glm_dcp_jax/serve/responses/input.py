"""Items of a request's `input`, and the messages that they are."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, ValidationError

from glm_dcp_jax.serve.body import Body, refuse, refuse_for
from glm_dcp_jax.serve.conversation import text_of
from glm_dcp_jax.serve.unsupported import NOTHING

Parts = str | list[dict[str, Any]]
_Text = Annotated[
    str, PlainValidator(partial(text_of, kinds=("input_text", "output_text")), json_schema_input_type=Parts)
]


class MessageItem(Body):
    """What somebody says."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Text
    unsupported = {"name": NOTHING, "reasoning": NOTHING, "reasoning_content": NOTHING}


class FunctionCallItem(Body):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(Body):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: _Text


class ReasoningItem(Body):
    """What the model thought. Without its content, the summary stands for it."""

    type: Literal["reasoning"]
    content: Annotated[
        str, PlainValidator(partial(text_of, kinds=("reasoning_text",)), json_schema_input_type=Parts)
    ] = ""
    summary: Annotated[
        str, PlainValidator(partial(text_of, kinds=("summary_text",)), json_schema_input_type=Parts)
    ] = ""
    unsupported = {"encrypted_content": (None, "")}


InputItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
_ITEMS: dict[str, type[InputItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}


def input_item(value: Any) -> InputItem:
    """An item. Raises PydanticCustomError, which names its field."""
    if not isinstance(value, dict):
        raise ValueError(f"must be an object whose type is {', '.join(_ITEMS)}")
    kind = value.get("type") or "message"
    if kind == "item_reference":
        raise refuse("type", "item_reference means nothing here: items are not kept; send the item itself")
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise refuse("type", f"must be {', '.join(_ITEMS)}; other items are not supported")
    try:
        return _ITEMS[kind].model_validate(value)
    except ValidationError as error:
        raise refuse_for(error) from None


def messages_of(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Messages as a chat has them. The items of one turn of the model make one message."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    spoken = (
        False  # whether the turn's last item says something, so that speech or reasoning begin another turn
    )
    for item in items:
        match item:
            case FunctionCallOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
            case MessageItem(role="user" | "system" | "developer"):
                messages.append({"role": item.role, "content": item.content})
            case ReasoningItem(content="", summary=""):
                continue
            case _:
                if turn is None or (spoken and not isinstance(item, FunctionCallItem)):
                    turn = {"role": "assistant"}
                    messages.append(turn)
                _join(turn, item)
                spoken = isinstance(item, MessageItem)
                continue
        turn = None
    return messages


def _join(turn: dict[str, Any], item: InputItem) -> None:
    match item:
        case MessageItem():
            turn["content"] = turn.get("content", "") + item.content
        case ReasoningItem():
            turn["reasoning"] = turn.get("reasoning", "") + (item.content or item.summary)
        case FunctionCallItem():
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            turn.setdefault("tool_calls", []).append(call)
