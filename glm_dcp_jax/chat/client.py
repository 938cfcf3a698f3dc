"""The server's API as a chat needs it: the model's name, and answers as they come."""

import json
from collections.abc import Generator, Iterator, Mapping
from typing import Any, NamedTuple

import httpx
import orjson

_CONNECT_SECONDS = 10.0
_DATA = b"data:"
_DONE = b"[DONE]"


class ServerError(Exception):
    """The server is not there, or does not answer as it should. The message is for the user."""


class Piece(NamedTuple):
    """What an answer goes on with. finish_reason: None until its end."""

    text: str
    reasoning: str
    finish_reason: str | None


class Client:
    """One server. Close it, or use it as a context."""

    def __init__(
        self, base_url: str, api_key: str | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        """base_url: without /v1. transport: how it is reached, if not over the network."""
        self._url = base_url
        self._http = httpx.Client(
            base_url=base_url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(
                None, connect=_CONNECT_SECONDS
            ),  # a first token may take as long as it takes
            transport=transport,
            trust_env=False,
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def first_model(self) -> str:
        """The name of the model. Raises ServerError."""
        try:
            answer = self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if not answer.is_success:
            raise _refusal(answer.status_code, answer.content)
        try:
            return str(orjson.loads(answer.content)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{self._url}/v1/models does not list models as OpenAI's API does") from None

    def answer(self, body: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """The answer to a chat request, as it comes. Closing the iterator ends it at the server too.

        Raises ServerError.
        """
        content = json.dumps(
            {**body, "stream": True}
        )  # whatever it holds: the server says what it does not take
        headers = {"Content-Type": "application/json"}
        try:
            with self._http.stream(
                "POST", "/v1/chat/completions", content=content, headers=headers
            ) as answer:
                if not answer.is_success:
                    raise _refusal(answer.status_code, answer.read())
                for data in _events(answer.iter_bytes()):
                    if data == _DONE:
                        return
                    yield from _pieces(data)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        raise ServerError("the server ended the answer before it was complete")

    def _unreachable(self, error: httpx.HTTPError) -> ServerError:
        why = str(error) or type(error).__name__
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return ServerError(
                f"no server answers at {self._url} ({why}); start one with scripts/serve, or name it with --base-url"
            )
        return ServerError(f"the connection to {self._url} broke: {why}")


def _events(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The data of server-sent events of one line each. Lines end with a newline only: others may be in a text."""
    part = b""
    for chunk in chunks:
        *lines, part = (part + chunk).split(b"\n")
        yield from (line.removeprefix(_DATA).strip() for line in lines if line.startswith(_DATA))


def _pieces(data: bytes) -> Iterator[Piece]:
    try:
        event = orjson.loads(data)
        if "error" in event:
            raise ServerError(str(event["error"]["message"]))
        for choice in event["choices"]:
            delta = choice.get("delta") or {}
            reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
            yield Piece(delta.get("content") or "", reasoning, choice.get("finish_reason"))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ServerError(f"the server sent what is no chunk of an answer: {data[:100]!r}") from None


def _refusal(status: int, content: bytes) -> ServerError:
    if status == 401:
        return ServerError("the server wants another API key than it got; give it with --api-key")
    try:
        return ServerError(f"the server answered {status}: {orjson.loads(content)['error']['message']}")
    except (ValueError, LookupError, TypeError):
        return ServerError(f"the server answered {status}, and does not say why")
