"""The client's answer, as far as it has come: nothing before the server's first bytes, events only by whole lines."""

from collections.abc import Sequence

import httpx
import orjson
from starlette.types import Send

from glm_dcp_jax.serve.errors import ApiError

_NOT_PASSED_ON = {
    b"connection",
    b"date",  # the router adds its own
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-connection",
    b"server",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"x-request-id",
}


class Reply:
    """Sends one answer to the client. request_id: for its header."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id.encode("latin-1")
        self._is_stream = False
        self._part = b""
        self.started = False
        self.finished = False

    async def begin(self, answer: httpx.Response) -> None:
        """Send the status and the headers of a server's answer."""
        headers = [(name.lower(), value) for name, value in answer.headers.raw]
        self._is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
        self.started = True
        await self._start(answer.status_code, headers)

    async def write(self, data: bytes) -> None:
        """Send more of the body; of events whole lines only, so that an error after them is one of its own."""
        if self._is_stream:
            whole, newline, rest = data.rpartition(b"\n")
            if not newline:
                self._part += data
                return
            data, self._part = self._part + whole + newline, rest
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """The answer is complete."""
        self.finished = True
        await self._send({"type": "http.response.body", "body": self._part, "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """The answer cannot be completed.

        If it has not begun, it is the error's. A stream ends with an event that says so, and without its usual [DONE];
        anything else is cut off, which HTTP makes the client notice.
        """
        if not self.started:
            answer = error.response()
            await self._start(answer.status_code, answer.raw_headers)
            await self._send({"type": "http.response.body", "body": answer.body, "more_body": False})
        elif self._is_stream and not self.finished:
            # The empty line ends an event whose lines have come, but not its end.
            event = b"\ndata: " + orjson.dumps(error.body) + b"\n\n"
            await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        passed_on = [(name, value) for name, value in headers if name not in _NOT_PASSED_ON]
        own = (b"x-request-id", self._request_id)
        await self._send({"type": "http.response.start", "status": status, "headers": [*passed_on, own]})
