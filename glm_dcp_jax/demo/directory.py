"""Where the built-in model lies: in the user's cache, or for one run in a temporary directory."""

import atexit
import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from glm_dcp_jax.demo.files import make_files

_log = logging.getLogger(__name__)


def tiny_model_directory() -> Path:
    """A checkpoint directory with the built-in model, made if it is not there yet or not whole.

    It lies in $XDG_CACHE_HOME (or ~/.cache)/glm_dcp_jax/demo, named after its content. Where that cannot be written,
    it is a temporary directory that goes when the process ends. Any number of processes may call this at once.
    """
    files = make_files()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "glm_dcp_jax" / "demo"
    directory = cache / f"tiny-{_digest(files)}"
    if _holds(directory, files):
        return directory
    try:
        with _locked(cache):
            if not _holds(directory, files):  # another process may have made it in the meantime
                _replace(directory, files)
    except OSError as error:
        directory = Path(tempfile.mkdtemp(prefix="glm-dcp-demo-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        _log.warning(
            "%s cannot be written (%s); the built-in model goes to %s", cache, error.strerror, directory
        )
        _write(directory, files)
    return directory


def _digest(files: dict[str, bytes]) -> str:
    hashed = hashlib.sha256()
    for name, content in files.items():
        hashed.update(f"{name} {len(content)}\n".encode())
        hashed.update(content)
    return hashed.hexdigest()[:12]


def _holds(directory: Path, files: dict[str, bytes]) -> bool:
    """Whether the directory holds these files and no others."""
    try:
        names = {entry.name for entry in directory.iterdir()}
        return names == set(files) and all((directory / name).read_bytes() == files[name] for name in files)
    except OSError:
        return False


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """One process at a time; a process that dies lets go."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _replace(directory: Path, files: dict[str, bytes]) -> None:
    """Put the files in place of whatever is there. They appear all at once. Call it under the lock."""
    workshop = directory.parent / ".making"
    shutil.rmtree(workshop, ignore_errors=True)  # of a process that was killed here
    made = workshop / "made"
    made.mkdir(parents=True)
    _write(made, files)
    if os.path.lexists(directory):
        directory.rename(workshop / "damaged")
    made.rename(directory)
    shutil.rmtree(workshop, ignore_errors=True)


def _write(directory: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (directory / name).write_bytes(content)
