"""Logging to stderr, one line an event: in vLLM's format, or as JSON. Lines about a request begin with its id."""

import json
import logging
import sys
import threading
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import TextIO

from tqdm import tqdm

from glm_dcp_jax.progress import show_as_lines

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Of the request that this task works for."""
_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(about)s%(message)s"
_OURS = ("glm_dcp_jax", "uvicorn")
_POLLED = ("/health", "/ping", "/metrics", "/load", "/status.json")
_MOST_OF_PATH = 200
_OF_EVERY_RECORD = {*vars(logging.makeLogRecord({})), "message", "asctime", "about", "color_message"}


def configure(level: str, form: str = "text") -> None:
    """Show our own and the HTTP server's events from `level` on, other libraries' warnings. form: text or json.

    Progress is shown by bars only where there is a terminal, and lines are for people.
    """
    show_as_lines(form == "json" or not sys.stderr.isatty())
    handlers = [_BesideBars()]
    logging.basicConfig(
        format=_FORMAT, datefmt="%m-%d %H:%M:%S", level=logging.WARNING, handlers=handlers, force=True
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(_say_which_request)
        if form == "json":
            handler.setFormatter(_Json())
    for name in _OURS:
        logging.getLogger(name).setLevel(level.upper())
    if form == "json":
        logging.captureWarnings(True)
        threading.excepthook = _say_what_ended_a_thread
        sys.excepthook = _say_what_ended_the_process
    logging.getLogger("uvicorn.access").addFilter(_shorten_path)
    if level != "debug":
        logging.getLogger("uvicorn.error").addFilter(_is_no_false_start)
        logging.getLogger("uvicorn.access").addFilter(_is_no_poll)


def is_json() -> bool:
    """Whether lines are JSON."""
    return any(isinstance(handler.formatter, _Json) for handler in logging.getLogger().handlers)


class _BesideBars(logging.StreamHandler[TextIO]):
    """To stderr, where bars of progress make way for each line and come again below it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class _Json(logging.Formatter):
    """One object a line: time, level, logger, message, request_id if it is about one, and what an event says besides.

    Events of the engine's thread are about a request by the engine's name for it, which holds the client's.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line without any line break."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "at": f"{record.filename}:{record.lineno}",
        }
        if request_id := REQUEST_ID.get():
            fields["request_id"] = request_id
        fields |= {name: value for name, value in vars(record).items() if name not in _OF_EVERY_RECORD}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = self.formatStack(record.stack_info)
        try:
            return json.dumps(fields, default=str, allow_nan=False)
        except (TypeError, ValueError):  # keys that are no text, numbers that JSON has not
            return json.dumps({name: str(value) for name, value in fields.items()})


def _say_which_request(record: logging.LogRecord) -> bool:
    request_id = REQUEST_ID.get()
    record.about = "" if request_id is None else f"[request {request_id}] "
    return True


def _say_what_ended_a_thread(failure: threading.ExceptHookArgs) -> None:
    """An event like any other, where Python would print a traceback."""
    if failure.exc_type is not SystemExit and failure.exc_value is not None:
        name = "a thread" if failure.thread is None else failure.thread.name
        logging.getLogger("glm_dcp_jax").error("%s has failed", name, exc_info=failure.exc_value)


def _say_what_ended_the_process(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    logging.getLogger("glm_dcp_jax").error("the process has failed", exc_info=(kind, error, traceback))


def _shorten_path(record: logging.LogRecord) -> bool:
    """Without the query, which no endpoint takes and where keys may be by mistake."""
    if isinstance(record.args, tuple) and len(record.args) > 2:
        client, method, path, *rest = record.args
        path = str(path).partition("?")[0]
        shown = path if len(path) <= _MOST_OF_PATH else path[:_MOST_OF_PATH] + "..."
        record.args = (client, method, shown, *rest)
    return True


def _is_no_poll(record: logging.LogRecord) -> bool:
    """Health checks and scrapes come every few seconds and would bury everything else."""
    _, _, path, *_ = record.args if isinstance(record.args, tuple) and len(record.args) > 2 else ("", "", "")
    return str(path).partition("?")[0] not in _POLLED


def _is_no_false_start(record: logging.LogRecord) -> bool:
    """The HTTP server is up before the steps are compiled: its "startup complete" would be taken for being ready."""
    return "application startup" not in record.getMessage().lower()
