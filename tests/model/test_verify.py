"""Names and shapes of a checkpoint's weights against the model's."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from glm_dcp_jax.model.safetensors_reader import Checkpoint, CheckpointError, verify


def shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: checkpoint.info(name).shape for name in checkpoint.names()}


class TestVerify:
    @pytest.fixture
    def checkpoint(self, tmp_path) -> Checkpoint:
        save_file({"a": np.zeros((2, 3)), "b": np.zeros(4)}, tmp_path / "model.safetensors")
        return Checkpoint.open(tmp_path)

    def test_a_match_is_silent(self, checkpoint):
        verify({"a": (2, 3), "b": (4,)}, shapes(checkpoint), checkpoint.directory)

    def test_everything_wrong_is_listed_at_once(self, checkpoint):
        with pytest.raises(CheckpointError) as caught:
            verify({"a": (3, 2), "c": (1,), "d": ()}, shapes(checkpoint), checkpoint.directory)
        headline, *kinds = str(caught.value).splitlines()
        assert str(checkpoint.directory) in headline
        misshaped = "  1 mis-shaped: a is (2, 3) but should be (3, 2)"
        assert kinds == ["  2 missing: c, d", "  1 unexpected: b", misshaped]

    def test_long_lists_are_cut_and_counted(self, checkpoint):
        expected = {"a": (2, 3), "b": (4,)} | {f"layer.{n}": (1,) for n in range(25)}
        with pytest.raises(CheckpointError, match=r"25 missing: layer\.0, .*layer\.9 and 15 more$"):
            verify(expected, shapes(checkpoint), checkpoint.directory)

    @pytest.mark.parametrize("optional", [["mtp.w"], {"mtp.w"}, lambda name: name.startswith("mtp.")])
    def test_optional_tensors_may_be_absent(self, checkpoint, optional):
        verify(
            {"a": (2, 3), "b": (4,), "mtp.w": (9,)},
            shapes(checkpoint),
            checkpoint.directory,
            optional=optional,
        )

    def test_optional_tensors_must_have_their_shape(self, checkpoint):
        with pytest.raises(CheckpointError, match=r"b is \(4,\) but should be \(5,\)"):
            verify({"a": (2, 3), "b": (5,)}, shapes(checkpoint), checkpoint.directory, optional=["b"])

    def test_ignored_tensors_may_be_extra(self, checkpoint):
        verify({"a": (2, 3)}, shapes(checkpoint), checkpoint.directory, ignored=lambda name: name == "b")
        with pytest.raises(CheckpointError, match="1 unexpected: b"):
            verify({"a": (2, 3)}, shapes(checkpoint), checkpoint.directory, ignored=lambda name: name == "a")
