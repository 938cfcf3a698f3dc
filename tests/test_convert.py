"""`python -m glm_dcp_jax.convert`: what it makes is served like the original, and it makes all or nothing."""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from glm_dcp_jax import LLM, SamplingParams
from glm_dcp_jax.convert.command import main
from glm_dcp_jax.demo import tiny_model_directory
from glm_dcp_jax.model import conversion
from glm_dcp_jax.model.converted import open_checkpoint
from glm_dcp_jax.model.manifest import MANIFEST
from glm_dcp_jax.serve import logs

sys.path.append(str(Path(__file__).parent / "oracle"))

from quantised_models import make_quantised
from random_models import make_model, write_checkpoint

CONVERT = [sys.executable, "-m", "glm_dcp_jax.convert"]
PROMPTS = [[5, 9, 200, 31], list(range(40, 80))]
MESHES = {
    "same layout": (4, 4, False),
    "two devices": (2, 1, False),
    "eight devices": (8, 2, False),
    "whole experts": (4, 2, True),
}


@pytest.fixture
def source(tmp_path) -> Path:
    """A small plain checkpoint of 13 layers and an MTP layer."""
    config, tensors = make_model("equal_groups", mtp=True)
    return write_checkpoint(tmp_path / "source", config, tensors, shards=2)


def served(directory: Path, mesh: tuple[int, int, bool], **settings) -> LLM:
    return LLM(
        model=str(directory),
        tensor_parallel_size=mesh[0],
        decode_context_parallel_size=mesh[1],
        enable_expert_parallel=mesh[2],
        block_size=4,
        max_model_len=64,
        max_num_batched_tokens=24,
        max_num_seqs=2,
        precompile_bs_paddings=(2,),
        precompile_token_paddings=(24,),
        kv_cache_memory_bytes=2**24,
        dtype="float32",
        **settings,
    )


def converted(name: str, folder: Path) -> tuple[Path, Path]:
    """(a checkpoint, what it was converted to for four devices)."""
    config, tensors, *_ = (
        make_model("equal_groups", mtp=True) if name == "plain" else make_quantised(name, mtp=True)
    )
    source, target = write_checkpoint(folder / "source", config, tensors), folder / "converted"
    assert main([str(source), str(target), "-tp", "4", "--dtype", "float32"]) == 0
    return source, target


def test_its_progress_ends_where_it_says(tmp_path, devices, capsys, monkeypatch):
    """Though what is dequantised grows."""
    devices(4)
    monkeypatch.setattr(logs, "show_as_lines", lambda wanted: None)
    converted("fp8", tmp_path)
    assert "Converting weights: 100%" in capsys.readouterr().err


def test_its_logits_are_the_originals(tmp_path, devices):
    """In the layout that it was made for; of the first layers, which are quicker compiled."""
    devices(4)
    few = {"hf_overrides": {"num_hidden_layers": 4}}
    one, other = (served(each, MESHES["same layout"], **few) for each in converted("mixed", tmp_path))
    np.testing.assert_array_equal(one.compute_logits(PROMPTS[1]), other.compute_logits(PROMPTS[1]))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["plain", "fp8", "modelopt", "mixed"])
def test_it_is_served_as_the_original_is(name, mesh, tmp_path, devices):
    """Logits bit for bit on every mesh, and drafts that are as often right."""
    devices(MESHES[mesh][0])
    drafts = {"speculative_config": {"num_speculative_tokens": 2}}
    one, other = (served(each, MESHES[mesh], **drafts) for each in converted(name, tmp_path))
    for prompt in PROMPTS:
        np.testing.assert_array_equal(one.compute_logits(prompt), other.compute_logits(prompt))
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    texts = [
        [out.outputs[0].token_ids for out in llm.generate(PROMPTS, greedy, use_tqdm=False)]
        for llm in (one, other)
    ]
    assert texts[0] == texts[1]
    counts = [llm.engine.stats().drafts for llm in (one, other)]
    assert counts[0] == counts[1]
    assert counts[0].proposed > 0


def test_everything_but_the_weights_is_copied(tmp_path, capsys):
    """Configuration, tokenizer, templates."""
    original, target = tiny_model_directory(), tmp_path / "converted"
    target.mkdir()  # an empty directory will do
    assert main([str(original), str(target), "-tp", "2"]) == 0
    assert re.search(r"\d+ layers and the MTP layer, \d\d\.\d MB, converted in ", capsys.readouterr().out)
    kept = [path for path in original.iterdir() if path.suffix != ".safetensors"]
    assert {path.name for path in target.iterdir()} == {path.name for path in kept} | {MANIFEST, "weights"}
    assert all((target / path.name).read_bytes() == path.read_bytes() for path in kept)


class TestRefusals:
    @pytest.fixture(autouse=True)
    def _nothing_is_made(self, tmp_path):
        yield
        assert list(tmp_path.rglob("*.partial-*")) == []

    def refused(self, capsys, *argv: str, code: int = 1) -> str:
        assert main(list(argv)) == code
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said.startswith("error: ")
        return said

    def test_the_source_itself(self, source, capsys):
        assert "DST is SRC" in self.refused(capsys, str(source), f"{source}/../source")

    def test_a_place_in_the_source(self, source, capsys):
        assert "lies in SRC" in self.refused(capsys, str(source), str(source / "converted"))

    def test_a_directory_that_is_not_empty(self, source, tmp_path, capsys):
        (tmp_path / "taken").mkdir()
        (tmp_path / "taken" / "file").write_text("")
        assert "is not empty; remove it" in self.refused(capsys, str(source), str(tmp_path / "taken"))

    def test_a_file(self, source, tmp_path, capsys):
        (tmp_path / "file").write_text("")
        assert "is a file" in self.refused(capsys, str(source), str(tmp_path / "file"))

    @pytest.mark.parametrize("place", ["x", "x/y"])
    def test_a_place_in_a_file(self, source, tmp_path, capsys, place):
        (tmp_path / "file").write_text("")
        said = self.refused(capsys, str(source), str(tmp_path / "file" / place))
        assert f"lies in {tmp_path / 'file'}, which is a file; give a path in a directory" in said

    def test_a_disk_that_is_too_full(self, source, tmp_path, capsys, monkeypatch):
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 10**5))
        said = self.refused(capsys, str(source), str(tmp_path / "converted"))
        assert re.search(r"needs \d\.\d\d MB, and 100 kB are free in .*; make room", said)

    def test_a_source_that_is_none(self, tmp_path, capsys):
        assert "there is no directory" in self.refused(capsys, str(tmp_path / "absent"), str(tmp_path / "x"))

    def test_a_source_that_is_damaged(self, source, tmp_path, capsys):
        file = sorted(source.glob("*.safetensors"))[0]
        file.write_bytes(file.read_bytes()[:-5])
        assert main([str(source), str(tmp_path / "converted")]) == 1
        assert "is truncated" in capsys.readouterr().err

    @pytest.mark.parametrize("tp", ["0", "1000"])
    def test_a_number_of_devices_that_cannot_be(self, source, tmp_path, tp, capsys):
        said = self.refused(capsys, str(source), str(tmp_path / "converted"), "-tp", tp, code=2)
        assert "--tensor-parallel-size" in said

    def test_what_is_converted_already(self, tmp_path, capsys):
        target = tmp_path / "converted"
        assert main([str(tiny_model_directory()), str(target), "--no-mtp"]) == 0
        assert "a converted checkpoint already" in self.refused(capsys, str(target), str(tmp_path / "again"))

    def test_an_error_on_the_way_leaves_nothing(self, source, tmp_path, capsys, monkeypatch):
        save = conversion._save

        def full(folder: Path, arrays: dict) -> None:
            if folder.name == "layer_002":
                raise OSError("no space left on device")
            save(folder, arrays)

        monkeypatch.setattr(conversion, "_save", full)
        assert "no space left" in self.refused(capsys, str(source), str(tmp_path / "converted"))
        assert not (tmp_path / "converted").exists()

    def test_a_disk_that_is_full_on_the_way_is_said_in_one_line(self, source, tmp_path):
        """orbax and its threads have much to say of it, all of which is left out. Nor are the folders above left."""
        target = tmp_path / "above" / "converted"
        limited = ["sh", "-c", 'ulimit -f 100; exec "$@"', "sh", *CONVERT, str(source), str(target)]
        done = subprocess.run(limited, stderr=subprocess.PIPE, text=True)
        said = done.stderr.splitlines()
        assert done.returncode == 1 and "Traceback" not in done.stderr and "ERROR" not in done.stderr
        assert re.match("error: .*/weights/.* cannot be written: File too large; make room there", said[-1])
        assert {path.name for path in tmp_path.iterdir()} == {"source"}


class TestInterruptions:
    def start(self, source: Path, target: Path) -> subprocess.Popen:
        """Returns when half of the layers are there."""
        process = subprocess.Popen(
            [*CONVERT, str(source), str(target), "-tp", "2"], stderr=subprocess.PIPE, text=True
        )
        end = time.monotonic() + 120
        while not list(target.parent.glob(f".{target.name}.partial-*/weights/layer_00[4-9]")):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        return process

    def test_a_killed_conversion_leaves_no_checkpoint_and_is_tidied_up_by_the_next(self, source, tmp_path):
        target = tmp_path / "converted"
        process = self.start(source, target)
        process.kill()
        process.communicate()
        assert not target.exists()
        assert len(list(tmp_path.glob(".converted.partial-*"))) == 1
        assert main([str(source), str(target), "-tp", "2"]) == 0
        assert list(tmp_path.glob(".converted.partial-*")) == []
        open_checkpoint(target).verify_checksums()

    @pytest.mark.parametrize(
        "sent",
        [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
        ids=lambda sent: sent.name,
    )
    def test_a_signal_leaves_nothing(self, source, tmp_path, sent):
        target = tmp_path / "converted"
        process = self.start(source, target)
        process.send_signal(sent)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130
        assert said.splitlines()[-1] == "interrupted: nothing is left of it"
        assert {path.name for path in tmp_path.iterdir()} == {"source"}

    @pytest.mark.parametrize("imported", ["argparse", "jax._src.dtypes", "jax", "orbax.checkpoint"])
    @pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT], ids=lambda sent: sent.name)
    def test_a_signal_while_modules_are_imported(self, source, tmp_path, sent, imported):
        """Where KeyboardInterrupt would be a traceback, another error, or swallowed."""
        command = [
            sys.executable,
            "-X",
            "importtime",
            *CONVERT[1:],
            str(source),
            str(tmp_path / "new" / "one"),
        ]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            for line in process.stderr:
                if line.rpartition("|")[2].strip() == imported:
                    process.send_signal(sent)
                    break
            said = process.stderr.read()
        assert process.returncode == 130
        assert said.splitlines()[-1] == "interrupted: nothing is left of it" and "Traceback" not in said
        assert {path.name for path in tmp_path.iterdir()} == {"source"}

    def test_what_another_process_is_making_stays(self, source, tmp_path):
        other = tmp_path / f".converted.partial-{os.getpid() + 1}"
        other.mkdir()
        with (other / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert main([str(source), str(tmp_path / "converted")]) == 0
            assert other.exists()
