"""One turn of a model, taken apart as it comes: what it thinks, what it says, which tools it calls."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from glm_dcp_jax.engine.outputs import Mark
from glm_dcp_jax.serve.parsing.arguments import ArgumentsWriter
from glm_dcp_jax.serve.parsing.parameters import Parameters
from glm_dcp_jax.serve.parsing.tags import Item, Tag, TagScanner, TagTable

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""What a tool may be called."""
_NAME_CHARACTERS = re.compile(r"[A-Za-z0-9_.-]{0,128}")
_NAME_WITH_BLANKS = 256


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of what it says. stretch: as in Stretch."""

    text: str
    stretch: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class CallStart:
    """It calls a tool. index: how many calls there were before."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Reasoning | Content | CallStart | CallArguments


@dataclass(frozen=True, slots=True)
class Stretch:
    """What tokens between two tags belong to. number: of the stretch of reasoning or content, in the turn.

    kind: None within `<tool_call>` as long as what follows may still be no name.
    """

    kind: type[Reasoning] | type[Content] | type[CallStart] | None
    number: int


class _Within(Enum):
    """What the parser is in: speech, which is reasoning or content, or some part of a call."""

    SPEECH = auto()
    NAME = auto()
    KEY = auto()
    GAP = auto()
    """Between a name, key or value and the next."""
    VALUE = auto()


class TurnParser:
    """Parts of one turn, from its text and marks. They are the same, joined, however the turn was cut into pieces.

    `<think>` begins reasoning where nothing has been said yet, in the turn or behind a call. `</think>` ends it, and so
    does `<tool_call>`; what follows that is text after all if it is no name. Tags are text where they mean nothing,
    except ends of nothing before anything was said. Blanks alone, beside calls and as reasoning, are nothing.

    A call without its end gets one where the next call begins or the turn ends, a value where the call ends. What is in
    a call beside its name, keys and values is left out.
    """

    def __init__(
        self,
        table: TagTable,
        in_reasoning: bool,
        tools: Mapping[str, Parameters],
        one_call: bool = False,
        bound: bool = False,
    ) -> None:
        """in_reasoning: whether the prompt ends there. tools: by name. one_call: nothing is of interest after one.

        bound: whether only `</think>` ends reasoning, as where what follows it must have a form.
        """
        self._scanner = TagScanner(table)
        self._texts = table.texts
        self._tools = tools
        self._one_call, self._bound = one_call, bound
        self._thinks = in_reasoning
        self._within = _Within.SPEECH
        self._blanks: list[str] | None = []
        """Blanks that a stretch of speech began with; None once something else was said in it."""
        self._name = self._key = ""
        self._arguments: ArgumentsWriter | None = None
        self._parts: list[Part] = []
        self._stretch = 0
        self.stretches = [self._here]
        """What comes at the turn's beginning, and behind each tag so far that is a token."""
        self.calls = 0
        """Calls so far."""
        self.cut = False
        """Whether the turn ended within a key or a value of a call, or between them."""
        self.within_call = False
        """Whether the turn ended before the end of a call."""
        self.done = False
        """Whether nothing that may still come is of interest."""

    def feed(self, text: str, marks: Sequence[Mark]) -> list[Part]:
        """Take what is new of the turn's text, and the marks in it; the parts that this makes."""
        return self._take(self._scanner.feed(text, marks))

    def finish(self) -> list[Part]:
        """The turn has ended; its last parts."""
        parts = self._take(self._scanner.finish())
        if not self.done:
            self.cut = self._within in (_Within.KEY, _Within.VALUE) or bool(self._key)
            if self._within is _Within.NAME and self._name.strip() not in self._tools:
                self._take_back_call()
            elif self._within is not _Within.SPEECH:
                self.within_call = True
                self._end_call()
            elif self._blanks and not self._thinks and not self.calls:
                self._say("".join(self._blanks))
            self.done = True
        return parts + self._drain()

    def _take(self, items: Iterator[Item]) -> list[Part]:
        for item in items:
            if self.done:
                continue  # the scanner must see all of it
            if isinstance(item, Tag):
                self._take_tag(item)
                if item not in self._texts:
                    self.stretches.append(self._here)
            else:
                self._take_text(item)
        return self._drain()

    def _drain(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    @property
    def _here(self) -> Stretch:
        match self._within:
            case _Within.SPEECH:
                return Stretch(Reasoning if self._thinks else Content, self._stretch)
            case _Within.NAME:
                return Stretch(None, self._stretch)
            case _:
                return Stretch(CallStart, self._stretch)

    def _settle(self) -> None:
        """What began with `<tool_call>` is known now."""
        place = len(self.stretches)
        while place and self.stretches[place - 1].kind is None:
            place -= 1
            self.stretches[place] = self._here

    def _take_text(self, text: str) -> None:
        match self._within:
            case _Within.SPEECH:
                self._speak(text)
            case _Within.NAME:
                self._name += text
                if len(self._name) > _NAME_WITH_BLANKS or not _NAME_CHARACTERS.fullmatch(self._name.strip()):
                    self._take_back_call()
            case _Within.KEY:
                self._key += text
            case _Within.VALUE:
                self._write(self._writer.text(text))

    def _take_tag(self, tag: Tag) -> None:
        match self._within:
            case _Within.SPEECH:
                self._tag_in_speech(tag)
            case _Within.NAME:
                self._tag_in_name(tag)
            case _Within.VALUE if tag is Tag.VALUE_END:
                self._write(self._writer.end())
                self._within = _Within.GAP
            case _Within.VALUE if tag is not Tag.CALL_END:
                self._write(self._writer.text(tag.value))
            case _:
                self._tag_in_call(tag)

    def _tag_in_speech(self, tag: Tag) -> None:
        silent = self._blanks is not None
        if tag is Tag.CALL and not (self._thinks and self._bound):
            self._within, self._name = _Within.NAME, ""
        elif tag is Tag.THINK_END and self._thinks:
            self._listen(thinks=False)
        elif tag is Tag.THINK and silent:
            self._listen(thinks=True)
        elif not (silent and tag in (Tag.THINK_END, Tag.CALL_END)):
            self._speak(tag.value)

    def _tag_in_name(self, tag: Tag) -> None:
        named = bool(self._name.strip())
        if tag in (Tag.KEY, Tag.CALL_END, Tag.CALL) and named:
            self._begin_call()
            self._tag_in_call(tag)
        elif tag is not Tag.CALL:  # twice is as good as once
            self._take_back_call()
            self._take_tag(tag)

    def _tag_in_call(self, tag: Tag) -> None:
        """Behind its name."""
        if tag is Tag.KEY:
            self._within, self._key = _Within.KEY, ""
        elif tag is Tag.KEY_END:
            self._within = _Within.GAP
        elif tag is Tag.VALUE and self._key.strip():
            self._writer.begin(self._key)
            self._within, self._key = _Within.VALUE, ""
        elif tag in (Tag.CALL, Tag.CALL_END):
            self._end_call()
            if tag is Tag.CALL and not self.done:
                self._within, self._name = _Within.NAME, ""

    def _speak(self, text: str) -> None:
        if self._blanks is not None:
            self._blanks.append(text)
            if text.isspace():
                return
            text, self._blanks = "".join(self._blanks), None
        self._say(text)

    def _say(self, text: str) -> None:
        self._parts.append(Reasoning(text) if self._thinks else Content(text, self._stretch))

    def _listen(self, thinks: bool) -> None:
        """Speech may begin."""
        self._within, self._thinks, self._blanks = _Within.SPEECH, thinks, []
        self._key = ""
        self._stretch += 1

    def _take_back_call(self) -> None:
        """What followed `<tool_call>` is no name: all that is text, of what it stands in."""
        self._within = _Within.SPEECH
        self._settle()
        self._speak(Tag.CALL.value + self._name)

    @property
    def _writer(self) -> ArgumentsWriter:
        assert self._arguments is not None
        return self._arguments

    def _write(self, text: str) -> None:
        if text:
            self._parts.append(CallArguments(self.calls - 1, text))

    def _begin_call(self) -> None:
        name = self._name.strip()
        self._within, self._key = _Within.GAP, ""
        self._settle()
        self._arguments = ArgumentsWriter(self._tools.get(name) or Parameters(None))
        self._parts.append(CallStart(self.calls, name))
        self.calls += 1

    def _end_call(self) -> None:
        if self._within is _Within.NAME:
            self._begin_call()
        self._write(self._writer.close())
        self._listen(thinks=False)
        self.done = self._one_call
