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
        ("0xH200", "0 GPUs do not make one host"),
        ("9xH200", "9 GPUs do not make one host"),
    ],
)
def test_what_is_not_a_target_is_refused_with_what_would_be(name, complaint):
    with pytest.raises(ConfigError, match=complaint) as refused:
        plan.target(name)
    assert "count of 1 to 8 and one of B200, H200, RTX-PRO-6000" in str(refused.value)


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
