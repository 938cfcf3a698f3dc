"""Checkpoint files against their SHA-256 sums."""

import hashlib
import sys
from pathlib import Path

import pytest

from glm_dcp_jax import LLM
from glm_dcp_jax.model.checksums import SUMS_NAME, verify_checksums
from glm_dcp_jax.model.safetensors_reader import CheckpointError

sys.path.append(str(Path(__file__).parents[1] / "oracle"))

from random_models import make_model, write_checkpoint


def sum_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def files(tmp_path) -> list[Path]:
    made = [tmp_path / f"model-{number}.safetensors" for number in (1, 2)]
    for number, file in enumerate(made):
        file.write_bytes(bytes([number]) * 100)
    return made


def write_sums(files: list[Path], form: str = "{sum}  {name}\n") -> None:
    lines = [form.format(sum=sum_of(file.read_bytes()), name=file.name) for file in files]
    (files[0].parent / SUMS_NAME).write_text("# of the publisher\n\n" + "".join(lines))


@pytest.mark.parametrize("form", ["{sum}  {name}\n", "{sum} *{name}\n", "{sum}  ./{name}\r\n"])
def test_files_with_their_sums_pass(files, form):
    write_sums(files, form)
    verify_checksums(files[0].parent, files)


def test_upper_case_is_as_good(files):
    write_sums(files)
    sums = files[0].parent / SUMS_NAME
    sums.write_text(sums.read_text().replace(sum_of(b"\0" * 100), sum_of(b"\0" * 100).upper()))
    verify_checksums(files[0].parent, files)


def test_a_sum_beside_each_file(files):
    for file, form in zip(files, ("{sum}", "{sum}  {name}\n"), strict=True):
        text = form.format(sum=sum_of(file.read_bytes()), name=file.name)
        file.with_name(f"{file.name}.sha256").write_text(text)
    verify_checksums(files[0].parent, files)


def test_links_into_a_cache_are_named_by_their_sums(tmp_path):
    content = b"weights" * 50
    blob = tmp_path / "blobs" / sum_of(content)
    blob.parent.mkdir()
    blob.write_bytes(content)
    link = tmp_path / "snapshot" / "model.safetensors"
    link.parent.mkdir()
    link.symlink_to(blob)
    verify_checksums(link.parent, [link])
    blob.write_bytes(content[:-1] + b"X")
    with pytest.raises(CheckpointError, match="model.safetensors has"):
        verify_checksums(link.parent, [link])


def test_each_file_that_differs_is_named(files):
    write_sums(files)
    files[1].write_bytes(b"\1" * 99 + b"\0")
    with pytest.raises(CheckpointError, match="1 of 2 files do not have their SHA-256 sum") as raised:
        verify_checksums(files[0].parent, files)
    assert str(files[1]) in str(raised.value) and str(files[0]) not in str(raised.value)


@pytest.mark.parametrize("form", ["{sum}  {name}\n", "{sum}\n"])
def test_a_list_with_two_sums_of_a_file_is_refused(form, files):
    """The last line counted, whichever it was."""
    file = files[0]
    beside = file.with_name(f"{file.name}.sha256")
    right = form.format(sum=sum_of(file.read_bytes()), name=file.name)
    beside.write_text(right + right)
    verify_checksums(file.parent, [file])
    beside.write_text(form.format(sum="0" * 64, name=file.name) + right)
    with pytest.raises(CheckpointError, match=r"line 2 has another SHA-256 sum of .* than a line before"):
        verify_checksums(file.parent, [file])


def test_files_of_one_name_in_several_directories_have_sums_of_their_own(tmp_path):
    files = [tmp_path / "original" / "model.safetensors", tmp_path / "model.safetensors"]
    files[0].parent.mkdir()
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]))
    for order in (files, files[::-1]):
        lines = [f"{sum_of(file.read_bytes())}  {file.relative_to(tmp_path)}\n" for file in order]
        (tmp_path / SUMS_NAME).write_text("".join(lines))
        verify_checksums(tmp_path, files)


def test_a_file_without_a_sum_is_named(files):
    write_sums(files[:1])
    with pytest.raises(CheckpointError, match="has no SHA-256 sum of model-2.safetensors"):
        verify_checksums(files[0].parent, files)


@pytest.mark.parametrize("right", ["list", "beside"])
def test_sums_that_contradict_each_other(files, right):
    """Whichever of them the file has: nobody can tell which of the two the publisher meant."""
    write_sums(files)
    listed = files[0].parent / SUMS_NAME
    beside = files[1].with_name(f"{files[1].name}.sha256")
    good, bad = sum_of(files[1].read_bytes()), sum_of(b"others")
    beside.write_text(good)
    verify_checksums(files[0].parent, files)
    if right == "list":
        beside.write_text(bad)
    else:
        listed.write_text(listed.read_text().replace(good, bad))
    with pytest.raises(CheckpointError, match="1 files should have .* is said in two ways") as raised:
        verify_checksums(files[0].parent, files)
    for part in (f"{files[1]}: ", f" by {SUMS_NAME}", f" by {beside.name}", good, bad):
        assert part in str(raised.value)
    assert str(files[0]) not in str(raised.value)


def test_a_list_that_contradicts_a_links_name(tmp_path):
    blob = tmp_path / sum_of(b"weights")
    blob.write_bytes(b"weights")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    (tmp_path / SUMS_NAME).write_text(f"{sum_of(b'others')}  model.safetensors\n")
    with pytest.raises(CheckpointError, match="by the name of the file that it links to"):
        verify_checksums(tmp_path, [link])


def test_a_list_that_is_none(files):
    (files[0].parent / SUMS_NAME).write_text("model-1.safetensors is fine\n")
    with pytest.raises(CheckpointError, match="line 1 is not a SHA-256 sum and a file name"):
        verify_checksums(files[0].parent, files)


def test_an_engine_that_is_asked_to_compares_first(tmp_path):
    directory = write_checkpoint(tmp_path, *make_model("single_layer"))
    with pytest.raises(CheckpointError, match="has no SHA-256 sum of model.safetensors"):
        LLM(str(directory), verify_checksums=True)
    file = directory / "model.safetensors"
    write_sums([file])
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="1 of 1 files do not have their SHA-256 sum"):
        LLM(str(directory), verify_checksums=True)
