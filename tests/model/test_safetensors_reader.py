"""The checkpoint reader: right values without reading more than asked, and every broken file explained."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from glm_dcp_jax.model.safetensors_reader import INDEX_NAME, Checkpoint, CheckpointError


def write_raw(file: Path, header: dict | bytes, data: bytes = b"") -> Path:
    """A safetensors file by hand, header and data as given, whether or not they fit together.

    A header given as a dict is padded to 8 bytes, as writers do, so that the data can be used in place.
    """
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8 if isinstance(header, dict) else 0)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal to the bit, so that NaN and -0.0 count too."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.tobytes() == expected.tobytes()


class TestReading:
    @pytest.mark.parametrize(
        "dtype",
        [
            *(np.float64, np.float32, np.float16, np.bool_),
            *(np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
            *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu),
        ],
    )
    def test_every_dtype_that_the_safetensors_package_writes(self, tmp_path, dtype):
        values = np.random.default_rng(0).integers(0, 2, 24).astype(dtype).reshape(2, 3, 4)
        save_file({"first": values, "second": values[1].copy()}, tmp_path / "model.safetensors")
        checkpoint = Checkpoint.open(tmp_path)
        assert_same(checkpoint.read("first"), values)
        assert_same(checkpoint.read("second"), values[1])

    @pytest.mark.parametrize(
        "slices", [(), np.s_[1:3,], np.s_[:, 2:4], np.s_[0:4:2, :, 5:6], np.s_[:, :, 1:4], np.s_[2:2,]]
    )
    @pytest.mark.parametrize("dtype", ["F32", "BF16", "F4"])
    def test_a_slice_is_exactly_that_slice(self, tmp_path, dtype, slices):
        codes = np.arange(4 * 5 * 6).reshape(4, 5, 6) % 16
        if dtype == "F4":
            whole = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
            data = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8).tobytes()
        else:
            whole = codes.astype(np.float32 if dtype == "F32" else ml_dtypes.bfloat16)
            data = whole.tobytes()
        write_raw(tmp_path / "model.safetensors", {"w": entry(dtype, [4, 5, 6], 0, len(data))}, data)
        assert_same(Checkpoint.open(tmp_path).read("w", slices), whole[slices])

    def test_f4_means_the_fp4_values_low_nibble_first(self, tmp_path):
        write_raw(tmp_path / "model.safetensors", {"w": entry("F4", [1, 4], 0, 2)}, bytes([0x21, 0xF7]))
        assert Checkpoint.open(tmp_path).read("w").astype(np.float32).tolist() == [[0.5, 1.0, 6.0, -6.0]]

    def test_scalars_and_empty_tensors_stay_arrays(self, tmp_path):
        tensors = {"scale": np.array(2.5, np.float32), "none": np.zeros((0, 7), np.float16)}
        save_file(tensors, tmp_path / "model.safetensors")
        checkpoint = Checkpoint.open(tmp_path)
        for name, values in tensors.items():
            assert isinstance(checkpoint.read(name), np.ndarray)
            assert_same(checkpoint.read(name), values)
            assert_same(checkpoint.read(name, ()), values)
            checkpoint.release(name)

    @pytest.mark.parametrize("dtype", ["F32", "BF16"])
    def test_misaligned_data_is_copied_into_place(self, tmp_path, dtype):
        """The format does not promise that a tensor begins at a multiple of its item size."""
        values = np.arange(6).astype(np.float32 if dtype == "F32" else ml_dtypes.bfloat16)
        header = {"pad": entry("U8", [1], 0, 1), "w": entry(dtype, [6], 1, 1 + values.nbytes)}
        write_raw(tmp_path / "model.safetensors", header, b"\0" + values.tobytes())
        read = Checkpoint.open(tmp_path).read("w")
        assert read.flags.aligned
        assert_same(read, values)

    def test_views_are_read_only_and_outlive_release_and_the_checkpoint(self, tmp_path):
        values = np.random.default_rng(1).normal(size=(300, 700)).astype(np.float32)
        save_file({"w": values}, tmp_path / "model.safetensors")
        checkpoint = Checkpoint.open(tmp_path)
        view = checkpoint.read("w")
        checkpoint.release("w")
        del checkpoint
        assert_same(view, values)
        with pytest.raises(ValueError, match="read-only"):
            view[0, 0] = 1

    def test_info_says_where_a_tensor_lies(self, tmp_path):
        save_file(
            {"w": np.zeros((3, 5), ml_dtypes.bfloat16)}, tmp_path / "model.safetensors", {"format": "pt"}
        )
        checkpoint = Checkpoint.open(tmp_path)
        info = checkpoint.info("w")
        assert (info.name, info.shape, info.dtype) == ("w", (3, 5), "BF16")
        assert (info.file, info.nbytes) == (tmp_path / "model.safetensors", 30)
        assert info.numpy_dtype == ml_dtypes.bfloat16
        assert checkpoint.names() == ["w"]
        assert ("w" in checkpoint, "__metadata__" in checkpoint) == (True, False)

    def test_an_unknown_dtype_is_an_error_only_when_that_tensor_is_read(self, tmp_path):
        header = {"odd": entry("F6_E2M3", [4], 0, 3), "fine": entry("U8", [2], 3, 5)}
        write_raw(tmp_path / "model.safetensors", header, bytes(range(5)))
        checkpoint = Checkpoint.open(tmp_path)
        assert checkpoint.total_bytes == 5
        assert checkpoint.info("odd").dtype == "F6_E2M3"
        assert checkpoint.read("fine").tolist() == [3, 4]
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors: tensor 'odd' has dtype 'F6_E2M3'.*BF16"
        ):
            checkpoint.read("odd")

    @pytest.mark.parametrize("shape", [[], [3], [2, 1]])
    def test_f4_that_cannot_be_unpacked_by_rows_is_refused_when_read(self, tmp_path, shape):
        size = (int(np.prod(shape)) + 1) // 2
        write_raw(tmp_path / "model.safetensors", {"w": entry("F4", shape, 0, size)}, bytes(size))
        with pytest.raises(CheckpointError, match=r"'w'.*last dimension must be even"):
            Checkpoint.open(tmp_path).read("w")

    def test_too_many_slices_and_unknown_names_are_refused(self, tmp_path):
        save_file({"w": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
        checkpoint = Checkpoint.open(tmp_path)
        with pytest.raises(CheckpointError, match=r"'w' of shape \(3,\) was given 2 slices; give at most 1"):
            checkpoint.read("w", (slice(1), slice(1)))
        for method in (checkpoint.read, checkpoint.info, checkpoint.release):
            with pytest.raises(CheckpointError, match="has no tensor 'x'"):
                method("x")


class TestDirectories:
    def test_the_index_says_which_file_counts(self, tmp_path):
        """model.safetensors beside an index is a shard only if the index names it."""
        for number, file in enumerate(["model.safetensors", "a.safetensors", "b.safetensors"]):
            tensors = {"w": np.full(2, number), "v": np.full(2, 10 + number), "extra": np.zeros(1)}
            save_file(tensors, tmp_path / file)
        (tmp_path / "unused.safetensors").write_bytes(b"broken")
        write_index(tmp_path, {"w": "b.safetensors", "v": "a.safetensors"})
        checkpoint = Checkpoint.open(tmp_path)
        assert checkpoint.names() == ["v", "w"]
        assert checkpoint.read("w").tolist() == [2, 2]
        assert checkpoint.read("v").tolist() == [11, 11]
        assert checkpoint.total_bytes == 32

    def test_without_an_index_every_file_is_read(self, tmp_path):
        save_file({"w": np.ones(1)}, tmp_path / "model.safetensors")
        save_file({"mtp": np.ones(2)}, tmp_path / "mtp.safetensors")
        assert Checkpoint.open(tmp_path).names() == ["mtp", "w"]

    def test_all_missing_shards_are_named(self, tmp_path):
        save_file({"a": np.ones(1)}, tmp_path / "shard-1.safetensors")
        write_index(tmp_path, {"abc"[n]: f"shard-{n + 1}.safetensors" for n in range(3)})
        missing = r"2 are missing.*: shard-2\.safetensors, shard-3\.safetensors"
        with pytest.raises(CheckpointError, match=missing):
            Checkpoint.open(tmp_path)

    def test_an_index_that_names_a_tensor_its_shard_does_not_hold(self, tmp_path):
        save_file({"a": np.ones(1)}, tmp_path / "s.safetensors")
        write_index(tmp_path, {"a": "s.safetensors", "gone": "s.safetensors"})
        with pytest.raises(CheckpointError, match=r"do not hold \(1\): gone in s\.safetensors"):
            Checkpoint.open(tmp_path)

    WEIGHT_MAPS = ("{}", "[]", '{"a": 1}', '{"a": "../o"}', '{"a": "/o"}')
    NO_INDEX = ["", "{", "[]", "{}", "[" * 10**5, *(f'{{"weight_map": {names}}}' for names in WEIGHT_MAPS)]

    @pytest.mark.parametrize("content", NO_INDEX, ids=len)
    def test_an_index_that_is_none(self, tmp_path, content):
        save_file({"a": np.ones(1)}, tmp_path / "model.safetensors")
        index = tmp_path / INDEX_NAME
        index.write_text(content) if content else index.mkdir()
        with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: expected .*weight_map"):
            Checkpoint.open(tmp_path)

    def test_a_tensor_in_two_files_without_an_index(self, tmp_path):
        save_file({"w": np.ones(1), "v": np.ones(1)}, tmp_path / "a.safetensors")
        save_file({"w": np.zeros(1)}, tmp_path / "b.safetensors")
        with pytest.raises(CheckpointError, match=r"two files \(1\): w in a\.safetensors and b\.safetensors"):
            Checkpoint.open(tmp_path)

    def test_an_empty_directory(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"no weights; expected model\.safetensors.*holds: nothing"):
            Checkpoint.open(tmp_path)

    def test_pytorch_weights_only(self, tmp_path):
        (tmp_path / "pytorch_model.bin").touch()
        with pytest.raises(CheckpointError, match=r"\(pytorch_model\.bin\).*convert them to safetensors"):
            Checkpoint.open(tmp_path)

    def test_a_path_that_is_no_directory(self, tmp_path):
        with pytest.raises(CheckpointError, match="is not a directory"):
            Checkpoint.open(tmp_path / "absent")


class TestBrokenFiles:
    def refused(self, directory: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(directory)
        assert "model.safetensors" in str(caught.value)
        return str(caught.value)

    @pytest.mark.parametrize("cut", [1, 16, 17, 48])
    def test_truncation_says_how_much_is_missing_and_which_tensors(self, tmp_path, cut):
        file = tmp_path / "model.safetensors"
        save_file({name: np.ones(4, np.float32) for name in "abc"}, file)
        os.truncate(file, file.stat().st_size - cut)
        message = self.refused(tmp_path)
        assert f"{cut} bytes are missing" in message
        names = {1: "(1): c", 16: "(1): c", 17: "(2): b, c", 48: "(3): a, b, c"}[cut]
        assert f"tensors cut off {names}. Download" in message

    def test_every_truncated_shard_is_named(self, tmp_path):
        for n in range(3):
            file = tmp_path / f"model.safetensors-{n}.safetensors"
            save_file({f"w{n}": np.ones(100, np.float32)}, file)
            if n != 1:
                os.truncate(file, file.stat().st_size - 4)
        message = self.refused(tmp_path)
        assert message.count("4 bytes are missing") == 2
        assert [f"cut off (1): w{n}" in message for n in range(3)] == [True, False, True]

    def test_a_file_cut_within_its_header(self, tmp_path):
        file = tmp_path / "model.safetensors"
        save_file({"w": np.ones(4)}, file)
        length = int.from_bytes(file.read_bytes()[:8], "little")
        os.truncate(file, 8 + length - 5)
        assert f"truncated in its header, of which 5 of {length} bytes are missing" in self.refused(tmp_path)

    @pytest.mark.parametrize("size", [0, 7])
    def test_a_file_too_short_for_a_header_length(self, tmp_path, size):
        (tmp_path / "model.safetensors").write_bytes(bytes(size))
        assert f"has {size} bytes; expected a safetensors file" in self.refused(tmp_path)

    def test_an_absurd_header_length(self, tmp_path):
        (tmp_path / "model.safetensors").write_bytes(b"<!DOCTYPE html><html>not found</html>")
        assert "not a safetensors file: its first 8 bytes give a header of" in self.refused(tmp_path)

    @pytest.mark.parametrize("text", [b"{'w': 1}", b"\xff\xfe\x00\x01", b"", b"[1]", b"[" * 10**5], ids=len)
    def test_a_header_that_is_not_a_json_object(self, tmp_path, text):
        write_raw(tmp_path / "model.safetensors", text, bytes(8))
        complaint = "expected the header to be a JSON object" if text == b"[1]" else "cannot be read as JSON"
        assert complaint in self.refused(tmp_path)

    @pytest.mark.parametrize(
        "bad",
        [
            None,
            {},
            {"dtype": "F32", "shape": [2]},
            *(entry("F32", 2, 0, 8), entry("F32", [-2], 0, 8), entry("F32", [2.0], 0, 8)),
            *(entry(32, [2], 0, 8), entry("F32", [2], -8, 0), entry("F32", [2], 0, 8.0)),
            {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]},
        ],
    )
    def test_a_malformed_header_entry(self, tmp_path, bad):
        write_raw(tmp_path / "model.safetensors", {"w": bad}, bytes(8))
        assert "tensor 'w' has the header entry" in self.refused(tmp_path)

    def test_an_end_before_the_beginning(self, tmp_path):
        write_raw(tmp_path / "model.safetensors", {"w": entry("F32", [1], 8, 4)}, bytes(8))
        assert "tensor 'w' ends at byte 4, before it begins at 8" in self.refused(tmp_path)

    @pytest.mark.parametrize(("dtype", "expected"), [("F32", 24), ("BF16", 12), ("F8_E4M3", 6), ("F4", 3)])
    def test_offsets_that_disagree_with_shape_and_dtype(self, tmp_path, dtype, expected):
        write_raw(tmp_path / "model.safetensors", {"w": entry(dtype, [3, 2], 0, 20)}, bytes(20))
        message = self.refused(tmp_path)
        assert f"tensor 'w' has 20 bytes by its data_offsets; expected {expected} for shape (3, 2)" in message

    def test_a_tensor_that_a_header_names_twice(self, tmp_path):
        one, other = (json.dumps(entry("U8", [2], begin, begin + 2)) for begin in (0, 2))
        write_raw(tmp_path / "model.safetensors", f'{{"w": {one}, "w": {other}}}'.encode(), bytes(4))
        assert "cannot be read as JSON: the key 'w' is there twice" in self.refused(tmp_path)

    def test_a_tensor_that_an_index_names_twice(self, tmp_path):
        for name in ("a", "b"):
            save_file({"w": np.ones(1)}, tmp_path / f"{name}.safetensors")
        index = tmp_path / INDEX_NAME
        index.write_text('{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}')
        assert "with weight_map, but it is no JSON: the key 'w' is there twice" in self.refused(tmp_path)

    def test_overlapping_tensors(self, tmp_path):
        header = {"after": entry("U8", [4], 3, 7), "before": entry("U8", [4], 0, 4)}
        write_raw(tmp_path / "model.safetensors", header, bytes(7))
        assert "tensors 'before' and 'after' overlap" in self.refused(tmp_path)

    @pytest.mark.parametrize("file", ["model.safetensors", INDEX_NAME])
    def test_a_git_lfs_pointer(self, tmp_path, file):
        save_file({"w": np.ones(1)}, tmp_path / "model.safetensors")
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 5\n"
        (tmp_path / file).write_text(pointer)
        message = self.refused(tmp_path)
        assert f"{file} is a git-LFS pointer" in message
        assert "git lfs pull" in message


TENSORS, TENSOR_BYTES = 8, 25 * 2**20

READ_ONE_BY_ONE = """
import sys
from pathlib import Path
import numpy as np
from glm_dcp_jax.model.safetensors_reader import Checkpoint

def resident(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

release = sys.argv[2] == "release"
checkpoint = Checkpoint.open(Path(sys.argv[1]))
begin = resident("VmRSS")
for name in checkpoint.names():
    copy = np.array(checkpoint.read(name))
    assert copy[-1] == int(name)
    del copy
    if release:
        checkpoint.release(name)
assert "jax" not in sys.modules
print(resident("VmHWM") - begin)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
class TestMemory:
    @pytest.fixture
    def sparse_checkpoint(self, tmp_path) -> Path:
        """200 MiB of zeros but for the last element of each tensor: almost nothing on disk."""
        ends = {str(n): (n + 1) * TENSOR_BYTES for n in range(TENSORS)}
        shape = [TENSOR_BYTES // 4]
        header = {name: entry("F32", shape, end - TENSOR_BYTES, end) for name, end in ends.items()}
        file = write_raw(tmp_path / "model.safetensors", header)
        data_begin = file.stat().st_size
        with file.open("r+b") as stream:
            for name, end in ends.items():
                stream.seek(data_begin + end - 4)
                stream.write(np.float32(name).tobytes())
        return tmp_path

    def peak_growth(self, directory: Path, release: bool) -> int:
        """Peak resident bytes, beyond the start, of a process that copies every tensor in turn."""
        arguments = [sys.executable, "-c", READ_ONE_BY_ONE, str(directory), "release" if release else "keep"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
        return int(done.stdout)

    def test_a_process_that_releases_holds_one_tensor_and_its_copy(self, sparse_checkpoint):
        assert self.peak_growth(sparse_checkpoint, release=True) < 2.5 * TENSOR_BYTES

    def test_without_release_it_grows_with_the_file(self, sparse_checkpoint):
        """Shows that the measurement above can fail."""
        assert self.peak_growth(sparse_checkpoint, release=False) > 6 * TENSOR_BYTES

    def test_a_slice_pages_in_little_more_than_itself(self, sparse_checkpoint):
        checkpoint = Checkpoint.open(sparse_checkpoint)
        assert checkpoint.total_bytes == TENSORS * TENSOR_BYTES
        before = int(Path("/proc/self/statm").read_text().split()[1])
        assert checkpoint.read("3", np.s_[-1000:,])[-1] == 3
        pages = int(Path("/proc/self/statm").read_text().split()[1]) - before
        assert pages * os.sysconf("SC_PAGESIZE") < TENSOR_BYTES / 4
