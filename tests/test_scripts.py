"""scripts/serve and scripts/test: what they install, when, and what they start. Then what the DCP scripts refuse.

The interpreter is a stand-in that notes its arguments and installs nothing; the shell scripts are the real ones.
"""

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glm_dcp_jax import plan

ROOT = Path(__file__).parent.parent
PYTHON = """#!/bin/sh
case "$1 $2 $3" in
    "-m venv --clear") echo venv >>"$NOTES"; rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
    "-m pip install")
        for last; do :; done
        case $last in
            nixl*) [ -z "${NIXL_NOTED-}" ] || echo "$*" >>"$NOTES"; exit "${NIXL_EXIT:-0}" ;;
        esac
        echo "install $last" >>"$NOTES"; exit "${PIP_EXIT:-0}" ;;
    "-m pip --version" | "-I -c "* | "-V "*) ;;
    "-c import sys, venv"*) exit "${OLD:-0}" ;;
    *) echo "$@" ;;
esac
"""


class Checkout:
    """A copy of the scripts, with stand-ins for Python and for nvidia-smi first on PATH."""

    def __init__(self, root: Path) -> None:
        self.root, self.notes, self.programs = root, root / "notes", root / "programs"
        shutil.copytree(ROOT / "scripts", root / "scripts")
        (root / "pyproject.toml").write_text("[project]\n")
        self.notes.touch()
        self.programs.mkdir()
        self.program("python3.13", PYTHON)
        self.driver("")

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def driver(self, version: str) -> None:
        self.program("nvidia-smi", f"#!/bin/sh\necho {version}\n")

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        variables = {"PATH": f"{self.programs}:{os.environ['PATH']}", "NOTES": str(self.notes)} | variables
        command = [self.root / "scripts" / script, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=60)

    def done(self, script: str, **variables: str) -> list[str]:
        """What one run of a script did to .venv: its calls of `venv` and of `pip install`."""
        self.notes.write_text("")
        self.run(script, **variables)
        return self.notes.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "a checkout"
    root.mkdir()
    return Checkout(root)


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="NIXL is installed on Linux x86_64"
)
class TestNixl:
    def test_it_is_there_for_tests_only_and_without_what_it_wants_besides(self, checkout):
        assert checkout.done("serve", NIXL_NOTED="yes") == ["venv", "install ."]
        (_, nixl) = checkout.done("test", NIXL_NOTED="yes")
        assert "--no-deps" in nixl and nixl.endswith("nixl-cu12==1.5.1")

    def test_without_it_the_install_is_not_done(self, checkout):
        failed = checkout.run("test", NIXL_EXIT="1")
        assert failed.returncode == 1 and "error: NIXL could not be installed" in failed.stderr
        assert checkout.done("test") == ["venv", "install .[aot,test]"]


def test_arguments_are_handed_on(checkout):
    served = checkout.run("serve", "a model", "--port", "1")
    assert served.stdout == "-m glm_dcp_jax.serve a model --port 1\n"
    tested = checkout.run("test", "-k", "a or b")
    assert tested.stdout == "-m pytest -n 2 --dist loadfile --no-loadscope-reorder -k a or b\n"


@pytest.mark.parametrize(
    "chosen", ["pyproject.toml", "tests/x.py::test", "-s", "--pdb", "-n0", "--platform=gpu"]
)
def test_chosen_tests_run_in_one_process(checkout, chosen):
    assert checkout.run("test", chosen).stdout == f"-m pytest {chosen}\n"


def test_the_first_start_installs_and_the_second_does_not(checkout):
    assert checkout.done("serve") == ["venv", "install ."]
    assert checkout.done("serve") == []


def test_what_is_installed_already_is_kept_when_more_is_needed(checkout):
    assert checkout.done("serve") == ["venv", "install ."]
    assert checkout.done("test") == ["install .[aot,test]"]
    assert checkout.done("serve") == []
    (checkout.root / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    assert checkout.done("serve") == ["install .[aot,test]"]


@pytest.mark.parametrize(
    ("driver", "extras"), [("580.65.06", "cuda13"), ("575.1", "cuda12"), ("525.60.13", "cuda12")]
)
def test_a_gpu_gets_the_jax_that_its_driver_can_run(checkout, driver, extras):
    checkout.driver(driver)
    assert checkout.done("serve") == ["venv", f"install .[{extras}]"]
    assert checkout.done("test") == [f"install .[{extras},test]"]


def test_a_driver_that_is_too_old_gets_cpu_jax_and_a_word_why(checkout):
    checkout.driver("470.1")
    assert "NVIDIA driver 470.1 is too old" in checkout.run("serve").stderr
    assert checkout.notes.read_text() == "venv\ninstall .\n"


def test_a_gpu_that_appears_later_gets_a_venv_of_its_own(checkout):
    checkout.done("test")
    checkout.driver("580.1")
    assert checkout.done("test") == ["venv", "install .[cuda13,test]"]


def test_an_install_that_failed_is_said_and_done_anew(checkout):
    failed = checkout.run("serve", PIP_EXIT="1")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "the install failed" in failed.stderr
    assert checkout.done("serve") == ["venv", "install ."]
    assert checkout.done("serve") == []


def test_a_venv_made_by_hand_is_installed_into(checkout):
    made = checkout.root / ".venv" / "bin" / "python"
    made.parent.mkdir(parents=True)
    shutil.copy(checkout.programs / "python3.13", made)
    assert checkout.done("test") == ["install .[aot,test]"]


def test_a_venv_whose_python_is_gone_is_made_anew(checkout):
    checkout.done("serve")
    (checkout.root / ".venv" / "bin" / "python").unlink()
    assert checkout.done("serve") == ["venv", "install ."]


def test_a_checkout_that_was_moved_is_installed_again(checkout):
    checkout.done("serve")
    moved = checkout.root.parent / "moved"
    checkout.root.rename(moved)
    checkout.root, checkout.programs, checkout.notes = moved, moved / "programs", moved / "notes"
    assert checkout.done("serve") == ["install ."]


def test_without_a_fitting_python_it_says_what_to_install(checkout):
    failed = checkout.run("test", PYTHON="python3.13", OLD="1")
    assert failed.returncode == 1
    assert "no Python 3.11 to 3.13" in failed.stderr
    assert "PYTHON=path" in failed.stderr


def test_two_at_once_install_once(checkout):
    checkout.program("python3.13", PYTHON.replace('echo "install', 'sleep 1; echo "install'))
    command = [checkout.root / "scripts" / "test"]
    variables = {"PATH": f"{checkout.programs}:{os.environ['PATH']}", "NOTES": str(checkout.notes)}
    both = [subprocess.Popen(command, env=variables, stderr=subprocess.PIPE) for _ in range(2)]
    said = b"".join(process.communicate(timeout=60)[1] for process in both)
    assert checkout.notes.read_text().splitlines() == ["venv", "install .[aot,test]"]
    assert said.count(b"waiting for another install") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--dcp 100000", "--dcp must be at most 64"),
        (
            "--dcp 2 1",
            "--dcp 1 leaves nothing to exchange, so that all paths are the same program; use 2 or more",
        ),
        ("--concurrency 100000000", "--concurrency must be at most 1024"),
        ("--contexts 1000000000", "--contexts must be at most 131072"),
        ("--mtp 8", "--mtp must be at most 7"),
    ],
)
def test_a_bench_that_makes_no_sense_is_refused(flags, message):
    done = run_script("bench_dcp.py", *flags.split())
    assert done.returncode == 2 and message in done.stderr


def test_a_bench_whose_figures_cannot_be_written_is_not_begun(tmp_path):
    (tmp_path / "dcp.json").mkdir()
    done = run_script("bench_dcp.py", "--dcp", "2", "--output", str(tmp_path))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("bench_dcp: ") and "dcp.json" in done.stderr


def test_a_bench_beyond_the_machines_memory_is_refused(tmp_path):
    flags = "--dcp 2 --contexts 131072 --concurrency 1024"
    done = run_script("bench_dcp.py", *flags.split())
    assert done.returncode == 2
    assert "this machine has" in done.stderr
    assert done.stderr.endswith("; lower --contexts 131072 and --concurrency 1024\n")


@pytest.mark.parametrize(
    ("command", "begins"),
    [("bench_dcp.py --dcp 2", "| conc. |"), ("dcp_schedule.py --target 2xH200", "compiling queries")],
)
def test_an_interrupt_ends_a_script_at_once_and_in_one_line(command, begins):
    """It comes while XLA compiles, which Python cannot interrupt."""
    if command.startswith("dcp_schedule") and plan.compiler_plugin() is None:
        pytest.skip("compiles for GPUs that are not here: needs the extra [aot]")
    script, *flags = command.split()
    process = subprocess.Popen(
        [sys.executable, f"scripts/{script}", *flags],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while begins not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=5)
    assert process.returncode == 130
    assert said.splitlines()[-1] == f"{script.removesuffix('.py')}: interrupted" and "Traceback" not in said


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One of the Python scripts, without a GPU."""
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, f"scripts/{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120)
