"""Progress of what takes long: bars on a terminal, lines of the log where nobody looks at one. Imports no jax."""

import io
import logging
import time
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

SECONDS_A_LINE = 10.0
_FORMAT = "{desc}: {percentage:.0f} % ({n_fmt} of {total_fmt}), {rate_fmt}, {remaining} left"
_log = logging.getLogger(__name__)
_as_lines = False


def show_as_lines(wanted: bool) -> None:
    """Whether progress goes to the log from now on, a line every SECONDS_A_LINE, or is a bar."""
    global _as_lines
    _as_lines = wanted


def progress(
    what: str, total: int | None = None, unit: str = "it", steps: Iterable[Any] | None = None
) -> tqdm:
    """A bar, or lines, to be updated; or, given steps, to be iterated over. unit: "B" counts in kB, MB and so on."""
    kind = _Lines if _as_lines else tqdm
    return kind(steps, total=total, desc=what, unit=unit, unit_scale=unit == "B", mininterval=1.0)


class _Lines(tqdm):
    """tqdm's arithmetic without its bar. What is done within SECONDS_A_LINE says nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._said = time.monotonic()
        super().__init__(*arguments, **options, file=io.StringIO(), bar_format=_FORMAT)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """In place of drawing: say how far it is, if the last time is long ago."""
        now = time.monotonic()
        if now - self._said >= SECONDS_A_LINE:
            self._said = now
            _log.info("%s", msg or str(self))
        return True
