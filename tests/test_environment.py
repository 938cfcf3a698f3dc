"""`environment.prepare` in processes of its own, since jax reads these settings only once in each."""

import os
import subprocess
import sys

import pytest

JAX_SETTINGS = ("JAX_", "XLA_", "PJRT_", "CUDA_", "XDG_")
SHOWN = {"CUDA_VISIBLE_DEVICES": "0"}
REPORT = """
import jax
print(len(jax.devices()), jax.devices()[0].platform, os.environ["PJRT_NPROC"], os.environ["XLA_FLAGS"])
"""


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process with none of this process's jax settings, and `variables` set."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(JAX_SETTINGS)}
    code = "import os\nfrom glm_dcp_jax.environment import has_nvidia_gpu, prepare\n" + code
    return subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | {"CUDA_VISIBLE_DEVICES": ""} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def output(code: str, **variables: str) -> list[str]:
    done = run(code, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_virtual_devices_and_threads_for_them():
    flag = "--xla_force_host_platform_device_count=4"
    assert output("prepare(4)" + REPORT) == ["4", "cpu", "32", flag]


def test_other_flags_are_kept_and_a_smaller_count_is_raised():
    count, other = "--xla_force_host_platform_device_count=", "--xla_cpu_enable_fast_math=false"
    seen = output("prepare(3)" + REPORT, XLA_FLAGS=f"{count}2 {other}", PJRT_NPROC="64")
    assert seen == ["3", "cpu", "64", other, f"{count}3"]


def test_more_devices_than_needed_are_kept():
    flag = "--xla_force_host_platform_device_count=6"
    assert output("prepare(4)" + REPORT, XLA_FLAGS=flag, PJRT_NPROC="2") == ["6", "cpu", "32", flag]


def test_more_virtual_devices_than_a_machine_bears_are_refused():
    done = run("prepare(65)")
    assert "ConfigError: 65 virtual CPU devices would take this machine down" in done.stderr
    assert "at most 64" in done.stderr
    assert output("prepare(64)\nprint(os.environ['PJRT_NPROC'])") == ["256"]


def test_one_device_needs_nothing():
    code = "prepare(1)\nprint(os.environ.get('XLA_FLAGS'), os.environ.get('PJRT_NPROC'))"
    assert output(code) == ["None", "None"]


def test_a_jax_that_is_imported_but_not_started_is_told():
    assert output("import jax\nprepare(4)" + REPORT)[:2] == ["4", "cpu"]


def test_a_jax_that_has_started_with_too_few_devices_is_refused():
    done = run("import jax\njax.devices()\nprepare(4)")
    assert "ConfigError: 4 devices are needed, but jax has already started with 1" in done.stderr
    assert "PJRT_NPROC=32 and XLA_FLAGS=--xla_force_host_platform_device_count=4" in done.stderr


def test_a_jax_that_has_started_with_enough_devices_and_too_few_threads_warns():
    flag = "--xla_force_host_platform_device_count=4"
    done = run("import jax\njax.devices()\nprepare(4)", XLA_FLAGS=flag, PJRT_NPROC="2")
    assert done.returncode == 0
    assert "may hang. Set PJRT_NPROC=32" in done.stderr


@pytest.mark.parametrize("imported", ["", "import jax\n"])
def test_compiled_programs_are_cached_between_processes(tmp_path, imported):
    code = imported + "prepare(1)\nimport jax\nprint(jax.config.jax_compilation_cache_dir)"
    code += "\nprint(jax.config.jax_persistent_cache_min_compile_time_secs)"
    folder = tmp_path / "glm_dcp_jax" / "xla"
    assert output(code, XDG_CACHE_HOME=str(tmp_path)) == [str(folder), "0.3"]
    assert folder.is_dir()


def test_the_users_cache_settings_win(tmp_path):
    code = "prepare(1)\nimport jax\nprint(jax.config.jax_compilation_cache_dir)"
    code += "\nprint(jax.config.jax_persistent_cache_min_compile_time_secs)"
    settings = {
        "JAX_COMPILATION_CACHE_DIR": "elsewhere",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "2",
    }
    assert output(code, **settings) == ["elsewhere", "2.0"]
    code = "import jax\njax.config.update('jax_compilation_cache_dir', 'mine')\n" + code
    assert output(code, XDG_CACHE_HOME=str(tmp_path)) == ["mine", "0.3"]


def test_a_cache_folder_that_cannot_be_made_is_done_without(tmp_path):
    (tmp_path / "file").touch()
    code = "prepare(1)\nimport jax\nprint(jax.config.jax_compilation_cache_dir)"
    assert output(code, XDG_CACHE_HOME=str(tmp_path / "file")) == ["None"]


HIDDEN = [{"JAX_PLATFORMS": "cpu"}, {"CUDA_VISIBLE_DEVICES": "-1"}, {"CUDA_VISIBLE_DEVICES": ""}]


@pytest.mark.parametrize("variables", HIDDEN)
def test_no_gpu_where_the_user_hides_it(variables):
    code = "import pathlib\npathlib.Path.glob = lambda self, pattern: iter([self / 'nvidia0'])\n"
    code += "print(has_nvidia_gpu())"
    assert output(code, **SHOWN) == ["True"]
    assert output(code, **SHOWN | variables) == ["False"]


def test_a_gpu_without_a_jax_for_it_is_an_error_that_says_what_to_install():
    pretend = (
        "import glm_dcp_jax.environment as environment\n"
        "environment.has_nvidia_gpu = lambda: True\nenvironment.find_spec = lambda name: None\n"
    )
    done = run(pretend + "prepare(4)")
    assert "ConfigError: this machine has an NVIDIA GPU, but jax is installed without CUDA" in done.stderr
    assert "glm-dcp-jax[cuda13]" in done.stderr


def test_jax_may_take_the_share_of_a_gpu_that_was_asked_for():
    fake = "from glm_dcp_jax import environment\nenvironment.has_nvidia_gpu = lambda: True\n"
    fake += "environment.find_spec = lambda name: name\n"
    ask = "environment.prepare(1, 0.85)\nprint(environment.gpu_memory_fraction())"
    assert output(fake + ask) == ["0.85"]
    assert output(fake + ask, XLA_PYTHON_CLIENT_MEM_FRACTION="0.5") == ["0.5"]
    assert output(fake + "print(environment.gpu_memory_fraction())") == ["0.75"]
