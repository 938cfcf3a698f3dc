"""One trace at a time of what this process does."""

import asyncio
import logging
import os
import tempfile
from pathlib import Path

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.serve.errors import ApiError

_LOG = logging.getLogger(__name__)
_TRACES = "**/*.xplane.pb"


def check_directory(given: str) -> None:
    """Make the directory if it is not there. Raises ConfigError for one that traces cannot be written to."""
    directory = _absolute(given)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f"profiler_dir {directory} cannot be written: {error.strerror}") from None


def _absolute(directory: str) -> Path:
    return Path(
        os.path.expanduser(directory)
    ).absolute()  # unlike Path.expanduser, leaves an unknown ~user alone


class Profiler:
    """At most one trace at a time, in a directory. Tracing starts and ends in other threads: both take a while."""

    def __init__(self, directory: str | None) -> None:
        """directory: None for a server without a profiler."""
        self._directory = None if directory is None else _absolute(directory)
        self._changing = asyncio.Lock()
        self._before: set[Path] | None = None

    async def start(self) -> Path:
        """Begin. Returns the directory.

        Raises ApiError 404 without one, 409 while something is traced, and 500 for a directory that cannot be written.
        """
        directory = self._configured()
        async with self._changing:
            if self._before is not None:
                raise ApiError("a trace is being taken already; end it with POST /stop_profile", 409)
            try:
                before = await asyncio.to_thread(_start, directory)
            except OSError as error:
                raise ApiError(f"--profiler-dir {directory} cannot be written: {error}", 500) from error
            except RuntimeError as error:  # somebody else in this process traces
                raise ApiError(f"no trace can be taken now: {error}", 409) from error
            self._before = before
        _LOG.info("taking a trace, to %s", directory)
        return directory

    async def stop(self) -> Path:
        """End. Returns the trace's folder, for a viewer.

        Raises ApiError 404 as `start`, 400 without a trace, and 500 for one that cannot be written, which goes on.
        """
        directory = self._configured()
        async with self._changing:
            if self._before is None:
                raise ApiError("no trace is being taken; begin one with POST /start_profile", 400)
            try:
                trace = await asyncio.to_thread(_stop, directory, self._before)
            except (OSError, RuntimeError) as error:  # jax goes on taking it
                said = (
                    f"--profiler-dir {directory} cannot be written: {error}; mend it and stop the trace again"
                )
                raise ApiError(said, 500) from error
            self._before = None
        _LOG.info("the trace is in %s", trace)
        return trace

    def close(self) -> None:
        """The server ends: a trace that is being taken is written, not lost."""
        if self._directory is not None and self._before is not None:
            try:
                _LOG.info("the trace is in %s", _stop(self._directory, self._before))
            except (OSError, RuntimeError):
                _LOG.exception("the trace is lost, %s cannot be written", self._directory)

    def _configured(self) -> Path:
        if self._directory is None:
            raise ApiError("this server takes no traces; start it with --profiler-dir DIR", 404)
        return self._directory


def _start(directory: Path) -> set[Path]:
    """Returns the traces that there are already. jax is imported here, when its environment is set up."""
    import jax

    directory.mkdir(parents=True, exist_ok=True)
    before = set(directory.glob(_TRACES))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = (
        0  # every call of Python would slow down the host, which is what is looked at
    )
    jax.profiler.start_trace(str(directory), profiler_options=options)
    return before


def _stop(directory: Path, before: set[Path]) -> Path:
    import jax

    jax.profiler.stop_trace()
    made = sorted(set(directory.glob(_TRACES)) - before)
    return made[-1].parent if made else directory
