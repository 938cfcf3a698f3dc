"""A checkpoint whose files change between the reading of their headers and the end of the load."""

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from glm_dcp_jax.model.safetensors_reader import Checkpoint, CheckpointError


def replaced(file: Path) -> None:
    """By another of the same size."""
    save_file({"w": np.full(3, 2.0)}, file.with_suffix(".new"))
    os.utime(file.with_suffix(".new"), ns=(0, 1))  # clocks may be coarse
    file.with_suffix(".new").replace(file)


def written_to(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(-8, os.SEEK_END)
        stream.write(bytes(8))
    os.utime(file, ns=(0, 1))


class TestFilesThatChange:
    """A download that goes on, say: what was read is of two versions, or of none."""

    CHANGES = (replaced, written_to, lambda file: os.truncate(file, 0), Path.unlink)
    IDS = ("replaced", "written to", "truncated", "removed")

    @pytest.fixture
    def checkpoint(self, tmp_path) -> Checkpoint:
        save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
        return Checkpoint.open(tmp_path)

    @pytest.mark.parametrize("change", CHANGES, ids=IDS)
    def test_before_they_are_first_read(self, checkpoint, change):
        change(checkpoint.files[0])
        said = (
            "cannot be opened any more" if change is Path.unlink else "was changed while it was being loaded"
        )
        with pytest.raises(CheckpointError, match=rf"model\.safetensors {said}"):
            checkpoint.read("w")

    @pytest.mark.parametrize("change", CHANGES, ids=IDS)
    def test_while_they_are_read(self, checkpoint, change):
        checkpoint.read("w")
        checkpoint.require_unchanged()
        change(checkpoint.files[0])
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors (was changed|cannot be opened any more)"
        ):
            checkpoint.require_unchanged()
