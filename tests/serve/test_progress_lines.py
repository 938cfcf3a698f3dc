"""Progress where nobody looks at a terminal: lines of the log, now and then."""

import json
import logging
import sys

import pytest

from glm_dcp_jax import progress as module
from glm_dcp_jax.progress import progress, show_as_lines
from glm_dcp_jax.serve import logs


@pytest.fixture
def lines(monkeypatch, caplog):
    """What is logged; time passes by `lines.wait(seconds)` only."""
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(logging.getLogger("glm_dcp_jax"), "propagate", True)
    caplog.set_level(logging.INFO, "glm_dcp_jax.progress")
    show_as_lines(True)
    return lambda seconds: clock.__setitem__(0, clock[0] + seconds), caplog


def test_a_line_comes_every_ten_seconds_and_nothing_goes_to_the_terminal(lines, capsys):
    wait, log = lines
    with progress("Loading weights", 4_000_000, "B") as bar:
        for _ in range(8):
            wait(6)
            bar.update(500_000)
            bar.refresh()
    told = log.messages
    assert [line.partition(" %")[0] for line in told] == [
        f"Loading weights: {share}" for share in (25, 50, 75, 100)
    ]
    assert "(1.00M of 4.00M)" in told[0] and told[0].endswith(" left")
    assert capsys.readouterr() == ("", "")


def test_what_is_quick_says_nothing(lines):
    _, log = lines
    assert list(progress("Compiling steps", unit="step", steps=[1, 2, 3])) == [1, 2, 3]
    assert not log.messages


def test_a_terminal_gets_bars(capsys):
    assert list(progress("Compiling steps", unit="step", steps=[1, 2])) == [1, 2]
    assert "Compiling steps: 100%" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_that_is_no_terminal_has_whole_lines_only(form, capsys):
    logs.configure("info", form)
    with progress("Loading weights", 2, "B") as bar:
        bar.update()
        logging.getLogger("glm_dcp_jax").info("between")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "between" if form == "json" else line.endswith("] between")


def test_json_is_for_machines_on_a_terminal_too(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for form, shown in (("text", True), ("json", False)):
        logs.configure("info", form)
        list(progress("Compiling steps", unit="step", steps=[1]))
        assert ("Compiling steps" in capsys.readouterr().err) is shown
