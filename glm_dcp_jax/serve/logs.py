"""Logging to stderr, one line an event, in vLLM's format."""

import logging

_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_OURS = ("glm_dcp_jax", "uvicorn")


def configure(level: str) -> None:
    """Show our own and the HTTP server's events from `level` on, other libraries' warnings."""
    logging.basicConfig(format=_FORMAT, datefmt="%m-%d %H:%M:%S", level=logging.WARNING, force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(level.upper())
