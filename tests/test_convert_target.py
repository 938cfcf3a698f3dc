"""The directory of a conversion: all of it or nothing, also with threads that go on writing, and what the dead left."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.convert.target import check_target, in_words, whole_or_nothing


def partials(folder: Path) -> list[Path]:
    return list(folder.glob(".*partial*"))


def test_what_ends_well_is_there_at_once(tmp_path):
    begin = time.monotonic()
    with whole_or_nothing(tmp_path / "made") as partial:
        (partial / "file").write_text("whole")
    assert time.monotonic() - begin < 0.4
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["file"] and partials(tmp_path) == []


def test_a_save_that_goes_on_after_an_interrupt_leaves_nothing(tmp_path):
    written = threading.Event()

    def save(partial: Path) -> None:
        for number in range(30):
            (partial / "weights" / str(number)).mkdir(parents=True, exist_ok=True)
            written.set()
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt), whole_or_nothing(tmp_path / "made") as partial:
        saving = threading.Thread(target=save, args=(partial,))
        saving.start()
        written.wait()
        raise KeyboardInterrupt
    saving.join()
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_process_left_without_a_lock_goes(tmp_path):
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    )
    stale, live = (tmp_path / f".made.partial-{pid}" for pid in (dead.stdout.strip(), os.getppid()))
    for partial in (stale, live):
        (partial / "weights").mkdir(parents=True)
    with whole_or_nothing(tmp_path / "made") as partial:
        (partial / "file").write_text("whole")
    assert partials(tmp_path) == [live]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG], ids=errno.errorcode.get)
def test_a_disk_without_room_is_said_with_the_target(number, tmp_path):
    """Errors of writes name no file."""
    said = f"{tmp_path / 'made'} cannot be written: {os.strerror(number)}; make room there"
    with pytest.raises(OSError, match=said), whole_or_nothing(tmp_path / "made"):
        raise OSError(number, os.strerror(number))
    assert list(tmp_path.iterdir()) == []


def test_the_root_directory_is_no_target(tmp_path):
    with pytest.raises(ConfigError, match=r"DST \(/\) exists and is not empty"):
        check_target(tmp_path, Path("/"))


def test_signals_that_come_too_late_are_ignored_to_the_very_end():
    """Python takes handlers away while it ends: then a signal would kill the process, its work done."""
    program = """
import signal
from glm_dcp_jax.convert import interrupts
interrupts.end_at_once()
interrupts.come_too_late()
class Last:
    def __del__(self, send=signal.raise_signal, number=signal.SIGTERM):
        send(number)
signal.kept = Last()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.00 kB"),
        (75_600, "75.6 kB"),
        (2_345_678, "2.35 MB"),
        (756e9, "756 GB"),
        (1.5e12, "1,500 GB"),
    ],
)
def test_sizes_in_words(nbytes, words):
    assert in_words(nbytes) == words
