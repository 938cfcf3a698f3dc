"""From the parts of a turn to the items of a response's `output`, and the events that tell of them."""

import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from glm_dcp_jax.engine.outputs import CompletionOutput, Logprob
from glm_dcp_jax.serve.parsing.turn import CallArguments, CallStart, Content, Part, Reasoning
from glm_dcp_jax.serve.turns import Turn, call_id, joined

Event = dict[str, Any]
Scores = Callable[[Sequence[int], Sequence[dict[int, Logprob]]], list[dict[str, Any]]]
"""From tokens and their logprobs to `logprobs` of a text."""


class _Item(ABC):
    """An item as it is written. index: its place in `output`."""

    prefix: ClassVar[str]

    def __init__(self, index: int) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self._place = {"item_id": self.id, "output_index": index}
        self._index = index
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """What it says so far."""
        return "".join(self._pieces)

    @abstractmethod
    def body(self, status: str) -> dict[str, Any]:
        """The item so far."""

    def begin(self) -> list[Event]:
        """Events of an item that has nothing yet."""
        return [self._event("output_item.added", item=self.body("in_progress"))]

    @abstractmethod
    def more(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        """Events of new text. logprobs: of the tokens that it came with."""

    def end(self, status: str) -> list[Event]:
        """Events of an item to which nothing more will come."""
        return [self._event("output_item.done", item=self.body(status))]

    def _event(self, name: str, /, **fields: Any) -> Event:
        place = {"output_index": self._index} if "item" in fields else self._place
        return {"type": f"response.{name}", **place, **fields}


class _Text(_Item):
    """An item whose content is one part with text."""

    kind: ClassVar[str]

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._begun = False
        self._logprobs: list[dict[str, Any]] = []

    @abstractmethod
    def _part(self) -> dict[str, Any]:
        """The part so far."""

    def _scores(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """Fields of an event. logprobs: of the tokens that it is about."""
        return {}

    def _content(self) -> list[dict[str, Any]]:
        return [self._part()] if self._begun else []

    def _in_part(self, name: str, /, **fields: Any) -> Event:
        return self._event(name, content_index=0, **fields)

    def begin(self) -> list[Event]:
        events = super().begin()
        self._begun = True
        return [*events, self._in_part("content_part.added", part=self._part())]

    def more(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        self._pieces.append(text)
        self._logprobs += logprobs
        return [self._in_part(f"{self.kind}.delta", delta=text, **self._scores(logprobs))]

    def end(self, status: str) -> list[Event]:
        return [
            self._in_part(f"{self.kind}.done", text=self.text, **self._scores(self._logprobs)),
            self._in_part("content_part.done", part=self._part()),
            *super().end(status),
        ]


class _ReasoningItem(_Text):
    prefix = "rs"
    kind = "reasoning_text"

    def body(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": self._content(),
            "encrypted_content": None,
            "status": status,
        }

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}


class _MessageItem(_Text):
    prefix = "msg"
    kind = "output_text"

    def __init__(self, index: int, stretch: int) -> None:
        """stretch: of the turn's content, as in Content."""
        super().__init__(index)
        self.stretch = stretch

    def body(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": self._content(),
        }

    def _part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self._logprobs),
        }

    def _scores(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": list(logprobs)}


class _CallItem(_Item):
    prefix = "fc"

    def __init__(self, index: int, name: str) -> None:
        super().__init__(index)
        self._name, self._call_id = name, call_id()

    def body(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
            "status": status,
        }

    def more(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        self._pieces.append(text)
        return [self._event("function_call_arguments.delta", delta=text)]

    def end(self, status: str) -> list[Event]:
        done = self._event("function_call_arguments.done", name=self._name, arguments=self.text)
        return [done, *super().end(status)]


class Output:
    """The items of one response, as its turn is read. items: those that have ended."""

    def __init__(self, turn: Turn, scores: Scores | None) -> None:
        """scores: None if no logprobs are wanted."""
        self._turn, self._scores = turn, scores
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._sorted = 0
        self._scored: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        self._open: _Item | None = None
        self.items: list[dict[str, Any]] = []

    @property
    def thought_tokens(self) -> int:
        """Tokens of reasoning so far, if tags are tokens."""
        return self._turn.sorter.reasoning

    @property
    def thought(self) -> str:
        """The text of reasoning that has ended."""
        return "".join(
            part["text"] for item in self.items if item["type"] == "reasoning" for part in item["content"]
        )

    def take(self, parts: Sequence[Part], new: CompletionOutput) -> list[Event]:
        """Events of what is new in the turn. parts: what was read in it."""
        self._sort(new)
        events: list[Event] = []
        for part in joined(parts):
            item = self._open
            match part:
                case CallStart():
                    events += self._begin(_CallItem(self._next, part.name))
                case CallArguments() if item:
                    events += item.more(part.text, [])
                case Reasoning():
                    if not isinstance(item, _ReasoningItem):
                        events += self._begin(item := _ReasoningItem(self._next))
                    events += item.more(part.text, [])
                case Content() if part.text:
                    if not isinstance(item, _MessageItem):
                        events += self._begin(item := _MessageItem(self._next, part.stretch))
                    events += item.more(part.text, self._scored.pop(part.stretch, []))
        return events

    def finish(self, status: str) -> list[Event]:
        """Events of the end. status: of the item that is open still, if one is."""
        if (item := self._open) is None:
            return []
        events: list[Event] = []
        if isinstance(item, _MessageItem) and (rest := self._scored.pop(item.stretch, [])):
            events += item.more("", rest)  # of tokens that say nothing
        events += item.end(status)
        self.items.append(item.body(status))
        self._open = None
        return events

    def end(self, choice: CompletionOutput | None) -> list[Event]:
        """Events of the turn's own end. choice: with its finish reason; None if it did not come to an end."""
        whole = choice is not None and self._turn.finish_reason(choice) != "length"
        if isinstance(self._open, _CallItem) and choice is not None:
            whole = not self._turn.leaves_call_open(choice)
        return self.finish("completed" if whole else "incomplete")

    @property
    def _next(self) -> int:
        """Place of the next item."""
        return len(self.items) + (self._open is not None)

    def _begin(self, item: _Item) -> list[Event]:
        events = self.finish("completed")
        self._open = item
        return events + item.begin()

    def _sort(self, new: CompletionOutput) -> None:
        self._token_ids += new.token_ids
        self._logprobs += new.logprobs or []
        for stretch in self._turn.sorter.sort(self._token_ids):
            place, self._sorted = self._sorted, self._sorted + 1
            if self._scores is not None and stretch is not None:
                self._scored[stretch] += self._scores(
                    self._token_ids[place : place + 1], self._logprobs[place : place + 1]
                )
