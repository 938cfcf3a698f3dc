"""Answers into pipes that nobody reads, and onto full disks."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from glm_dcp_jax.plan.output import CLOSED

FULL = Path("/dev/full")
PUT_OUT = "import sys; from glm_dcp_jax.plan.output import put_out; sys.exit(put_out('answer\\n' * int(sys.argv[1])))"


def put_out(lines: int, stdout) -> tuple[int, str]:
    """Exit code of a process that answers so much, and what it said on stderr."""
    command = [sys.executable, "-c", PUT_OUT, str(lines)]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, "".join(line for line in done.stderr.splitlines(True) if "cudart" not in line)


SIZES = pytest.mark.parametrize("lines", [1, 100_000], ids=["less than is buffered", "more"])


@SIZES
def test_a_reader_that_has_gone_is_no_error_to_speak_of(lines):
    reader, writer = os.pipe()
    os.close(reader)
    code, said = put_out(lines, writer)
    os.close(writer)
    assert code == CLOSED == 141
    assert "Error" not in said and "Exception" not in said


@SIZES
@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(lines):
    with FULL.open("w") as full:
        code, said = put_out(lines, full)
    assert code == 1
    assert said.splitlines()[-1] == "error: standard output cannot be written: No space left on device"
    assert "Traceback" not in said and "Exception" not in said


def test_an_output_that_is_closed_is_one_line():
    command = f"{shlex.join([sys.executable, '-c', PUT_OUT, '1'])} >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("error: standard output cannot be written: Bad file descriptor\n")


@pytest.mark.parametrize(("encoding", "answered"), [("ascii", r"caf\xe9 \udcff"), ("utf-8", r"café \udcff")])
def test_what_the_encoding_lacks_is_escaped(encoding, answered):
    """Such as a directory's name, which on POSIX may be any bytes."""
    program = r"from glm_dcp_jax.plan.output import put_out; raise SystemExit(put_out('caf\xe9 \udcff'))"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stdout.decode()) == (0, answered + "\n")


def test_an_answer_that_can_be_written_is_success(tmp_path):
    with (tmp_path / "answer").open("w") as file:
        assert put_out(3, file)[0] == 0
    assert (tmp_path / "answer").read_text() == "answer\n" * 3 + "\n"
