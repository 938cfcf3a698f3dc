"""Host memory while a checkpoint is converted, and while that is loaded: near a layer's, not all layers'."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_load_memory import EXPERTS, TENSOR_BYTES, many_experts  # noqa: F401

LAYER_BYTES = 3 * EXPERTS * TENSOR_BYTES
"""Of four: gate, up and down of its experts, 96 MiB."""

TWICE = """
import shutil, sys
from pathlib import Path
from glm_dcp_jax.environment import prepare
prepare(2)
import jax
import jax.numpy as jnp
from glm_dcp_jax.config import ModelConfig, ParallelConfig
from glm_dcp_jax.convert.command import main
from glm_dcp_jax.model.converted import open_checkpoint
from glm_dcp_jax.model.network import abstract_network
from glm_dcp_jax.model.restore import restore_parameters
from glm_dcp_jax.parallel.mesh import make_mesh

def resident(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

source, target = map(Path, sys.argv[1:])
shape = abstract_network(ModelConfig.load(source), jnp.dtype("float32"), 2)
mesh = make_mesh(ParallelConfig(2))
converting, loading = [], []
for _ in range(4):
    shutil.rmtree(target, ignore_errors=True)
    Path("/proc/self/clear_refs").write_text("5")
    begin = resident("VmRSS")
    assert main([str(source), str(target), "-tp", "2", "--dtype", "float32"]) == 0
    converting.append(resident("VmHWM") - begin)
for _ in range(3):
    Path("/proc/self/clear_refs").write_text("5")
    begin = resident("VmRSS")
    leaves = jax.tree.leaves(restore_parameters(open_checkpoint(target), shape, mesh))
    held = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    loading.append(resident("VmHWM") - begin - held)
    del leaves
# Compilation takes memory too, so the first round does not count; and of the others the allocator may keep some.
print(min(converting[1:]), min(loading[1:]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident memory is read from /proc")
def test_a_layer_at_a_time(many_experts, tmp_path):  # noqa: F811
    arguments = [sys.executable, "-c", TWICE, str(many_experts), str(tmp_path / "converted")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    converting, loading = map(int, done.stdout.splitlines()[-1].split())
    assert converting < 3 * LAYER_BYTES
    assert loading < 2 * LAYER_BYTES
