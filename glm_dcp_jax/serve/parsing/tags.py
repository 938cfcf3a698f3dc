"""The tags of GLM's turns, and finding them among tokens: by their ids, or in the text where they have none."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from glm_dcp_jax.engine.outputs import Mark
from glm_dcp_jax.engine.tokenizer import Tokenizer


class Tag(Enum):
    """What parts a turn; the value is how it is written."""

    THINK = "<think>"
    THINK_END = "</think>"
    CALL = "<tool_call>"
    CALL_END = "</tool_call>"
    KEY = "<arg_key>"
    KEY_END = "</arg_key>"
    VALUE = "<arg_value>"
    VALUE_END = "</arg_value>"


REASONING_TAGS = (Tag.THINK, Tag.THINK_END)
CALL_TAGS = (Tag.CALL, Tag.CALL_END, Tag.KEY, Tag.KEY_END, Tag.VALUE, Tag.VALUE_END)
Item = str | Tag
"""A piece of text, never empty, or a tag."""


@dataclass(frozen=True)
class TagTable:
    """The tags to look for. tokens: those that are one token each, by its id. texts: the others, found in the text."""

    tokens: Mapping[int, Tag]
    texts: tuple[Tag, ...] = ()

    @staticmethod
    def of(tokenizer: Tokenizer, tags: Sequence[Tag]) -> "TagTable":
        """How these tags are found in what this tokenizer's model writes."""
        ids = {tag: tokenizer.token_id(tag.value) for tag in tags}
        return TagTable(
            {id: tag for tag, id in ids.items() if id is not None},
            tuple(tag for tag, id in ids.items() if id is None),
        )


class TagScanner:
    """Text and marks, as a stream brings them, to text and tags. However it is cut, the tags are the same.

    The end of a text that may go on as a tag is held back.
    """

    def __init__(self, table: TagTable) -> None:
        self._tokens = table.tokens
        self._texts = {tag.value: tag for tag in table.texts}
        self._pattern = re.compile("|".join(map(re.escape, self._texts))) if self._texts else None
        self._starts = {text[:length] for text in self._texts for length in range(1, len(text))}
        self._longest = max(map(len, self._texts), default=0)
        self._characters = 0
        self._held = ""

    def feed(self, text: str, marks: Sequence[Mark]) -> Iterator[Item]:
        """Take what is new of a text, and the marks in it; their positions count from the text's beginning."""
        begin = end = self._characters
        for mark in marks:
            yield from self._scan(text[end - begin : mark.position - begin])
            yield from self._release()
            end = mark.position
            if mark.token_id in self._tokens:
                yield self._tokens[mark.token_id]
        yield from self._scan(text[end - begin :])
        self._characters += len(text)

    def finish(self) -> Iterator[Item]:
        """Nothing more comes."""
        return self._release()

    def _scan(self, text: str) -> Iterator[Item]:
        if self._pattern is None:
            if text:
                yield text
            return
        text, self._held = self._held + text, ""
        end = 0
        for found in self._pattern.finditer(text):
            if found.start() > end:
                yield text[end : found.start()]
            yield self._texts[found[0]]
            end = found.end()
        rest = text[end:]
        longest = min(len(rest), self._longest - 1)
        length = next((n for n in range(longest, 0, -1) if rest[-n:] in self._starts), 0)
        kept = len(rest) - length
        if kept:
            yield rest[:kept]
        self._held = rest[kept:]

    def _release(self) -> Iterator[Item]:
        held, self._held = self._held, ""
        if held:
            yield held
