"""A conversation in the terminal, or one answer on standard output."""

import contextlib
import os
import re
import sys
from collections.abc import Iterable

from glm_dcp_jax.chat.client import Piece, ServerError
from glm_dcp_jax.chat.conversation import Conversation

PROMPT = "> "
HELP = "/reset forgets the conversation, /system TEXT sets its system message, /quit ends, Ctrl-C stops an answer"
_ALONE = ("/reset", "/quit", "/help")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a model must not send to a terminal, which would obey."""


def _dimmed(text: str) -> str:
    """As it is for terminals that know no colours, and users who want none (https://no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in (None, "", "dumb")
    return text if plain else f"{_DIM}{text}{_PLAIN}"


class Terminal:
    """Reads what the user says, and shows what the model does; its reasoning dimmed, and only in a terminal."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._is_terminal = sys.stdout.isatty()

    def run(self, greeting: str) -> None:
        """Until the user ends it."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() has a history with it)
        self._note(f"{greeting}\n{HELP}")
        while True:
            try:
                line = self._line()
            except KeyboardInterrupt:
                self._note("\n(/quit or Ctrl-D ends)")
                continue
            except UnicodeDecodeError:
                self._note("(that was not UTF-8)")
                continue
            except EOFError:
                print()
                return
            if line == "/quit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _line(self) -> str:
        """What the user says. Raises UnicodeDecodeError, also where Python lets wrong bytes pass."""
        if not self._is_terminal:
            print(PROMPT, end="", file=sys.stderr, flush=True)
        line = input(PROMPT if self._is_terminal else "").strip()
        return line.encode(errors="surrogateescape").decode()

    def answer_once(self, text: str) -> None:
        """Print the answer to a message. Raises ServerError."""
        self._show(self._conversation.say(text.strip()))

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if rest and name in _ALONE:
            self._note(f"{name} stands alone; {HELP}")
        elif name == "/reset":
            self._conversation.reset()
            self._note("(forgotten)")
        elif name == "/system" and rest.strip():
            self._conversation.system = rest.strip()
            self._note("(from the next message on)")
        elif name == "/system":
            self._note(self._conversation.system or "(there is no system message)")
        else:
            self._note(HELP if name == "/help" else f"there is no {name}; {HELP}")

    def _answer(self, text: str) -> None:
        answer = self._conversation.say(text)
        try:
            self._show(answer)
        except KeyboardInterrupt:
            answer.close()
            self._note("\n(stopped)")
        except ServerError as error:
            self._note(f"\nerror: {error}")

    def _show(self, answer: Iterable[Piece]) -> None:
        reasons, left_out, said, ended = False, False, False, None
        for piece in answer:
            ended = piece.finish_reason or ended
            left_out |= bool(piece.reasoning) and not self._is_terminal
            said |= bool(piece.text)
            if piece.reasoning and self._is_terminal:
                self._write(_dimmed(self._safe(piece.reasoning)))
                reasons = True
            if piece.text:
                self._write(("\n\n" if reasons else "") + self._safe(piece.text))
                reasons = False
        self._write("\n")
        if left_out and not said:
            self._note("(the model only reasoned, which is shown in a terminal alone)")
        if ended == "length":
            self._note("(cut off: it is as long as it may be; see --max-tokens)")

    def _safe(self, text: str) -> str:
        return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text) if self._is_terminal else text

    def _note(self, text: str) -> None:
        """What is neither said by the user nor by the model; not among what is piped on."""
        print(_dimmed(text) if sys.stderr.isatty() else text, file=sys.stderr)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
