"""The directory that a conversion makes: all of it or nothing, whatever happens on the way."""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.convert import interrupts

_log = logging.getLogger(__name__)
_LOCK = ".lock"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
_QUIET_SECONDS, _CLEANING_SECONDS = 0.5, 20.0
_UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
_MARGIN = 1.01
"""What file systems and checkpoints take beside the weights."""


def check_target(source: Path, target: Path) -> None:
    """Raise ConfigError for a target that is, or holds, or lies in, anything that a conversion could spoil."""
    source, target = source.resolve(), target.resolve()
    if target == source:
        raise ConfigError(
            f"DST is SRC ({target}); give another directory, which is made: the original stays as it is"
        )
    if target.is_relative_to(source):
        raise ConfigError(f"DST ({target}) lies in SRC ({source}); give a directory beside it")
    place = next(parent for parent in (*target.parents, target) if parent.exists())
    if not place.is_dir():
        raise ConfigError(f"DST ({target}) lies in {place}, which is a file; give a path in a directory")
    if target.exists() and not target.is_dir():
        raise ConfigError(f"DST ({target}) is a file; give a directory, which is made")
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"DST ({target}) exists and is not empty; remove it, or give another directory")


def check_space(target: Path, nbytes: int) -> None:
    """Raise ConfigError if so many bytes do not fit where the target will be."""
    place = next(parent for parent in target.resolve().parents if parent.is_dir())
    needed, free = int(nbytes * _MARGIN), shutil.disk_usage(place).free
    if free < needed:
        raise ConfigError(
            f"{target} needs {in_words(needed)}, and {in_words(free)} are free in {place}; make room, or give a "
            "directory on another disk"
        )


def no_room(path: Path, why: str) -> str:
    """That something cannot be written."""
    return f"{path} cannot be written: {why}; make room there, or give a directory on another disk"


def in_words(nbytes: float) -> str:
    """Such as "7.56 GB", "75.6 kB" or "756 bytes"."""
    unit, size = next((each for each in _UNITS.items() if nbytes >= each[1]), ("bytes", 1))
    value = nbytes / size
    return f"{value:,.{0 if size == 1 or value >= 100 else 1 if value >= 10 else 2}f} {unit}"


@contextlib.contextmanager
def whole_or_nothing(target: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `target` if the block ends well, and goes if it does not.

    It lies beside the target, as .NAME.partial-PID, and is locked while its process lives: what a killed process left
    is removed by the next conversion into the same target. Raises OSError in words where there is no room for it.
    """
    target = target.resolve()
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    made = [folder for folder in target.parents if not folder.exists()]

    def tidy() -> None:
        _remove(partial)
        with contextlib.suppress(OSError):  # where they hold the target, or something of others
            for folder in made:
                folder.rmdir()

    with interrupts.tidied_by(tidy):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(target)
            partial.mkdir()
            with (partial / _LOCK).open("w") as lock:
                with contextlib.suppress(OSError):  # file systems without locks are written to all the same
                    fcntl.flock(lock, fcntl.LOCK_EX)
                yield partial
                interrupts.come_too_late()
                (partial / _LOCK).unlink()
                try:
                    partial.rename(target)
                except OSError as error:
                    raise ConfigError(
                        f"{target} came into being in the meantime ({error.strerror}); what was converted is gone. "
                        "Give another directory"
                    ) from None
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise OSError(no_room(target, os.strerror(error.errno))) from error
        finally:
            tidy()


def _remove(partial: Path) -> None:
    """For good: a save that was interrupted goes on writing for a moment, in threads of its own."""
    quiet_until = deadline = time.monotonic()
    deadline += _CLEANING_SECONDS
    while time.monotonic() < deadline:
        if partial.exists():
            shutil.rmtree(partial, ignore_errors=True)
            quiet_until = time.monotonic() + _QUIET_SECONDS
        elif time.monotonic() >= quiet_until:
            return
        time.sleep(0.05)


def _runs(pid: str) -> bool:
    """Whether a process of this number lives, or may."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        pass
    return True


def copy_other_files(source: Path, target: Path) -> None:
    """All of a checkpoint directory's files but its weights, and but hidden ones: configuration, tokenizer, templates.

    Directories are not copied.
    """
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, target / path.name)


def _remove_stale(target: Path) -> None:
    """What conversions into this target left whose processes are certainly dead, for nobody holds their locks."""
    for partial in target.parent.glob(f".{target.name}.partial-*"):
        try:
            with (partial / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(partial)
                _log.info("removed %s, which a conversion left that was killed", partial)
        except FileNotFoundError:  # no lock, so its process was cleaning up when it ended, or is
            if not _runs(partial.name.rpartition("-")[2]):
                shutil.rmtree(partial, ignore_errors=True)
        except OSError:
            _log.info("%s is there: another conversion is under way, or it is yours to remove", partial)
