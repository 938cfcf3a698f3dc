"""Logging to stderr, one line an event, in vLLM's format."""

import logging

_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_OURS = ("glm_dcp_jax", "uvicorn")
_POLLED = ("/health", "/ping", "/metrics")


def configure(level: str) -> None:
    """Show our own and the HTTP server's events from `level` on, other libraries' warnings."""
    logging.basicConfig(format=_FORMAT, datefmt="%m-%d %H:%M:%S", level=logging.WARNING, force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(level.upper())
    if level != "debug":
        logging.getLogger("uvicorn.error").addFilter(_is_no_false_start)
        logging.getLogger("uvicorn.access").addFilter(_is_no_poll)


def _is_no_poll(record: logging.LogRecord) -> bool:
    """Health checks and scrapes come every few seconds and would bury everything else."""
    _, _, path, *_ = record.args if isinstance(record.args, tuple) and len(record.args) > 2 else ("", "", "")
    return str(path).partition("?")[0] not in _POLLED


def _is_no_false_start(record: logging.LogRecord) -> bool:
    """The HTTP server is up before the steps are compiled: its "startup complete" would be taken for being ready."""
    return "application startup" not in record.getMessage().lower()
