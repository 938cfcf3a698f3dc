"""A lazy reader of safetensors checkpoints: headers are parsed at open, bytes are paged in when sliced."""

import mmap
from collections.abc import Callable, Collection, Iterable, Mapping
from math import prod
from pathlib import Path
from types import EllipsisType

import numpy as np

from glm_dcp_jax.config.json_file import parse_unique_json
from glm_dcp_jax.model.safetensors_header import (
    DTYPES,
    CheckpointError,
    Header,
    Stamp,
    TensorInfo,
    listed,
    read_header,
    refuse_lfs_pointer,
)

INDEX_NAME = "model.safetensors.index.json"

__all__ = ["DTYPES", "INDEX_NAME", "Checkpoint", "CheckpointError", "TensorInfo", "verify"]


class Checkpoint:
    """The tensors of one checkpoint directory. Files are memory-mapped at the first read, not copied."""

    def __init__(
        self, directory: Path, tensors: Mapping[str, TensorInfo], held: Mapping[Path, Header]
    ) -> None:
        self.directory = directory
        self._tensors = dict(tensors)
        self._stamps = {file: header.stamp for file, header in held.items()}
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
            return cls(directory, *_tensors_by_index(directory))
        return cls(directory, *_tensors_of_all_files(directory))

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
        Raises CheckpointError for an unknown name, a stored dtype not in DTYPES, too many slices, and a file that
        changed since its header was read.
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

    def require_unchanged(self) -> None:
        """Raise CheckpointError if any file has changed since its header was read: what was read may be of both."""
        problems = [each for file in self.files if (each := self._change(file, file))]
        if problems:
            raise CheckpointError("\n".join(problems))

    def _change(self, file: Path, opened: Path | int) -> str | None:
        """What has become of a file. opened: its path, or its descriptor."""
        try:
            if Stamp.of(opened) == self._stamps[file]:
                return None
        except OSError as error:
            return f"{file} cannot be opened any more ({error.strerror}); leave it where it is while it is loaded"
        return (
            f"{file} was changed while it was being loaded; load it again when nothing writes to it any more"
        )

    def _mapping(self, file: Path) -> mmap.mmap:
        if file not in self._mappings:
            try:
                with file.open("rb") as stream:
                    if problem := self._change(file, stream.fileno()):
                        raise CheckpointError(problem)
                    self._mappings[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise CheckpointError(
                    self._change(file, file) or f"{file} cannot be read ({error})"
                ) from error
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
    found = [f"  {len(names)} {kind}: {listed(names)}" for kind, names in kinds.items() if names]
    if found:
        raise CheckpointError(
            f"the tensors of {directory} do not match the model that its config.json describes; "
            "use the config.json and the weights of one checkpoint:\n" + "\n".join(found)
        )


_Found = tuple[dict[str, TensorInfo], Mapping[Path, Header]]
"""A directory's tensors, and the headers that describe them."""


def _tensors_by_index(directory: Path) -> _Found:
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
    of = lambda shard: held[directory / shard].tensors  # noqa: E731
    lost = [f"{name} in {shard}" for name, shard in weight_map.items() if name not in of(shard)]
    if lost:
        raise CheckpointError(
            f"{index} names tensors that their files do not hold ({len(lost)}): {listed(lost)}; "
            "the index and the files must come from one checkpoint"
        )
    return {name: of(shard)[name] for name, shard in weight_map.items()}, held


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content = index.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{index}: expected a file with weight_map, but it cannot be read ({error.strerror})"
        ) from error
    refuse_lfs_pointer(index, content)
    try:
        weight_map: dict[str, str] = parse_unique_json(content)["weight_map"]
        well_formed = all(isinstance(shard, str) for shard in weight_map.values())
    except ValueError as error:
        raise CheckpointError(
            f"{index}: expected a file with weight_map, but it is no JSON: {error}"
        ) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f'{index}: expected JSON with {{"weight_map": {{tensor: file}}}}') from error
    if not weight_map or not well_formed:
        raise CheckpointError(f"{index}: expected weight_map to name a file for each of at least one tensor")
    outside = [s for s in set(weight_map.values()) if Path(s).is_absolute() or ".." in Path(s).parts]
    if outside:
        raise CheckpointError(
            f"{index}: expected weight_map to name files of its own directory, but it names {listed(outside)}"
        )
    return weight_map


def _tensors_of_all_files(directory: Path) -> _Found:
    """The tensors of every *.safetensors file, for a directory without an index."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(_no_safetensors(directory))
    tensors: dict[str, TensorInfo] = {}
    twice: list[str] = []
    held = _read_files(files)
    for file, header in held.items():
        twice += [f"{n} in {tensors[n].file.name} and {file.name}" for n in header.tensors if n in tensors]
        tensors |= header.tensors
    if twice:
        raise CheckpointError(
            f"{directory} has tensors in two files ({len(twice)}): {listed(twice)}; "
            f"keep one set of files, or add a {INDEX_NAME} that says which file counts"
        )
    return tensors, held


def _no_safetensors(directory: Path) -> str:
    entries = sorted(entry.name for entry in directory.iterdir())
    pickled = [entry for entry in entries if entry.endswith((".bin", ".pt", ".pth"))]
    if pickled:
        return (
            f"{directory} holds PyTorch weights ({listed(pickled)}) but no *.safetensors; convert them to "
            "safetensors, for example with transformers' save_pretrained"
        )
    return (
        f"{directory} holds no weights; expected model.safetensors, or {INDEX_NAME} and the files it names. "
        f"The directory holds: {listed(entries) or 'nothing'}"
    )


def _read_files(files: Iterable[Path]) -> dict[Path, Header]:
    """Each file's header. Every broken file is reported at once: one download then repairs them all."""
    held: dict[Path, Header] = {}
    problems: list[str] = []
    for file in files:
        try:
            held[file] = read_header(file)
        except CheckpointError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{file} cannot be opened ({error.strerror})")
    if problems:
        raise CheckpointError("\n".join(problems))
    return held
