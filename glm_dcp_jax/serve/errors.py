"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from glm_dcp_jax.serve.logs import REQUEST_ID

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
SHUTTING_DOWN = "the server is shutting down"
_CLIENT_GONE = 499
_SHOWN_PROBLEMS = 3


class ErrorDetail(BaseModel):
    """What was wrong. param: the request field to blame, if it is one. code: the status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(BaseModel):
    """The body of every answer that is no success, but for a missing API key's {"error": "Unauthorized"}."""

    error: ErrorDetail


DOCUMENTED: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request is wrong; the message says how"},
    "5XX": {"model": ErrorAnswer, "description": "The server cannot answer, or not now"},
}
"""For /openapi.json."""


class ApiError(Exception):
    """An answer other than 200. param: the request field to blame, where there is one.

    retry_after: seconds after which the same request may well succeed; None: no saying.
    """

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.retry_after = _encodable(message), status, retry_after
        self.param = None if param is None else _encodable(param)

    @property
    def body(self) -> dict[str, Any]:
        """What goes over the wire."""
        kind = _TYPES.get(self.status, HTTPStatus(self.status).phrase.replace(" ", "") + "Error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def response(self) -> Response:
        """The whole answer."""
        answer = json_response(self.body, self.status)
        if self.retry_after is not None:
            answer.headers["Retry-After"] = str(self.retry_after)
        return answer


class WrongBody(HTTPException):
    """An ApiError about a body that cannot be read, as the framework lets it pass."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.status, error.message)
        self.error = error


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


def _encodable(text: str) -> str:
    """Without the lone surrogates that a request's JSON may hold, and an answer's cannot."""
    return text.encode("utf-8", "replace").decode()


def json_response(body: Any, status: int = 200) -> Response:
    """A JSON body; numbers JSON cannot hold (nan, inf) become null."""
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")


def internal_error() -> ApiError:
    """For anything unforeseen: the details stay in the log."""
    return ApiError("internal error; the server's log has the details", status=500)


def install(
    app: FastAPI,
    on_invalid: Callable[[Request, Any], None] = lambda request, body: None,
    elsewhere: str = "the list of paths is at /docs",
) -> None:
    """Answer every error of the app in OpenAI's form.

    on_invalid: hears of each body that is not what it should be. elsewhere: what there is for whom a path is not there.
    """

    async def invalid_request(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        on_invalid(request, error.body)
        return _explain(error.errors(), request.headers.get("content-type", "")).response()

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _http_error(request, error, elsewhere)

    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(RequestValidationError, invalid_request)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(WrongBody, _wrong_body)
    app.add_exception_handler(Exception, _unforeseen)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _wrong_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, WrongBody)
    return error.error.response()


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


def _http_error(request: Request, error: HTTPException, elsewhere: str) -> Response:
    message = str(error.detail)
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"there is no {request.url.path} here; {elsewhere}"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.url.path} does not take {request.method}"
    answer = ApiError(message, error.status_code).response()
    answer.headers.update(error.headers or {})
    return answer


async def _unforeseen(request: Request, error: Exception) -> Response:
    answer = internal_error().response()
    if name := REQUEST_ID.get():
        answer.headers["X-Request-Id"] = name  # it is sent from outside of what names answers
    return answer


def _explain(problems: Sequence[Any], content_type: str) -> ApiError:
    first = problems[0]
    if first["type"] == "json_invalid":
        return ApiError(
            f"the body is not valid JSON, at character {first['loc'][-1]}: {first['ctx']['error']}"
        )
    if len(first["loc"]) == 1 and not _named(first):
        hint = "" if "json" in content_type else ", sent with Content-Type: application/json"
        return ApiError("the body must be a JSON object" + hint)
    shown = "; ".join(f"{_field(problem)}: {_message(problem)}" for problem in problems[:_SHOWN_PROBLEMS])
    return ApiError(shown, param=_field(first))


def _field(problem: dict[str, Any]) -> str:
    """`messages.0.role` from ("body", "messages", 0, "role")."""
    return ".".join(str(part) for part in [*problem["loc"][1:], *_named(problem)])


def _named(problem: dict[str, Any]) -> list[str]:
    """The field that a check of a whole object blames."""
    return [problem["ctx"]["param"]] if "param" in problem.get("ctx", {}) else []


def _message(problem: dict[str, Any]) -> str:
    return str(problem["msg"]).removeprefix("Value error, ")
