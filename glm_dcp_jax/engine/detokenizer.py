"""Token ids to text as they come: no half characters, and no part of a stop string ever shown."""

import codecs
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from glm_dcp_jax.engine.outputs import Mark
from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.engine.tokenizer import Tokenizer


class Detokenizer:
    """The text of one output. Pushing several tokens at once gives what pushing them one by one does.

    The stop string that is *completed* first ends the text (of several completed by one character, the
    longest), so the result does not depend on how the text was cut into tokens. A token that itself ends the
    output (end of sequence, stop_token_ids) is pushed only if include_stop_str_in_output wants it shown. What the
    first min_tokens tokens complete ends nothing.

    A marked token is a part of the text that stop strings are looked for in, and not of the text that is shown: in its
    place is a mark. It parts characters: bytes before it are never completed by bytes behind it.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._marked = frozenset(params.marked_token_ids or ())
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._watches = [_StopWatch(string) for string in params.stop_strings]
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pieces: list[str] = []
        """What may be shown, piece by piece. Only ever grows, so the first pieces can be read from any thread."""
        self.marks: list[Mark] = []
        """Of the marked tokens in what may be shown, in order. Only ever grows, too."""
        self._characters = 0
        """Length of what may be shown."""
        self._passed = 0
        """The same with the texts of marked tokens."""
        self._held = ""
        """The end of the text, which might still become a stop string. Texts of marked tokens are in it."""
        self._tags: deque[_Tag] = deque()
        """Marked tokens in what is held back."""
        self.token_count = 0
        """Tokens taken so far. After a stop string: up to and including the token that completed it."""
        self.stop: str | None = None
        """The stop string that ended the text."""

    @property
    def text(self) -> str:
        """What may be shown. Only ever grows; what might still become a stop string is held back."""
        return "".join(self.pieces)

    def push(self, token_ids: Sequence[int]) -> str | None:
        """Take sampled tokens, up to a stop string. Returns that stop string, None while there is none."""
        for token in token_ids:
            if self.stop is not None:
                break
            self.token_count += 1
            if token in self._marked:
                self._append_marked(token)
            elif token not in self._skipped:
                self._append(self._utf8.decode(self._tokenizer.token_to_bytes(token)))
        return self.stop

    def finish(self) -> None:
        """No more tokens will come: release what was held back."""
        if self.stop is None:
            self._append(self._utf8.decode(b"", final=True))
        if self.stop is None:
            self._show(self._held, held="")

    def _append_marked(self, token: int) -> None:
        self._append(self._utf8.decode(b"", final=True))
        if self.stop is None:
            text = self._tokenizer.token_to_bytes(token).decode(errors="replace")
            start = self._passed + len(self._held)
            self._tags.append(_Tag(start, start + len(text), token))
            self._append(text)

    def _append(self, piece: str) -> None:
        if not self._watches:
            self._show(piece)
            return
        for taken, character in enumerate(piece, start=1):
            completed = [watch.string for watch in self._watches if watch.completed_by(character)]
            if completed and self.token_count > self._min_tokens:
                self._end(piece[:taken], max(completed, key=len))
                return
        text = self._held + piece
        shown = len(text) - max(watch.matched for watch in self._watches)
        self._show(text[:shown], held=text[shown:])

    def _end(self, piece: str, stop: str) -> None:
        text = self._held + piece
        self._show(text if self._include_stop else text.removesuffix(stop))
        self.stop = stop

    def _show(self, piece: str, held: str = "") -> None:
        """Show the piece, a mark in place of each marked token in it; of one that goes on in `held`, nothing yet."""
        end = self._passed + len(piece)
        while self._tags and ((tag := self._tags[0]).start < end or tag.end == end):
            before = piece[: tag.start - self._passed]
            self._put(before)
            if tag.end > end:
                held, piece = piece[len(before) :] + held, ""
                self._passed += len(before)
                break
            self.marks.append(Mark(self._characters, tag.token))
            piece = piece[tag.end - self._passed :]
            self._passed = self._tags.popleft().end
        self._put(piece)
        self._passed += len(piece)
        self._held = held

    def _put(self, piece: str) -> None:
        if piece:
            self.pieces.append(piece)
            self._characters += len(piece)


class _Tag(NamedTuple):
    """A marked token: where its text begins and ends, in characters of the text with all of them."""

    start: int
    end: int
    token: int


class _StopWatch:
    """Follows one stop string through a text (Knuth-Morris-Pratt): constant work per character."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        """Length of the longest prefix of the string that the text ends with."""
        self._shorter = [0] * len(string)
        """For each prefix, the longest shorter prefix that it ends with."""
        length = 0
        for place in range(1, len(string)):
            length = self._shorter[place] = self._longer(length, string[place])

    def completed_by(self, character: str) -> bool:
        """Take the text's next character; True when it completes the string, which may then begin anew."""
        self.matched = self._longer(self.matched, character)
        if self.matched < len(self.string):
            return False
        self.matched = self._shorter[-1]
        return True

    def _longer(self, length: int, character: str) -> int:
        while length and self.string[length] != character:
            length = self._shorter[length - 1]
        return length + 1 if self.string[length] == character else 0
