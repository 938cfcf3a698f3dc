"""The two requests that one becomes: to a prefill server, whole, and to a decode server, in chunks as they come."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx

from glm_dcp_jax.config.json_file import parse_json
from glm_dcp_jax.serve.errors import ApiError
from glm_dcp_jax.serve.router.bodies import PARAMS
from glm_dcp_jax.serve.router.connections import Connect

_UNREACHABLE = (httpx.ConnectError, httpx.ConnectTimeout)


class Rejected(Exception):
    """A prefill server's 4xx: it is the client who must change something. content: the answer's body."""

    def __init__(self, answer: httpx.Response, content: bytes) -> None:
        super().__init__(answer.status_code)
        self.answer, self.content = answer, content


class PrefillFailed(Exception):
    """A prefill server gave no cache. reason: one of metrics.FALLBACKS."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Unreachable(Exception):
    """No connection, so the server has seen nothing of the request."""


@asynccontextmanager
async def ask_prefill(
    connect: Connect, url: str, content: bytes, headers: Mapping[str, str], deadline: float
) -> AsyncIterator[dict[str, Any]]:
    """Where the cache is that was computed: the answer's kv_transfer_params.

    deadline: on the event loop's clock. They are known before the connection is closed, which takes a moment in which
    a request may be cancelled. Raises Rejected, PrefillFailed.
    """
    async with connect() as client:
        request = client.build_request("POST", url, content=content, headers=headers)
        try:
            async with asyncio.timeout_at(deadline):
                answer = await client.send(request, stream=True)
                body = b"".join([chunk async for chunk in answer.aiter_raw()])
        except TimeoutError:
            raise PrefillFailed("timeout", "no answer in time") from None
        except httpx.HTTPError as error:
            reason = "unreachable" if isinstance(error, _UNREACHABLE) else "broken"
            raise PrefillFailed(reason, explain(error)) from error
        if answer.is_client_error and _blames_params(body):
            raise PrefillFailed("refused", f"it does not hand caches over: {_message_of(body)}")
        if answer.is_client_error:
            raise Rejected(answer, body)
        if not answer.is_success:
            raise PrefillFailed("status", f"status {answer.status_code}")
        yield _params_of(body)


def _blames_params(body: bytes) -> bool:
    """Whether an error is about a field that no client sets: the router does, so the servers do not fit together."""
    return _error_of(body).get("param") == PARAMS


def _message_of(body: bytes) -> str:
    return str(_error_of(body).get("message"))


def _error_of(body: bytes) -> dict[str, Any]:
    try:
        found = parse_json(body)
    except ValueError:
        return {}
    error = found.get("error") if isinstance(found, dict) else None
    return error if isinstance(error, dict) else {}


def _params_of(body: bytes) -> dict[str, Any]:
    try:
        found = parse_json(body)
    except ValueError as error:
        raise PrefillFailed("bad_answer", f"its answer is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise PrefillFailed("bad_answer", "its answer is not a JSON object")
    params = found.get(PARAMS)
    if not params:
        raise PrefillFailed("no_params", f"its answer has no {PARAMS}")
    if not isinstance(params, dict):
        raise PrefillFailed("bad_answer", f"its {PARAMS} are not a JSON object")
    return params


class DecodeAnswer:
    """A decode server's answer, from its first bytes on. response: status and headers. first: b"" if it has no body."""

    def __init__(self, response: httpx.Response, chunks: AsyncIterator[bytes], first: bytes) -> None:
        self.response, self.first = response, first
        self._chunks = chunks

    async def more(self, patience: float) -> bytes:
        """The next bytes, b"" at the end. patience: in seconds. Raises ApiError 502 or 504."""
        with _reported(f"the decode server stopped answering: nothing came for {patience:g} s"):
            async with asyncio.timeout(patience):
                return await _next(self._chunks)


@asynccontextmanager
async def ask_decode(
    connect: Connect, url: str, content: bytes, headers: Mapping[str, str], patience: float
) -> AsyncIterator[DecodeAnswer]:
    """An answer whose first bytes have come, within `patience` seconds. It ends with the context.

    Raises Unreachable, ApiError 502 or 504.
    """
    async with connect() as client:
        request = client.build_request("POST", url, content=content, headers=headers)
        with _reported(f"the decode server did not begin to answer within {patience:g} s"):
            async with asyncio.timeout(patience):
                response = await client.send(request, stream=True)
                chunks = response.aiter_raw()
                first = await _next(chunks)
        if response.is_client_error and _blames_params(first):
            raise ApiError("the decode server takes no cache from the prefill server", 502) from RuntimeError(
                _message_of(first)
            )
        yield DecodeAnswer(response, chunks, first)


async def _next(chunks: AsyncIterator[bytes]) -> bytes:
    """The next chunk that holds anything, b"" at the end."""
    async for chunk in chunks:
        if chunk:
            return chunk
    return b""


@contextmanager
def _reported(too_late: str) -> Iterator[None]:
    """Turns what can go wrong with a decode server into Unreachable and into errors for the client."""
    try:
        yield
    except TimeoutError as error:
        raise ApiError(too_late, 504) from error
    except _UNREACHABLE as error:
        raise Unreachable(explain(error)) from error
    except httpx.HTTPError as error:
        raise ApiError("the decode server broke off before its answer was complete", 502) from error


def explain(error: BaseException) -> str:
    """For the log."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
