"""Targets by name, their figures, and devices for GPUs that are not here."""

import pytest

from glm_dcp_jax import plan
from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.plan import gpus


@pytest.mark.parametrize(
    ("name", "gpu", "count"),
    [
        ("8xH200", "H200", 8),
        ("8 x h200", "H200", 8),
        ("1XB200", "B200", 1),
        ("4xRTX-PRO-6000", "RTX-PRO-6000", 4),
        ("4xrtx_pro_6000", "RTX-PRO-6000", 4),
        (" 4x RTX Pro 6000", "RTX-PRO-6000", 4),
    ],
)
def test_a_target_has_a_count_and_a_gpu(name, gpu, count):
    found = plan.target(name)
    assert (found.gpu, found.count, str(found)) == (gpu, count, f"{count}x{gpu}")


def test_figures_are_those_of_the_data_sheets():
    figures = {}
    for gpu in plan.known_gpus():
        found = plan.target(f"1x{gpu}")
        figures[gpu] = (
            found.compute_capability,
            round(found.memory_bytes / 2**30, 1),
            found.memory_bandwidth / 1e12,
            found.shared_memory_per_block,
            found.multiprocessors,
        )
    assert figures == {
        "B200": ((10, 0), 178.4, 8.0, 232_448, 148),
        "H200": ((9, 0), 140.4, 4.8, 232_448, 132),
        "RTX-PRO-6000": ((12, 0), 95.6, 1.792, 101_376, 188),
    }


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("8xH300", "no GPU 'H300' is known"),
        ("H200", "'H200' does not name GPUs"),
        ("x8", "'x8' does not name GPUs"),
        (f"{'9' * 5000}xH200", "does not name GPUs"),
        ("0xH200", "0 GPUs do not make one host"),
        ("9xH200", "9 GPUs do not make one host"),
    ],
)
def test_what_is_not_a_target_is_refused_with_what_would_be(name, complaint):
    with pytest.raises(ConfigError, match=complaint) as refused:
        plan.target(name)
    assert "count of 1 to 8 and one of B200, H200, RTX-PRO-6000" in str(refused.value)


@pytest.fixture
def described(tmp_path):
    """A target by H200's description with one line changed."""

    def read(line: str, instead: str) -> gpus.Target:
        text = (gpus._TEXTS / "h200.txtpb").read_text()
        assert text.count(f"  {line}\n") == 1
        (tmp_path / "mine.txtpb").write_text(text.replace(f"  {line}\n", f"{instead}\n"))
        return plan.target(f"8x{tmp_path / 'mine.txtpb'}")

    return read


@pytest.mark.parametrize(
    "instead",
    [
        "  core_count: 132  ",
        "core_count :132 # core_count: 131",
        "  # core_count: 131\n  core_count: 132",
        '  platform: "core_count: 131 #" core_count: 132',
    ],
)
def test_a_description_is_read_as_xla_reads_it(described, instead):
    assert described("core_count: 132", instead).multiprocessors == 132


CORES, MEMORY, CAPABILITY = (
    "core_count: 132",
    "device_memory_size: 150754820096",
    "cuda_compute_capability { major: 9 }",
)


@pytest.mark.parametrize(
    ("line", "instead", "complaint"),
    [
        (CORES, "core_count: 0", "core_count must be an integer from 1 to 100000, but is '0'"),
        (CORES, "core_count: -4", "core_count must be .* but is '-4'"),
        (CORES, "core_count: 132.5", "core_count must be .* but is '132.5'"),
        (CORES, "core_count: many", "core_count must be .* but is 'many'"),
        (CORES, "# core_count: 132", "it lacks core_count; copy one of"),
        (CORES, "core_count: 132\ncore_count: 131", "core_count is given 2 times; leave one"),
        (MEMORY, "device_memory_size: 0", "device_memory_size must be an integer from 1073741824 to"),
        (
            MEMORY,
            f"device_memory_size: {'9' * 5000}",
            f"device_memory_size must be .* but is '{'9' * 40}...'",
        ),
        ("memory_bandwidth: 4800000000000", "memory_bandwidth: 0", "memory_bandwidth must be .* but is '0'"),
        ("shared_memory_per_block_optin: 232448", "", "it lacks shared_memory_per_block_optin"),
        (CAPABILITY, "cuda_compute_capability { minor: 9 }", "it lacks cuda_compute_capability { major"),
        (
            CAPABILITY,
            "cuda_compute_capability { major: 0 }",
            "capability's major must be .* from 5 to 99, but is '0'",
        ),
        (CAPABILITY, f"{CAPABILITY}\n{CAPABILITY}", "capability's major is given 2 times"),
        ("threads_per_warp: 32", "threads_per_warp: 0", "threads_per_warp must be .* but is '0'"),
        ("fpus_per_core: 128", "", "it lacks fpus_per_core"),
        ("clock_rate_ghz: 1.98", "clock_rate_ghz: 0", "clock_rate_ghz must be a number from 0.01 to 100.0"),
        ("clock_rate_ghz: 1.98", "clock_rate_ghz: nan", "clock_rate_ghz must be a number .* but is 'nan'"),
    ],
)
def test_what_no_gpu_can_have_is_refused_with_what_one_can(described, line, instead, complaint):
    with pytest.raises(ConfigError, match=complaint) as refused:
        described(line, instead)
    assert len(str(refused.value)) < 400


@pytest.mark.usefixtures("cuda_compiler")
def test_what_xla_does_not_understand_is_told_apart_from_what_lacks(described):
    with pytest.raises(ConfigError, match="MINE is no description of a GPU: XLA cannot read it"):
        plan.devices(described("core_count: 132", "  core_count: 132\n  cores_of_another_kind: 1"))


def test_a_path_that_cannot_be_is_refused():
    with pytest.raises(
        ConfigError, match=r"description 'none\\x00.txtpb' cannot be read \(embedded null byte\)"
    ):
        plan.target("8xnone\0.txtpb")


@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("8xH200", "NVIDIA H200"),
        ("2xB200", "NVIDIA B200"),
        ("1xRTX-PRO-6000", "NVIDIA RTX PRO 6000 Blackwell"),
    ],
)
def test_devices_are_as_many_of_that_kind_and_the_same_at_every_call(name, kind):
    found = plan.devices(name)
    assert [device.device_kind for device in found] == [kind] * int(name[0])
    assert plan.devices(plan.target(name)) == found


def test_without_the_compiler_the_extra_to_install_is_named(monkeypatch):
    monkeypatch.setattr(gpus, "compiler_plugin", lambda: None)
    with pytest.raises(ConfigError, match=r"cannot compile for 7xB200.*the extra \[aot\]"):
        plan.devices("7xB200")  # a target that no other test uses: devices are remembered
