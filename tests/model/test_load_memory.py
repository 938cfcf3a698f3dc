"""Host memory while a checkpoint is loaded: near one tensor beside the parameters themselves."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "oracle"))

from random_models import BASE_CONFIG, tensor_shapes

from glm_dcp_jax.model import load

EXPERTS, WIDTH = 32, 512
TENSOR_BYTES = 4 * WIDTH * WIDTH  # in float32, as which it is loaded
STACK_BYTES = 2 * EXPERTS * TENSOR_BYTES  # gate and up of one layer's experts, 64 MiB

LOAD_TWICE = """
import sys
from pathlib import Path
from glm_dcp_jax.environment import prepare
prepare(2)
import jax
import jax.numpy as jnp
from glm_dcp_jax.config import ModelConfig, ParallelConfig
from glm_dcp_jax.model import load
from glm_dcp_jax.model.network import abstract_network
from glm_dcp_jax.model.stored_weights import StoredWeights
from glm_dcp_jax.model.safetensors_reader import Checkpoint
from glm_dcp_jax.parallel.mesh import make_mesh

def resident(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

directory = Path(sys.argv[1])
load.PIECE_BYTES, load.AHEAD_BYTES = int(sys.argv[2]), int(sys.argv[3])
config = ModelConfig.load(directory)
shape = abstract_network(config, jnp.dtype(sys.argv[4]), 2)
mesh = make_mesh(ParallelConfig(2))
for _ in range(2):  # compilation takes memory too: only the second round counts
    Path("/proc/self/clear_refs").write_text("5")
    begin = resident("VmRSS")
    loaded = load.load_parameters(StoredWeights(Checkpoint.open(directory)), config, shape, mesh)
    leaves = jax.block_until_ready(jax.tree.leaves(loaded))
    held = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    beside = resident("VmHWM") - begin - held
    del loaded, leaves
print(beside)
"""


@pytest.fixture(scope="module")
def many_experts(tmp_path_factory) -> Path:
    """Four MoE layers, stacked in one run."""
    return write_zeros(tmp_path_factory.mktemp("experts"), WIDTH, EXPERTS)


def write_zeros(directory: Path, width: int, experts: int) -> Path:
    """A checkpoint of zeros, which takes next to nothing on disk."""
    config = BASE_CONFIG | {
        "num_hidden_layers": 4,
        "first_k_dense_replace": 0,
        "index_topk_freq": 1,
        "hidden_size": width,
        "moe_intermediate_size": width,
        "n_routed_experts": experts,
    }
    header, end = {}, 0
    for name, shape in tensor_shapes(config).items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def peak_beside_parameters(
    directory: Path, piece_bytes: int, ahead_bytes: int = 1, dtype: str = "float32"
) -> int:
    """Peak resident bytes of a loading process, less what it had before and less the parameters."""
    arguments = [sys.executable, "-c", LOAD_TWICE, str(directory), str(piece_bytes), str(ahead_bytes), dtype]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident memory is read from /proc")
class TestMemory:
    def test_stacked_experts_take_little_more_than_a_tensor(self, many_experts):
        assert peak_beside_parameters(many_experts, piece_bytes=1) < STACK_BYTES / 3

    @pytest.mark.slow
    def test_pieces_that_are_read_ahead_are_bounded(self, many_experts):
        """In the allocator's arenas of eight threads, they take some more than their bytes."""
        assert peak_beside_parameters(many_experts, 1, ahead_bytes=8 * TENSOR_BYTES) < 48 * TENSOR_BYTES

    def test_in_one_piece_they_take_the_whole_stack(self, many_experts):
        """Shows that the measurement above can fail."""
        assert peak_beside_parameters(many_experts, piece_bytes=STACK_BYTES) > STACK_BYTES

    @pytest.mark.slow
    def test_two_gigabytes_take_less_than_half_of_one(self, tmp_path):
        directory = write_zeros(tmp_path, 1024, 84)
        stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        beside = peak_beside_parameters(directory, load.PIECE_BYTES, load.AHEAD_BYTES, "bfloat16")
        print(f"{beside / 2**20:.0f} MiB beside the parameters, for {stored / 1e9:.2f} GB")
        assert stored > 2e9 and beside < 0.5e9
