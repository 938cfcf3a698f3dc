"""A converted checkpoint: a model directory whose weights are arrays as devices hold them, saved with orbax.

`weights/` has an orbax checkpoint for each layer, and one for what is outside of layers. Layers are apart because how
they are stacked depends on what serves them, and so that one at a time is enough to make or read them. The manifest
says how every weight is stored, and which files there are.
"""

import re
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from glm_dcp_jax.model.manifest import (
    CONVERT_AGAIN,
    MANIFEST,
    WEIGHTS,
    Manifest,
    SavedFile,
    read_manifest,
    sha256_of,
)
from glm_dcp_jax.model.network import keys_of
from glm_dcp_jax.model.safetensors_reader import Checkpoint, CheckpointError
from glm_dcp_jax.model.stored_weights import PLAIN, StoredFormat

OUTSIDE = "outside"
"""The part of what is outside of layers."""
_READERS = 4
_PROBLEMS_LISTED = 5


class ConvertedCheckpoint:
    """A converted checkpoint's weights and how they are stored: also a WeightFormats."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest

    @staticmethod
    def open(directory: Path) -> "ConvertedCheckpoint":
        """Read the manifest, and look whether all files are there, in their sizes.

        Raises CheckpointError for another version's or a damaged manifest, and for missing or truncated files.
        """
        checkpoint = ConvertedCheckpoint(directory, read_manifest(directory / MANIFEST))
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
        """Read every file. Raises CheckpointError that names those that have changed, or of which nothing is known."""
        known = {file.path for file in self._files()}
        found = (path for path in (self.directory / WEIGHTS).rglob("*") if path.is_file())
        added = sorted({path.relative_to(self.directory).as_posix() for path in found} - known)
        self._require_files(
            lambda file: _content_problem(self.directory, file),
            [f"  {path} is there, but {MANIFEST} knows no such file" for path in added],
        )

    def _files(self) -> list[SavedFile]:
        return [file for part in self.manifest.parts.values() for file in part.files]

    def _require_files(self, problem: Callable[[SavedFile], str | None], others: Sequence[str] = ()) -> None:
        with ThreadPoolExecutor(_READERS, "checksums") as readers:
            problems = [*filter(None, readers.map(problem, self._files())), *others]
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


def _size_problem(directory: Path, file: SavedFile) -> str | None:
    try:
        found = (directory / file.path).stat().st_size
    except OSError as error:
        return f"  {file.path}: {error.strerror}"
    return None if found == file.nbytes else f"  {file.path} has {found:,} bytes instead of {file.nbytes:,}"


def _content_problem(directory: Path, file: SavedFile) -> str | None:
    try:
        found = sha256_of(directory / file.path)
    except OSError as error:
        return f"  {file.path}: {error.strerror}"
    return None if found == file.sha256 else f"  {file.path} has other bytes than were written (SHA-256)"
