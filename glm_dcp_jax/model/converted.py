"""A converted checkpoint: a model directory whose weights are arrays as devices hold them, saved with orbax.

`weights/` has an orbax checkpoint for each layer, and one for what is outside of layers. Layers are apart because how
they are stacked depends on what serves them, and so that one at a time is enough to make or read them. The manifest
says how every weight is stored, and which files there are.
"""

import json
import re
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any, TypeVar

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.config.json_file import read_json_object
from glm_dcp_jax.model.network import keys_of
from glm_dcp_jax.model.safetensors_reader import Checkpoint, CheckpointError
from glm_dcp_jax.model.stored_weights import PLAIN, StoredFormat

MANIFEST = "glm_dcp_jax.json"
WEIGHTS = "weights"
VERSION = 1
OUTSIDE = "outside"
"""The part of what is outside of layers."""
CONVERT_AGAIN = "convert the checkpoint again"
_READERS = 4
_PROBLEMS_LISTED = 5


@dataclass(frozen=True)
class SavedArray:
    """weight: shape of the weights it is made of, stacking included and padding not. shape: of the array.

    grain: rows and columns that share one of its scales; (1, 1) where it holds none.
    """

    weight: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    grain: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class SavedFile:
    """path: from the model directory on. sha256: in hexadecimal digits."""

    path: str
    nbytes: int
    sha256: str

    @staticmethod
    def of(directory: Path, path: Path) -> "SavedFile":
        """Of a file in a model directory, which is read in full."""
        return SavedFile(path.relative_to(directory).as_posix(), path.stat().st_size, _sha256(path))


@dataclass(frozen=True)
class Part:
    """A layer's weights, or those outside of layers.

    arrays: by name, such as "attention.q_b.codes". formats: of weights that are codes and scales, by their tensors'
    names in the layer, the experts' numbers left out. files: all of them.
    """

    arrays: Mapping[str, SavedArray]
    formats: Mapping[str, StoredFormat]
    files: tuple[SavedFile, ...]


@dataclass(frozen=True)
class Manifest:
    """What was converted, and for what.

    dtype: of plain weights. mtp_layer: None where there is none. weights_id: a digest of the original's weights.
    """

    made_by: str
    tensor_parallel_size: int
    enable_expert_parallel: bool
    dtype: str
    mtp_layer: int | None
    weights_id: str
    parts: Mapping[str, Part]

    def write(self, directory: Path) -> None:
        """Into a model directory."""
        (directory / MANIFEST).write_text(json.dumps({"version": VERSION} | asdict(self), indent=1) + "\n")


class ConvertedCheckpoint:
    """A converted checkpoint's weights and how they are stored: also a WeightFormats."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest

    @staticmethod
    def open(directory: Path) -> "ConvertedCheckpoint":
        """Read the manifest, and look whether all files are there, in their sizes.

        Raises CheckpointError for another version's or a damaged manifest, and for missing or truncated files.
        """
        checkpoint = ConvertedCheckpoint(directory, _read_manifest(directory / MANIFEST))
        checkpoint._require_files(lambda file: _size_problem(directory, file))
        return checkpoint

    @property
    def weights_id(self) -> str:
        """A digest of the original checkpoint's weights."""
        return self.manifest.weights_id

    @property
    def quantised(self) -> bool:
        """Whether any weight is."""
        return any(part.formats for part in self.manifest.parts.values())

    @property
    def kinds(self) -> frozenset[str]:
        """What weights are stored as: each StoredFormat.kind that there is."""
        formats = [each for part in self.manifest.parts.values() for each in part.formats.values()]
        return frozenset({PLAIN.kind, *(stored.kind for stored in formats)})  # norms are always plain

    def of(self, name: str) -> StoredFormat:
        """The format of one weight, named as in a checkpoint; PLAIN for what is not there."""
        layer = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        if layer is None or (part := self.manifest.parts.get(part_name(int(layer[1])))) is None:
            return PLAIN
        return part.formats.get(without_experts(layer[2]), PLAIN)

    def layer_kinds(self, layers: int) -> tuple[Hashable, ...]:
        """For each layer what its weights are stored as; layers with equal ones can be stacked."""
        parts = (self.manifest.parts.get(part_name(layer)) for layer in range(layers))
        return tuple(frozenset() if part is None else frozenset(part.formats.items()) for part in parts)

    def verify_checksums(self) -> None:
        """Read every file. Raises CheckpointError that names the ones that have changed."""
        self._require_files(lambda file: _content_problem(self.directory, file))

    def _require_files(self, problem: Callable[[SavedFile], str | None]) -> None:
        files = [file for part in self.manifest.parts.values() for file in part.files]
        with ThreadPoolExecutor(_READERS, "checksums") as readers:
            problems = list(filter(None, readers.map(problem, files)))
        if problems:
            more = f"\nand {len(problems) - _PROBLEMS_LISTED} more" * (len(problems) > _PROBLEMS_LISTED)
            raise CheckpointError(
                f"the converted checkpoint {self.directory} is damaged; copy it again, or {CONVERT_AGAIN}:\n"
                + "\n".join(problems[:_PROBLEMS_LISTED])
                + more
            )


def open_checkpoint(directory: Path) -> Checkpoint | ConvertedCheckpoint:
    """Whatever a model directory holds. Raises CheckpointError as the two do."""
    if (directory / MANIFEST).exists():
        return ConvertedCheckpoint.open(directory)
    return Checkpoint.open(directory)


def part_name(layer: int | None) -> str:
    """The part that holds a layer, or what is outside of layers."""
    return OUTSIDE if layer is None else f"layer_{layer:03}"


def array_name(path: tuple) -> str:
    """What a parameter, by its path in the network's tree, is called in its part."""
    keys = keys_of(path)
    if "layers" in keys:
        keys = keys[keys.index("layers") + 2 :]
    elif keys[0] == "mtp":
        keys = keys[1:]
    return ".".join(map(str, keys))


def without_experts(name: str) -> str:
    """A tensor's name as all experts have it."""
    return re.sub(r"experts\.\d+\.", "experts.", name)


def _read_manifest(path: Path) -> Manifest:
    try:
        given = read_json_object(path)
    except ConfigError as error:
        raise CheckpointError(f"{error}; {CONVERT_AGAIN}") from None
    version = given.pop("version", None)
    if type(version) is int and version > VERSION:
        raise CheckpointError(
            f"{path} has version {version} of converted checkpoints, and this program reads up to {VERSION}; update "
            f"it, or {CONVERT_AGAIN} with it"
        )
    try:
        if version != VERSION:
            raise ValueError(f"its version is {version!r}")
        parts = {name: _part(part) for name, part in given.pop("parts").items()}
        return Manifest(**given, parts=parts)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is not as it was written ({error}); {CONVERT_AGAIN}") from None


def _part(given: Mapping[str, Any]) -> Part:
    return Part(
        {name: _made(SavedArray, fields) for name, fields in given["arrays"].items()},
        {name: _made(StoredFormat, fields) for name, fields in given["formats"].items()},
        tuple(_made(SavedFile, fields) for fields in given["files"]),
    )


_T = TypeVar("_T")


def _made(kind: type[_T], fields: Mapping[str, Any]) -> _T:
    """As it was before it became JSON, whose lists were tuples."""
    return kind(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    )


def _size_problem(directory: Path, file: SavedFile) -> str | None:
    try:
        found = (directory / file.path).stat().st_size
    except OSError as error:
        return f"  {file.path}: {error.strerror}"
    return None if found == file.nbytes else f"  {file.path} has {found:,} bytes instead of {file.nbytes:,}"


def _content_problem(directory: Path, file: SavedFile) -> str | None:
    try:
        found = _sha256(directory / file.path)
    except OSError as error:
        return f"  {file.path}: {error.strerror}"
    return None if found == file.sha256 else f"  {file.path} has other bytes than were written (SHA-256)"


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()
