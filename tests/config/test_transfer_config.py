"""--kv-transfer-config: what it takes, and what it says of what it does not."""

import pytest

from glm_dcp_jax.config import ConfigError, engine_config
from glm_dcp_jax.config.transfer import TransferConfig


def test_vllm_s_own_example_is_enough():
    config = TransferConfig.from_object({"kv_connector": "tcp", "kv_role": "kv_producer"})
    assert config.produces and not config.consumes and config.on_loopback and config.secret == b""
    assert (config.kv_load_failure_policy, config.number("lease_seconds"), config.check_model) == (
        "fail",
        30,
        True,
    )


def test_roles():
    roles = {"kv_producer": (True, False), "kv_consumer": (False, True), "kv_both": (True, True)}
    configs = {role: TransferConfig("tcp", role) for role in roles}
    assert {role: (config.produces, config.consumes) for role, config in configs.items()} == roles


WRONG = {
    "kv_connector is missing": {},
    "kv_connector 'p2p' is unknown; use one of tcp": {"kv_connector": "p2p"},
    'kv_connector "NixlConnector" is called nixl here': {"kv_connector": "NixlConnector"},
    "kv_role 'both' is unknown": {"kv_connector": "tcp", "kv_role": "both"},
    "there is no key 'kv_conector'": {"kv_conector": "tcp"},
    "kv_rank is not supported: any number": {"kv_connector": "tcp", "kv_rank": 0},
    "kv_port must be an integer from 0 to 65535": {"kv_connector": "tcp", "kv_port": 65536},
    "kv_port must be an integer": {"kv_connector": "tcp", "kv_port": "5600"},
    "kv_ip must be": {"kv_connector": "tcp", "kv_ip": ""},
    "kv_ip 0.0.0.0 can be reached from other machines, so both sides must share a secret": {
        "kv_connector": "tcp",
        "kv_ip": "0.0.0.0",
    },
    "kv_load_failure_policy 'retry' is unknown; use one of fail, recompute": {
        "kv_connector": "tcp",
        "kv_load_failure_policy": "retry",
    },
    "engine_id must be a text": {"kv_connector": "tcp", "engine_id": 7},
    "kv_connector_extra_config must be an object": {"kv_connector": "tcp", "kv_connector_extra_config": []},
}
EXTRA = {
    "has no key 'lease'": {"lease": 3},
    "lease_seconds must be a number of seconds above 0": {"lease_seconds": 0},
    "lease_seconds must be": {"lease_seconds": float("nan")},
    "transfer_seconds must be": {"transfer_seconds": True},
    "loads must be an integer from 1": {"loads": 0},
    "piece_bytes must be an integer from 4096": {"piece_bytes": 1},
    "check_model must be true or false": {"check_model": 1},
    "secret_file 'nowhere' is no file": {"secret_file": "nowhere"},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_is_refused_by_name(message):
    with pytest.raises(ConfigError, match="^kv_transfer_config: ") as caught:
        TransferConfig.from_object(WRONG[message])
    assert message in str(caught.value)


@pytest.mark.parametrize("message", EXTRA)
def test_so_is_what_cannot_be_in_the_extra_config(message):
    with pytest.raises(ConfigError) as caught:
        TransferConfig("tcp", kv_connector_extra_config=EXTRA[message])
    assert message in str(caught.value)


def test_a_secret_opens_other_addresses(tmp_path):
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    config = TransferConfig("tcp", kv_ip="10.0.0.1", kv_connector_extra_config={"secret_file": str(path)})
    assert config.secret == b"0123456789abcdef" and not config.on_loopback
    path.write_text("short")
    with pytest.raises(ConfigError, match="fewer than 16 bytes"):
        TransferConfig("tcp", kv_connector_extra_config={"secret_file": str(path)})


def test_it_is_a_flag_of_the_engine():
    given = '{"kv_connector": "tcp", "kv_role": "kv_consumer"}'
    config = engine_config("m", kv_transfer_config=given)
    assert config.transfer == TransferConfig("tcp", "kv_consumer")
    assert hash(config) is not None
    with pytest.raises(ConfigError, match="kv_transfer_config is not valid JSON"):
        engine_config("m", kv_transfer_config="{")


def test_several_processes_cannot_have_it():
    with pytest.raises(ConfigError, match="needs an engine of one process, but num_processes is 2"):
        engine_config(
            "m",
            kv_transfer_config={"kv_connector": "tcp"},
            tensor_parallel_size=2,
            num_processes=2,
            coordinator_address="127.0.0.1:1",
        )
