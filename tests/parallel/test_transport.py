"""Which transport an engine gets, and that it is never silently another than was asked for."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from glm_dcp_jax.config import ConfigError, ParallelConfig
from glm_dcp_jax.parallel import transport
from glm_dcp_jax.parallel.exchange import exchange
from glm_dcp_jax.parallel.mesh import make_mesh
from glm_dcp_jax.parallel.transport import choose_transport, compiler_options


class Gpu(NamedTuple):
    """What is asked of a device."""

    device_kind: str
    process_index: int = 0
    local_hardware_id: int = 0
    platform: str = "gpu"


H200S = [Gpu("NVIDIA H200", local_hardware_id=n) for n in range(4)]
RTXS = [Gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", local_hardware_id=n) for n in range(4)]


def test_auto_follows_the_link_and_says_so() -> None:
    assert choose_transport("auto", H200S)[0] == "direct"
    chosen = choose_transport("auto", RTXS)
    assert chosen.transport == "ce" and "PCIe" in chosen.reason
    chosen = choose_transport("auto", jax.devices())
    assert chosen.transport == "direct" and "CPU" in chosen.reason


def test_what_is_asked_for_is_what_comes() -> None:
    assert choose_transport("direct", RTXS).transport == "direct"
    assert choose_transport("ce", H200S).transport == "ce"


def test_copy_engines_that_cannot_be_had_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="ce cannot be had: .*CPU devices; use direct or auto"):
        choose_transport("ce", jax.devices())
    with pytest.raises(ConfigError, match="several processes"):
        choose_transport("ce", [*RTXS, Gpu("NVIDIA RTX PRO 6000", process_index=1)])
    monkeypatch.setattr(jax, "local_devices", lambda: RTXS)
    monkeypatch.setattr(transport, "_without_peer_access", lambda ordinals: f"none of {ordinals} can")
    with pytest.raises(ConfigError, match=r"none of \[0, 1, 2, 3\] can; use direct or auto"):
        choose_transport("ce", RTXS)
    assert choose_transport("auto", RTXS) == ("direct", "none of [0, 1, 2, 3] can")


def test_a_machine_without_a_driver_has_no_peer_access() -> None:
    """This one has none, or has GPUs that the question is for."""
    found = transport._without_peer_access([0, 1])
    assert found is None or "driver" in found or "cannot address" in found


@pytest.mark.parametrize("way", ["direct", "ce"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_an_exchange_brings_everybody_all_records_in_the_ranks_order(devices, world, way) -> None:
    mesh = make_mesh(ParallelConfig(4, world), devices(4))
    mine = np.arange(4 * 3 * 5, dtype=np.uint8).reshape(4 * 3, 5)
    spec = PartitionSpec(mesh.axis_names)
    program = jax.shard_map(
        lambda x: exchange(x, way), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    arrived = np.asarray(jax.jit(program)(mine)).reshape(4, world * 3, 5)
    for rank in range(4):
        first = rank // world * world
        np.testing.assert_array_equal(
            arrived[rank], mine.reshape(4, 3, 5)[first : first + world].reshape(-1, 5)
        )


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="dcp_transport 'nccl' is unknown; use one of auto, ce, direct"):
        ParallelConfig(dcp_transport="nccl")
    with pytest.raises(ConfigError, match="dcp_decode_path 'fast' is unknown; use one of auto, queries"):
        ParallelConfig(dcp_decode_path="fast")
    with pytest.raises(ConfigError, match="dcp_exchange_memory must be an integer of at least 1"):
        ParallelConfig(dcp_exchange_memory=0)


def test_options_are_for_gpus_only() -> None:
    assert compiler_options("direct", jax.devices()) == {}
    assert "xla_gpu_use_memcpy_local_p2p" not in compiler_options("direct", RTXS)
    assert compiler_options("ce", RTXS)["xla_gpu_use_memcpy_local_p2p"] is True
