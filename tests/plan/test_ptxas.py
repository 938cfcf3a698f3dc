"""Finding ptxas and reading what it says, with stand-ins of known words; test_compile.py runs the real one."""

from pathlib import Path

import pytest

from glm_dcp_jax.plan import KernelResources, PtxKernel, assemble, find_ptxas, ptxas

KERNEL = PtxKernel("attend", ".version 8.8\n.target sm_120\n.visible .entry attend(\n)\n{\n}\n")
SAYS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_120'
ptxas info    : Function properties for other
    999 bytes stack frame, 999 bytes spill stores, 999 bytes spill loads
ptxas info    : Used 99 registers, used 1 barriers, 999 bytes cumulative stack size, 999 bytes smem
ptxas info    : Compiling entry function 'attend' for 'sm_120'
ptxas info    : Function properties for attend
    24 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 4096 bytes smem, 380 bytes cmem[0]
"""


def stand_in(folder: Path, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ptxas"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def only_what_the_test_puts_there(monkeypatch):
    monkeypatch.setattr(ptxas, "_PACKAGES", ())
    monkeypatch.setattr(ptxas, "_TOOLKIT", Path("no-toolkit"))
    monkeypatch.delenv("CUDA_HOME", raising=False)


def test_ptxas_is_looked_for_in_cuda_home_then_on_the_path_then_in_the_toolkit(monkeypatch, tmp_path):
    home, path, toolkit = (stand_in(tmp_path / name / "bin", "") for name in ("home", "path", "toolkit"))
    monkeypatch.setattr(ptxas, "_TOOLKIT", toolkit.parent)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_ptxas() == toolkit
    monkeypatch.setenv("PATH", str(path.parent))
    assert find_ptxas() == path
    monkeypatch.setenv("CUDA_HOME", str(home.parent.parent))
    assert find_ptxas() == home


def test_without_ptxas_there_are_no_resources(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_ptxas() is None
    assert assemble([KERNEL]) is None


def test_resources_are_those_of_the_named_kernel(monkeypatch, tmp_path):
    (tmp_path / "says").write_text(SAYS)
    stand_in(tmp_path / "bin", f"cat {tmp_path}/says >&2")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert assemble([KERNEL]) == {"attend": KernelResources(255, 8, 16, 24, 4096)}


def test_ptxas_is_given_the_kernel_and_its_architecture(monkeypatch, tmp_path):
    stand_in(
        tmp_path / "bin",
        f'cp "$3" {tmp_path}/seen.ptx; echo "$2" >{tmp_path}/seen.arch; cat {tmp_path}/says >&2',
    )
    (tmp_path / "says").write_text(SAYS)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assemble([KERNEL])
    assert (tmp_path / "seen.ptx").read_text() == KERNEL.text
    assert (tmp_path / "seen.arch").read_text().strip() == "-arch=sm_120"


def test_what_ptxas_refuses_is_an_error_with_its_words(monkeypatch, tmp_path):
    stand_in(tmp_path / "bin", "echo 'Unsupported .version 9.9' >&2; exit 255")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"cannot assemble attend for sm_120.*Unsupported \.version 9\.9"):
        assemble([KERNEL])
