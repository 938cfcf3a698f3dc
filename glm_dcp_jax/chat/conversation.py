"""What was said so far, and how it goes on."""

from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any

from glm_dcp_jax.chat.client import Client, Piece


class Conversation:
    """Messages to and from the model. system: what it begins with, if anything."""

    def __init__(self, client: Client, request: Mapping[str, Any], system: str | None = None) -> None:
        """request: fields of each request besides the messages."""
        self._client, self._request = client, request
        self.system = system
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """As the server gets them."""
        begin = [{"role": "system", "content": self.system}] if self.system else []
        return [*begin, *self._turns]

    def reset(self) -> None:
        """Forget all but the system message."""
        self._turns.clear()

    def say(self, text: str) -> Generator[Piece, None, None]:
        """The answer, as it comes. Closed early, it is remembered as far as it came; without any text, nothing is.

        Raises ServerError, after which nothing of this is remembered.
        """
        question = {"role": "user", "content": text}
        body = {**self._request, "messages": [*self.messages, question]}
        said = ""
        try:
            with closing(self._client.answer(body)) as pieces:
                for piece in pieces:
                    said += piece.text
                    yield piece
        except Exception:
            said = ""
            raise
        finally:
            if said:
                self._turns += [question, {"role": "assistant", "content": said}]
