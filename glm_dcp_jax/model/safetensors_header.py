"""The header of one safetensors file: which tensors it holds, and where.

A safetensors file is an 8-byte little-endian header length, a JSON header
`{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, and the data that the offsets count into. The
header is parsed here because the safetensors package's numpy side knows neither float8 nor float4.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from glm_dcp_jax.config.json_file import parse_unique_json

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


class Stamp(NamedTuple):
    """What changes when a file is written to or replaced: bytes, and when it was last changed, in nanoseconds.

    Not the inode's number, which some network file systems make up anew.
    """

    nbytes: int
    changed: int

    @staticmethod
    def of(file: Path | int) -> "Stamp":
        """Of a path or an open file. Raises OSError."""
        found = os.stat(file)
        return Stamp(found.st_size, found.st_mtime_ns)


class Header(NamedTuple):
    """stamp: of the file when its header was read."""

    tensors: dict[str, TensorInfo]
    stamp: Stamp


def read_header(file: Path) -> Header:
    """Raises CheckpointError for a file that is truncated or no safetensors file, OSError if it cannot be read."""
    header, data_begin, stamp = _parsed(file)
    header.pop("__metadata__", None)
    tensors = {name: _tensor(file, name, entry, data_begin) for name, entry in header.items()}
    by_offset = sorted((info for info in tensors.values() if info.nbytes), key=lambda info: info.offset)
    for before, after in pairwise(by_offset):
        if after.offset < before.offset + before.nbytes:
            raise CheckpointError(
                f"{file}: tensors {before.name!r} and {after.name!r} overlap; "
                f"expected {after.name!r} to begin where {before.name!r} ends, or later"
            )
    cut = [info.name for info in by_offset if info.offset + info.nbytes > stamp.nbytes]
    if cut:
        promised = max(info.offset + info.nbytes for info in by_offset)
        raise CheckpointError(
            f"{file} is truncated: its header promises {promised} bytes, it has {stamp.nbytes}, "
            f"{promised - stamp.nbytes} bytes are missing; tensors cut off ({len(cut)}): {listed(cut)}. "
            "Download the file again"
        )
    return Header(tensors, stamp)


def _parsed(file: Path) -> tuple[dict[str, Any], int, Stamp]:
    """The JSON header, the position in bytes at which the data begins, and the file's stamp."""
    with file.open("rb") as stream:
        stamp = Stamp.of(stream.fileno())
        file_size = stamp.nbytes
        start = stream.read(len(LFS_POINTER))
        refuse_lfs_pointer(file, start)
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
        header = parse_unique_json(text)
    except ValueError as error:
        raise CheckpointError(
            f"{file}: the header of {length} bytes cannot be read as JSON: {error}"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(
            f"{file}: expected the header to be a JSON object, found {type(header).__name__}"
        )
    return header, 8 + length, stamp


def refuse_lfs_pointer(file: Path, content: bytes) -> None:
    """Raise CheckpointError if a file that begins so was not downloaded."""
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


def listed(items: Collection[str]) -> str:
    """The first few, and how many more there are."""
    first = ", ".join(list(items)[:NAMES_LISTED])
    return first if len(items) <= NAMES_LISTED else f"{first} and {len(items) - NAMES_LISTED} more"
