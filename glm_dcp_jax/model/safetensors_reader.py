"""A lazy reader of safetensors checkpoints: headers are parsed at open, bytes are paged in when sliced.

A safetensors file is an 8-byte little-endian header length, a JSON header
`{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, and the data that the offsets count into. The
header is parsed here because the safetensors package's numpy side knows neither float8 nor float4.
"""

import mmap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import EllipsisType
from typing import Any

import ml_dtypes
import numpy as np

from glm_dcp_jax.config.json_file import parse_json

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's reference implementation
LFS_POINTER = b"version https://git-lfs"
NAMES_LISTED = 10

# Stored dtype name -> the numpy dtype `read` returns. F4 is packed two to a byte on disk, low nibble first.
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F4": np.dtype(ml_dtypes.float4_e2m1fn),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as it is; the message names file and tensor and what is expected."""


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `nbytes` bytes at `offset` (bytes from the start) of `file`, stored as `dtype`.

    `dtype` is the name in the file ("BF16", "F8_E4M3", ...); `shape` counts elements, also for packed F4.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    nbytes: int

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype that `Checkpoint.read` returns; CheckpointError for a stored dtype not in DTYPES."""
        if self.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.file}: tensor {self.name!r} has dtype {self.dtype!r}, which cannot be read; "
                f"readable are {', '.join(DTYPES)}"
            )
        return DTYPES[self.dtype]


class Checkpoint:
    """The tensors of one checkpoint directory. Files are memory-mapped at the first read, not copied."""

    def __init__(self, directory: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.directory = directory
        self._tensors = dict(tensors)
        self._mappings: dict[Path, mmap.mmap] = {}

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Read the headers of a checkpoint directory: the shards its index names, or every *.safetensors.

        With an index, a tensor that a shard holds but the index does not name is not part of the checkpoint.
        Raises CheckpointError for a directory without safetensors, shards that are missing, truncated or
        corrupt (all of them in one message), a tensor in two files, and an index that contradicts its shards.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise CheckpointError(
                f"{directory} is not a directory; give the one that holds the *.safetensors"
            )
        if (directory / INDEX_NAME).exists():
            return cls(directory, _tensors_by_index(directory))
        return cls(directory, _tensors_of_all_files(directory))

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return sorted(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def info(self, name: str) -> TensorInfo:
        """Raises CheckpointError if the checkpoint has no tensor of this name."""
        if name not in self._tensors:
            raise CheckpointError(f"{self.directory} has no tensor {name!r}")
        return self._tensors[name]

    @property
    def files(self) -> list[Path]:
        """Every file that holds a tensor, sorted."""
        return sorted({info.file for info in self._tensors.values()})

    @property
    def total_bytes(self) -> int:
        """The stored size of all tensors."""
        return sum(info.nbytes for info in self._tensors.values())

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> np.ndarray:
        """The slice of one tensor in its stored dtype, by numpy's rules; omitted dimensions are whole.

        The result is a read-only view of the mapped file, paged in as it is used, where the file's layout
        allows one; it is a copy if the data is misaligned for its dtype, and for F4, which is unpacked.
        Raises CheckpointError for an unknown name, a stored dtype not in DTYPES and too many slices.
        """
        info = self.info(name)
        slices = slices or ()
        if len(slices) > len(info.shape):
            raise CheckpointError(
                f"{info.file}: tensor {name!r} of shape {info.shape} was given {len(slices)} slices; "
                f"give at most {len(info.shape)}"
            )
        if info.dtype == "F4":
            return self._read_packed_f4(info, slices)
        dtype = info.numpy_dtype
        flat = np.frombuffer(self._mapping(info.file), dtype, prod(info.shape), info.offset)
        # The ellipsis keeps a zero-dimensional tensor an array where an empty index would make it a scalar.
        index: tuple[slice | EllipsisType, ...] = (*slices, ...)
        view = flat.reshape(info.shape)[index]
        return view if view.flags.aligned else view.copy()

    def release(self, name: str) -> None:
        """Give the tensor's resident pages back, so that a process does not grow with the files it has read.

        Views from `read` stay valid: a page that is used again is paged in again. Does nothing on systems
        without madvise, where the pages go when the system needs them.
        """
        info = self.info(name)
        mapping = self._mappings.get(info.file)
        if mapping is None or info.nbytes == 0 or not hasattr(mmap, "MADV_DONTNEED"):
            return
        # Rounding outwards to whole pages costs a neighbouring tensor one page fault at most.
        begin = info.offset - info.offset % mmap.PAGESIZE
        mapping.madvise(mmap.MADV_DONTNEED, begin, info.offset + info.nbytes - begin)

    def _read_packed_f4(self, info: TensorInfo, slices: tuple[slice, ...]) -> np.ndarray:
        if not info.shape or info.shape[-1] % 2:
            raise CheckpointError(
                f"{info.file}: F4 tensor {info.name!r} of shape {info.shape} cannot be unpacked; "
                "its last dimension must be even"
            )
        *leading, last = (*slices, *[slice(None)] * (len(info.shape) - len(slices)))
        flat = np.frombuffer(self._mapping(info.file), np.uint8, info.nbytes, info.offset)
        packed = flat.reshape(*info.shape[:-1], info.shape[-1] // 2)[tuple(leading)]
        unpacked = np.empty((*packed.shape[:-1], info.shape[-1]), np.uint8)
        unpacked[..., 0::2] = packed & 0x0F
        unpacked[..., 1::2] = packed >> 4
        return unpacked.view(info.numpy_dtype)[..., last]

    def _mapping(self, file: Path) -> mmap.mmap:
        if file not in self._mappings:
            with file.open("rb") as stream:
                self._mappings[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return self._mappings[file]


def verify(
    expected: Mapping[str, tuple[int, ...]],
    present: Mapping[str, tuple[int, ...]],
    directory: Path,
    optional: Collection[str] | Callable[[str], bool] = (),
    ignored: Callable[[str], bool] = lambda name: False,
) -> None:
    """Compare names and shapes of the weights in a checkpoint's directory, `present`, with the model's, `expected`.

    `optional` says which expected tensors may be absent (their shapes are still checked), `ignored` which
    unexpected ones are let pass. Raises one CheckpointError that lists what is missing, unexpected and
    mis-shaped.
    """
    may_be_absent = optional if callable(optional) else optional.__contains__
    missing = [name for name in expected if name not in present and not may_be_absent(name)]
    unexpected = [name for name in present if name not in expected and not ignored(name)]
    misshaped = [
        f"{name} is {present[name]} but should be {tuple(shape)}"
        for name, shape in expected.items()
        if name in present and present[name] != tuple(shape)
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "mis-shaped": misshaped}
    found = [f"  {len(names)} {kind}: {_first(names)}" for kind, names in kinds.items() if names]
    if found:
        raise CheckpointError(
            f"the tensors of {directory} do not match the model that its config.json describes; "
            "use the config.json and the weights of one checkpoint:\n" + "\n".join(found)
        )


def _first(items: Collection[str]) -> str:
    listed = ", ".join(list(items)[:NAMES_LISTED])
    return listed if len(items) <= NAMES_LISTED else f"{listed} and {len(items) - NAMES_LISTED} more"


def _tensors_by_index(directory: Path) -> dict[str, TensorInfo]:
    """The tensors that the index names, from the shards it names."""
    index = directory / INDEX_NAME
    weight_map = _weight_map(index)
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (directory / shard).is_file()]
    if absent:
        raise CheckpointError(
            f"{index} names {len(shards)} files, of which {len(absent)} are missing from the directory: "
            f"{', '.join(absent)}; download them"
        )
    held = _read_files(directory / shard for shard in shards)
    lost = [f"{name} in {shard}" for name, shard in weight_map.items() if name not in held[directory / shard]]
    if lost:
        raise CheckpointError(
            f"{index} names tensors that their files do not hold ({len(lost)}): {_first(lost)}; "
            "the index and the files must come from one checkpoint"
        )
    return {name: held[directory / shard][name] for name, shard in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content = index.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{index}: expected a file with weight_map, but it cannot be read ({error.strerror})"
        ) from error
    _refuse_lfs_pointer(index, content)
    try:
        weight_map: dict[str, str] = parse_json(content)["weight_map"]
        well_formed = all(isinstance(shard, str) for shard in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f'{index}: expected JSON with {{"weight_map": {{tensor: file}}}}') from error
    if not weight_map or not well_formed:
        raise CheckpointError(f"{index}: expected weight_map to name a file for each of at least one tensor")
    outside = [s for s in set(weight_map.values()) if Path(s).is_absolute() or ".." in Path(s).parts]
    if outside:
        raise CheckpointError(
            f"{index}: expected weight_map to name files of its own directory, but it names {_first(outside)}"
        )
    return weight_map


def _tensors_of_all_files(directory: Path) -> dict[str, TensorInfo]:
    """The tensors of every *.safetensors file, for a directory without an index."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(_no_safetensors(directory))
    tensors: dict[str, TensorInfo] = {}
    twice: list[str] = []
    for held in _read_files(files).values():
        twice += [f"{n} in {tensors[n].file.name} and {held[n].file.name}" for n in held if n in tensors]
        tensors |= held
    if twice:
        raise CheckpointError(
            f"{directory} has tensors in two files ({len(twice)}): {_first(twice)}; "
            f"keep one set of files, or add a {INDEX_NAME} that says which file counts"
        )
    return tensors


def _no_safetensors(directory: Path) -> str:
    entries = sorted(entry.name for entry in directory.iterdir())
    pickled = [entry for entry in entries if entry.endswith((".bin", ".pt", ".pth"))]
    if pickled:
        return (
            f"{directory} holds PyTorch weights ({_first(pickled)}) but no *.safetensors; convert them to "
            "safetensors, for example with transformers' save_pretrained"
        )
    return (
        f"{directory} holds no weights; expected model.safetensors, or {INDEX_NAME} and the files it names. "
        f"The directory holds: {_first(entries) or 'nothing'}"
    )


def _read_files(files: Iterable[Path]) -> dict[Path, dict[str, TensorInfo]]:
    """Each file's tensors. Every broken file is reported at once: one download then repairs them all."""
    held: dict[Path, dict[str, TensorInfo]] = {}
    problems: list[str] = []
    for file in files:
        try:
            held[file] = _read_file(file)
        except CheckpointError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{file} cannot be opened ({error.strerror})")
    if problems:
        raise CheckpointError("\n".join(problems))
    return held


def _read_file(file: Path) -> dict[str, TensorInfo]:
    header, data_begin, file_size = _read_header(file)
    header.pop("__metadata__", None)
    tensors = {name: _tensor(file, name, entry, data_begin) for name, entry in header.items()}
    by_offset = sorted((info for info in tensors.values() if info.nbytes), key=lambda info: info.offset)
    for before, after in pairwise(by_offset):
        if after.offset < before.offset + before.nbytes:
            raise CheckpointError(
                f"{file}: tensors {before.name!r} and {after.name!r} overlap; "
                f"expected {after.name!r} to begin where {before.name!r} ends, or later"
            )
    cut = [info.name for info in by_offset if info.offset + info.nbytes > file_size]
    if cut:
        promised = max(info.offset + info.nbytes for info in by_offset)
        raise CheckpointError(
            f"{file} is truncated: its header promises {promised} bytes, it has {file_size}, "
            f"{promised - file_size} bytes are missing; tensors cut off ({len(cut)}): {_first(cut)}. "
            "Download the file again"
        )
    return tensors


def _read_header(file: Path) -> tuple[dict[str, Any], int, int]:
    """The JSON header, the position at which the data begins, and the file's size, both in bytes."""
    file_size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(len(LFS_POINTER))
        _refuse_lfs_pointer(file, start)
        if len(start) < 8:
            raise CheckpointError(
                f"{file} has {file_size} bytes; expected a safetensors file, which has at least the 8 bytes "
                "of its header length. Download it again"
            )
        length = int.from_bytes(start[:8], "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file} is not a safetensors file: its first 8 bytes give a header of {length} bytes, "
                f"and at most {MAX_HEADER_BYTES} are allowed"
            )
        if 8 + length > file_size:
            raise CheckpointError(
                f"{file} is truncated in its header, of which {8 + length - file_size} of {length} bytes are "
                "missing, or it is not a safetensors file. Download it again"
            )
        stream.seek(8)
        text = stream.read(length)
    try:
        header = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{file}: the header of {length} bytes is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(
            f"{file}: expected the header to be a JSON object, found {type(header).__name__}"
        )
    return header, 8 + length, file_size


def _refuse_lfs_pointer(file: Path, content: bytes) -> None:
    if content.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{file} is a git-LFS pointer, not the file itself; run `git lfs pull` in the directory"
        )


def _tensor(file: Path, name: str, entry: Any, data_begin: int) -> TensorInfo:
    """One header entry, checked for form and for offsets that agree with its shape and dtype."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        well_formed = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, begin))
    except (KeyError, TypeError, ValueError):
        well_formed = False
    if not well_formed or type(end) is not int:
        raise CheckpointError(
            f"{file}: tensor {name!r} has the header entry {entry!r}; expected a dtype, a shape of "
            "non-negative integers and data_offsets [begin, end]"
        )
    if end < begin:
        raise CheckpointError(f"{file}: tensor {name!r} ends at byte {end}, before it begins at {begin}")
    if dtype in DTYPES:  # how large another dtype is, is not known here; it is refused when it is read
        expected = (prod(shape) + 1) // 2 if dtype == "F4" else prod(shape) * DTYPES[dtype].itemsize
        if end - begin != expected:
            raise CheckpointError(
                f"{file}: tensor {name!r} has {end - begin} bytes by its data_offsets; "
                f"expected {expected} for shape {shape} of {dtype}"
            )
    return TensorInfo(name, shape, dtype, file, data_begin + begin, end - begin)
