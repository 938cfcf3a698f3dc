"""The built-in model's directory: the same bytes on every run, and whole, whatever has happened to it."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm_dcp_jax.demo import tiny_model_directory
from glm_dcp_jax.demo.files import make_files

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}
MAKE = "from glm_dcp_jax.demo import tiny_model_directory\nmade = tiny_model_directory()\nprint(made)\n"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The user's cache, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def start(code: str = MAKE, **environment: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | environment, stdout=pipe, stderr=pipe, text=True
    )


def answer(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output.strip()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_it_is_made_in_the_users_cache_and_complete(cache):
    made = tiny_model_directory()
    assert made.parent == cache / "glm_dcp_jax" / "demo"
    assert set(contents(made)) == FILES
    assert [entry.name for entry in made.parent.iterdir() if not entry.name.startswith(".")] == [made.name]


def test_two_runs_make_the_same_bytes():
    code = """
import hashlib
from glm_dcp_jax.demo.files import make_files
print({name: hashlib.sha256(content).hexdigest() for name, content in make_files().items()})
"""
    here = {name: hashlib.sha256(content).hexdigest() for name, content in make_files().items()}
    runs = [start(code, PYTHONHASHSEED=seed) for seed in ("1", "2")]
    assert [answer(run) for run in runs] == [str(here)] * 2


def test_a_directory_that_is_whole_is_left_alone(cache):
    before = tiny_model_directory().stat()
    after = tiny_model_directory().stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def cut_weights(made: Path) -> None:
    weights = made / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def flip_a_bit(made: Path) -> None:
    weights = bytearray((made / "model.safetensors").read_bytes())
    weights[-5000] ^= 1
    (made / "model.safetensors").write_bytes(weights)


def drop_a_file(made: Path) -> None:
    (made / "tokenizer.json").unlink()


def add_a_file(made: Path) -> None:
    (made / "model.safetensors.index.json").write_text("{}")


def put_a_file_in_its_place(made: Path) -> None:
    for path in made.iterdir():
        path.unlink()
    made.rmdir()
    made.write_text("")


def leave_an_unfinished_one(made: Path) -> None:
    """What a process leaves behind that was killed while it made the directory."""
    put_a_file_in_its_place(made)
    unfinished = made.parent / ".making" / "made"
    unfinished.mkdir(parents=True)
    (unfinished / "config.json").write_text("{")


@pytest.mark.parametrize(
    "damage",
    [cut_weights, flip_a_bit, drop_a_file, add_a_file, put_a_file_in_its_place, leave_an_unfinished_one],
)
def test_a_damaged_directory_is_made_anew(cache, damage):
    made = tiny_model_directory()
    damage(made)
    assert tiny_model_directory() == made
    assert contents(made) == make_files()
    assert not (made.parent / ".making").exists()


@pytest.mark.parametrize("damage", [None, cut_weights], ids=["empty cache", "damaged"])
def test_processes_that_start_at_once_agree(cache, damage):
    if damage is not None:
        damage(tiny_model_directory())
    made = {Path(answer(process)) for process in [start() for _ in range(4)]}
    assert len(made) == 1
    assert contents(made.pop()) == make_files()


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    blocked = tmp_path / "cache"
    blocked.write_text("a file, so nothing can be made below it")
    process = start(MAKE + "print(sorted(path.name for path in made.iterdir()))", XDG_CACHE_HOME=str(blocked))
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "cannot be written" in errors and str(blocked) in errors
    path, names = output.splitlines()
    assert names == str(sorted(FILES))
    assert not Path(path).exists()  # gone with the process


def test_making_it_needs_no_jax(cache):
    assert answer(start(MAKE + "import sys; print('jax' in sys.modules)")).endswith("False")
