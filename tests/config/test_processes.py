"""How many processes drive a mesh, which one this is, and where they meet."""

import pytest

from glm_dcp_jax.config import ConfigError, EngineConfig, ParallelConfig, ProcessConfig, engine_config


def test_one_process_needs_nothing():
    assert ProcessConfig() == ProcessConfig(1, 0, None)
    assert engine_config("m", tensor_parallel_size=8).devices_here == 8


def test_each_process_has_its_part_of_the_devices():
    config = engine_config(
        "m", tensor_parallel_size=8, num_processes=2, process_id=1, coordinator_address="[::1]:80"
    )
    assert config.devices_here == 4 and config.processes.coordinator_host == "::1"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0,), "num_processes must be an integer from 1 to 64, but is 0"),
        ((65, 0, "a:1"), "num_processes must be an integer from 1 to 64, but is 65"),
        ((2, 2, "a:1"), "process_id must be from 0 to 1, as num_processes is 2, but is 2"),
        ((1, 1), "process_id must be from 0 to 0"),
        ((2, -1, "a:1"), "process_id must be from 0 to 1"),
        ((1, 0, "a:1"), "coordinator_address is for several processes"),
        ((2, 0), "num_processes 2 needs coordinator_address: host:port"),
    ],
)
def test_numbers_that_cannot_be_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        ProcessConfig(*given)


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:65536", "a b:1", "::1:80"])
def test_an_address_is_a_host_and_a_port(address):
    with pytest.raises(ConfigError, match="coordinator_address must be host:port"):
        ProcessConfig(2, 0, address)


def test_the_devices_are_divided_evenly():
    with pytest.raises(ConfigError, match="num_processes 3 does not divide tensor_parallel_size 4"):
        EngineConfig("m", ParallelConfig(4), processes=ProcessConfig(3, 0, "a:1"))
