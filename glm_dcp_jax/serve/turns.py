"""The turns of one chat request: what the outputs say, in the fields of OpenAI's messages."""

import uuid
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from glm_dcp_jax.engine.outputs import CompletionOutput, RequestOutput
from glm_dcp_jax.engine.structured_outputs import StructuredOutputs
from glm_dcp_jax.engine.tokenizer import Tokenizer
from glm_dcp_jax.serve.conversation import NamedTool
from glm_dcp_jax.serve.deltas import Cursor
from glm_dcp_jax.serve.errors import ApiError
from glm_dcp_jax.serve.parsing.forced_calls import forced_calls, json_answer
from glm_dcp_jax.serve.parsing.parameters import Parameters
from glm_dcp_jax.serve.parsing.parsers import Parsers, begins_in_reasoning
from glm_dcp_jax.serve.parsing.stretches import TokenSorter
from glm_dcp_jax.serve.parsing.tags import CALL_TAGS, REASONING_TAGS, Tag, TagTable
from glm_dcp_jax.serve.parsing.turn import (
    CallArguments,
    CallStart,
    Content,
    Part,
    Reasoning,
    Stretch,
    TurnParser,
)
from glm_dcp_jax.serve.protocol import ChatRequest

NOTHING: dict[str, Any] = {"content": ""}
"""`delta` of a chunk that has nothing but an end or tokens."""
_PLAIN = (Stretch(Content, 0),)
"""All that a turn without a parser has."""


class Reading:
    """How one request's outputs are read. Raises ApiError 400 for tools whose calls nothing would find."""

    def __init__(self, parsers: Parsers, tokenizer: Tokenizer, body: ChatRequest) -> None:
        tools = body.offered_tools
        if tools and not parsers.tool_calls:
            raise ApiError(
                "this server finds no tool calls in what the model writes; start it with --tool-call-parser "
                "glm47, or set tool_choice to none",
                param="tools",
            )
        self._tokenizer = tokenizer
        self._functions = {
            tool["function"]["name"]: Parameters(tool["function"].get("parameters")) for tool in tools
        }
        self._body = body
        self._one_call = not body.parallel_tool_calls
        self.has_reasoning = parsers.reasoning
        self.shows_reasoning = body.include_reasoning
        tags = (*(REASONING_TAGS if parsers.reasoning else ()), *(CALL_TAGS if tools else ()))
        self._table = TagTable.of(tokenizer, tags) if tags else None

    @property
    def names_the_tool(self) -> bool:
        """Whether the request says which tool is to be called."""
        return isinstance(self._body.tool_choice, NamedTool)

    @property
    def marked_token_ids(self) -> tuple[int, ...]:
        """For SamplingParams."""
        return tuple(self._table.tokens) if self._table else ()

    @property
    def structured_by(self) -> str:
        """The field of the request that says what the output must look like; empty if none does."""
        return "tool_choice" if self._body.forced_tools else self._body.structured_by

    def structured(self, prompt: Sequence[int]) -> StructuredOutputs | None:
        """What the turns that go on from a prompt must look like behind their reasoning.

        Raises ApiError 400 for what cannot be had together.
        """
        body = self._body
        wanted = body.structured
        if body.forced_tools and wanted is not None:
            raise ApiError(
                f"cannot be given with a tool_choice that forces a call: {body.structured_by}",
                param=body.structured_by,
            )
        try:
            if body.forced_tools:
                wanted = self._calls(body.forced_tools)
            elif wanted is not None and body.offered_tools:
                wanted = self._calls(body.offered_tools, json_answer(wanted))
        except ValueError as error:
            raise ApiError(str(error), param=self.structured_by) from None
        if wanted is None or not self._thinks(prompt):
            return wanted
        end = self._tokenizer.token_id(Tag.THINK_END.value)
        if end is None:
            raise ApiError(
                "what an output must look like behind its reasoning needs a tokenizer in which </think> is a token; "
                "turn thinking off",
                param=self.structured_by,
            )
        return replace(wanted, after_token=end)

    @property
    def tags_are_tokens(self) -> bool:
        """Whether it can be said of each token what it belongs to."""
        return self._table is None or not self._table.texts

    def _calls(self, tools: Sequence[dict[str, Any]], answer: str = "") -> StructuredOutputs:
        assert self._table is not None, "tools are parsed"
        several = not self._one_call and not isinstance(self._body.tool_choice, NamedTool)
        return StructuredOutputs(grammar=forced_calls(tools, self._table, several, answer))

    def _thinks(self, prompt: Sequence[int]) -> bool:
        """Whether the turns begin in reasoning."""
        if self._table is None or not self.has_reasoning:
            return False
        return begins_in_reasoning(self._tokenizer, self._table, prompt)

    def turns(self, prompt: Sequence[int], count: int) -> "Turns":
        """The `count` turns that go on from a prompt."""
        if self._table is None:
            return Turns([Turn(None, self, TokenSorter({}, _PLAIN)) for _ in range(count)])
        thinks = self._thinks(prompt)
        bound = bool(self.structured_by)
        parsers = [
            TurnParser(self._table, thinks, self._functions, self._one_call, bound) for _ in range(count)
        ]
        return Turns(
            [Turn(parser, self, TokenSorter(self._table.tokens, parser.stretches)) for parser in parsers]
        )


class Turn:
    """One output of a request. Without a parser, all that it says is content. sorter: of its tokens."""

    def __init__(self, parser: TurnParser | None, reading: Reading, sorter: TokenSorter) -> None:
        self._parser, self._reading, self.sorter = parser, reading, sorter
        self._thought = False
        self.done = False
        """Whether what was read is all that is wanted, whatever still comes."""

    def read(self, new: CompletionOutput) -> list[Part]:
        """What is new in the output, as far as it is to be shown."""
        if self.done:
            return []
        if self._parser is None:
            return [Content(new.text)]
        parts = self._parser.feed(new.text, new.marks)
        self.done = self._parser.done
        if new.finished:
            parts += self._parser.finish()
        self._thought |= any(isinstance(part, Reasoning) for part in parts)
        if self._reading.shows_reasoning:
            return parts
        return [part for part in parts if not isinstance(part, Reasoning)]

    def leaves_call_open(self, choice: CompletionOutput) -> bool:
        """Whether it ended before its last call was whole. One that only lacks its end is, if nothing cut it off."""
        if self._parser is None:
            return False
        return self._parser.cut or (self._parser.within_call and choice.finish_reason != "stop")

    def message(self, parts: Sequence[Part]) -> dict[str, Any]:
        """`message` of all parts that were read."""
        said = "".join(part.text for part in parts if isinstance(part, Content))
        thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, CallStart):
                calls.append(_call_head(part))
            elif isinstance(part, CallArguments):
                calls[part.index]["function"]["arguments"] += part.text
        message: dict[str, Any] = {
            "role": "assistant",
            "content": said or (None if calls or self._thought else ""),
        }
        if self._reading.has_reasoning:
            message |= {"reasoning": thought or None, "reasoning_content": thought or None}
        return {**message, "tool_calls": calls} if calls else message

    def finish_reason(self, choice: CompletionOutput) -> str | None:
        """Why it ended: for calls if it made some of its own accord, and came to its end by itself.

        As OpenAI has it, a call by a name that the request gives is no reason.
        """
        parser = self._parser
        if not (self.done or choice.finish_reason == "stop"):
            return choice.finish_reason
        called = parser is not None and parser.calls and not parser.cut and not self._reading.names_the_tool
        return "tool_calls" if called else "stop"


class Turns(list[Turn]):
    """All of a request's turns, by their index."""

    def __init__(self, turns: list[Turn]) -> None:
        super().__init__(turns)
        self._cursors = [Cursor() for _ in turns]
        self._parts: list[list[Part]] = [[] for _ in turns]

    @property
    def done(self) -> bool:
        """Whether nothing that still comes is wanted."""
        return all(turn.done for turn in self)

    def see(self, output: RequestOutput) -> bool:
        """Read and keep what is new in an output; whether that is enough."""
        for choice in output.outputs:
            cursor = self._cursors[choice.index]
            if not cursor.finished:
                self._parts[choice.index] += self[choice.index].read(cursor.advance(choice))
        return self.done

    def message(self, index: int) -> dict[str, Any]:
        """`message` of a turn, of what was kept."""
        return self[index].message(self._parts[index])

    def parts(self, index: int) -> list[Part]:
        """Of a turn, what was kept."""
        return self._parts[index]


def joined(parts: Sequence[Part]) -> list[Part]:
    """The same, with the texts of neighbours of one kind in one part."""
    return [_joined(list(alike)) for _, alike in groupby(parts, _kind)]


def _joined(parts: list[Part]) -> Part:
    first = parts[0]
    if isinstance(first, CallStart):
        return first
    return replace(first, text="".join(part.text for part in parts if not isinstance(part, CallStart)))


def delta_bodies(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """`delta`s of parts, each with one kind of them."""
    return [_delta(part) for part in joined(parts)]


def _kind(part: Part) -> tuple[type[Part], int]:
    return type(part), part.index if isinstance(part, CallStart | CallArguments) else 0


def _delta(part: Part) -> dict[str, Any]:
    match part:
        case CallStart():
            return {"tool_calls": [{"index": part.index, **_call_head(part)}]}
        case CallArguments():
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
        case Reasoning():
            return {"reasoning": part.text, "reasoning_content": part.text}
        case Content():
            return {"content": part.text}


def call_id() -> str:
    """For a call that begins."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _call_head(start: CallStart) -> dict[str, Any]:
    return {
        "id": call_id(),
        "type": "function",
        "function": {"name": start.name, "arguments": ""},
    }
