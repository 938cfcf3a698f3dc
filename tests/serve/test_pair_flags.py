"""The command line of a pair: flags for both servers, for one of them, and what it adds itself."""

import pytest

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.serve import flags as server_flags
from glm_dcp_jax.serve.pair.flags import ROLES, parse


def configs(*argv: str, has_gpu: bool = False) -> list:
    """What the prefill and the decode server make of their flags."""
    servers = parse(argv, has_gpu).servers
    return [server_flags.parse(servers[role], has_gpu).config for role in ROLES]


def layouts(*argv: str) -> list[tuple[int, int]]:
    parallel = [config.parallel for config in configs(*argv)]
    return [(each.tensor_parallel_size, each.decode_context_parallel_size) for each in parallel]


def test_the_built_in_model_lies_differently_on_both_sides():
    assert layouts() == [(2, 1), (4, 4)]


def test_layouts_can_be_given_for_both_and_for_one():
    assert layouts("-tp", "2", "-dcp", "2") == [(2, 2), (2, 2)]
    assert layouts("model", "-tp", "4", "--prefill", "-dcp 2", "--decode=-dcp 4") == [(4, 2), (4, 4)]
    assert layouts("--decode", "-tp=8 -dcp=2") == [(2, 1), (8, 2)]


def test_flags_and_a_model_go_to_both():
    both = configs("somewhere/glm", "--max-model-len", "512", "--decode", "--max_num_seqs=3")
    assert [config.model for config in both] == ["somewhere/glm"] * 2
    assert [config.scheduler.max_model_len for config in both] == [512, 512]
    assert [config.scheduler.max_num_seqs for config in both][1] == 3


@pytest.mark.parametrize(
    "given",
    [
        ["--kv-transfer-config", '{"kv_connector": "nixl", "kv_ip": "localhost", "kv_role": "kv_both"}'],
        ["--kv-transfer-config.kv_connector", "nixl", "--kv-transfer-config.kv_ip", "localhost"],
        ["--kv_transfer_config.kv_connector=nixl", '--kv-transfer-config={"kv_ip": "localhost"}'],
    ],
    ids=["object", "keys", "both"],
)
def test_how_caches_travel_is_said_once_and_the_roles_are_added(given):
    prefill, decode = (config.transfer for config in configs("model", *given))
    assert (prefill.kv_role, decode.kv_role) == ("kv_producer", "kv_consumer")
    assert {(each.kv_connector, each.kv_ip) for each in (prefill, decode)} == {("nixl", "localhost")}


def test_caches_travel_over_tcp_unless_something_else_is_said():
    assert {config.transfer.kv_connector for config in configs("model")} == {"tcp"}


def test_devices_are_of_one_server():
    assert parse(["model", "--decode-devices", "2,3"], has_gpu=True).devices == {"decode": "2,3"}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--no-such-flag"], "the prefill server: unknown flag --no-such-flag"),
        (["--decode", "--no-such-flag"], "the decode server: unknown flag --no-such-flag"),
        (["-tp", "4", "--decode", "-dcp 3"], "the decode server: .*does not divide --tensor-parallel-size 4"),
        (["--prefill", "--port 9"], "--prefill must not hold --port"),
        (["--decode", "'"], '--decode "\'" cannot be split'),
        (["--port", "70000"], "--port must be from 0"),
        (["--port", "x"], "--port: invalid int value: 'x'"),
        (["--kv-transfer-config", "[1]"], "must be a JSON object"),
        (["--kv-transfer-config", "{"], "--kv-transfer-config is not valid JSON"),
        (["--kv-transfer-config", '{"kv_connector": "inproc"}'], "use tcp, nixl or jax"),
        (["--kv-transfer-config", '{"kv_connector": "smoke"}'], "kv_connector 'smoke' is unknown"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_said_before_anything_is_started(argv, says):
    with pytest.raises(ConfigError, match=says):
        parse(argv, has_gpu=False)
