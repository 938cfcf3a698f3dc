"""The highest logit of a vocabulary that is split over devices: as numpy finds it in the whole."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from glm_dcp_jax.config import ParallelConfig
from glm_dcp_jax.parallel.mesh import TENSOR_AXES, make_mesh
from glm_dcp_jax.parallel.vocabulary import highest

VOCAB = 29


def highest_of(logits: np.ndarray, tp: int, dcp: int) -> np.ndarray:
    """logits: [rows, VOCAB]; padding is higher than all of them, as zeros are where all logits are negative."""
    padded = np.full((len(logits), -(-VOCAB // tp) * tp), 1e30, np.float32)
    padded[:, :VOCAB] = logits
    mesh = make_mesh(ParallelConfig(tp, dcp))
    split = P(None, TENSOR_AXES)
    find = jax.shard_map(
        lambda own: highest(own, VOCAB), mesh=mesh, in_specs=split, out_specs=P(), check_vma=False
    )
    return np.asarray(jax.jit(find)(padded))


@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (3, 3), (4, 2), (8, 1)])
def test_it_is_the_lowest_of_the_highest(devices, tp, dcp):
    devices(tp)
    logits = np.random.default_rng(0).standard_normal((64, VOCAB)).astype(np.float32)
    ties = np.round(logits)  # several tokens on several devices
    for given in (logits, ties, ties - 100):
        np.testing.assert_array_equal(highest_of(given, tp, dcp), given.argmax(axis=1))


def test_nan_is_no_highest_and_a_row_of_nothing_else_gives_a_token(devices):
    devices(4)
    logits = np.full((3, VOCAB), np.nan, np.float32)
    logits[0, [5, 20]] = -7
    logits[1, :] = -np.inf
    assert highest_of(logits, 4, 2).tolist() == [5, 0, 0]
