"""The manifest of a converted checkpoint: what it says, and reading it, whatever has been done to it since."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hashlib import file_digest, sha256
from pathlib import Path, PurePosixPath
from reprlib import repr as shortened
from typing import Any, NamedTuple, TypeVar

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.config.engine import FLOAT_DTYPES
from glm_dcp_jax.config.json_file import read_json_object
from glm_dcp_jax.model.safetensors_reader import CheckpointError
from glm_dcp_jax.model.stored_weights import StoredFormat

MANIFEST = "glm_dcp_jax.json"
WEIGHTS = "weights"
VERSION = 1
CONVERT_AGAIN = "convert the checkpoint again"
_SEAL = "sha256"
"""The field that holds `seal_of` all others: an edit may make sense and still be wrong."""


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
        return SavedFile(path.relative_to(directory).as_posix(), path.stat().st_size, sha256_of(path))


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
        fields = json.loads(json.dumps({"version": VERSION} | asdict(self)))
        fields[_SEAL] = seal_of(fields)
        (directory / MANIFEST).write_text(json.dumps(fields, indent=1) + "\n")


class _Kind(NamedTuple):
    """What a field may be, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _are_counts(value: Any, least: int = 0) -> bool:
    return isinstance(value, list) and all(_is_count(each, least) for each in value)


def _one_of(*words: str) -> _Kind:
    return _Kind(f"one of {', '.join(words)}", lambda value: isinstance(value, str) and value in words)


def _is_path_of_weights(value: Any) -> bool:
    parts = PurePosixPath(value).parts if isinstance(value, str) else ()
    return len(parts) > 1 and parts[0] == WEIGHTS and ".." not in parts


_TEXT = _Kind("text", lambda value: isinstance(value, str) and value != "")
_COUNT = _Kind("a whole number of at least 0", _is_count)
_SIZES = _Kind("a list of whole numbers of at least 0", _are_counts)
_TWO = _Kind(
    "a list of two whole numbers of at least 1", lambda value: _are_counts(value, 1) and len(value) == 2
)
_OBJECT = _Kind("an object", lambda value: isinstance(value, Mapping))

_FIELDS: dict[type, dict[str, _Kind]] = {
    Manifest: {
        "made_by": _TEXT,
        "tensor_parallel_size": _Kind("a whole number of at least 1", lambda value: _is_count(value, 1)),
        "enable_expert_parallel": _Kind("true or false", lambda value: isinstance(value, bool)),
        "dtype": _one_of(*FLOAT_DTYPES),
        "mtp_layer": _Kind("a layer's number or null", lambda value: value is None or _is_count(value)),
        "weights_id": _TEXT,
        "parts": _OBJECT,
    },
    Part: {
        "arrays": _OBJECT,
        "formats": _OBJECT,
        "files": _Kind(
            "a list of at least one file", lambda value: isinstance(value, list) and len(value) > 0
        ),
    },
    SavedArray: {
        "weight": _SIZES,
        "shape": _SIZES,
        "dtype": _one_of(*FLOAT_DTYPES, "float8_e4m3fn", "uint8"),
        "grain": _TWO,
    },
    StoredFormat: {"kind": _one_of("fp8", "nvfp4"), "block": _TWO},
    SavedFile: {
        "path": _Kind(f"a path in {WEIGHTS}/", _is_path_of_weights),
        "nbytes": _COUNT,
        "sha256": _Kind(
            "64 hexadecimal digits",
            lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None,
        ),
    },
}
"""What each field of a manifest may be."""


def read_manifest(path: Path) -> Manifest:
    """Raises CheckpointError for one of a later version or edited since, and names fields that cannot be."""
    try:
        given = read_json_object(path)
    except ConfigError as error:
        raise CheckpointError(f"{error}; {CONVERT_AGAIN}") from None
    seal = given.pop(_SEAL, None)
    sealed = seal_of(given)
    version = given.pop("version", None)
    if type(version) is int and version > VERSION:
        raise CheckpointError(
            f"{path} has version {version} of converted checkpoints, and this program reads up to {VERSION}; update "
            f"it, or {CONVERT_AGAIN} with it"
        )
    try:
        if type(version) is not int or version != VERSION:
            raise ValueError(f"version must be {VERSION}, but is {shortened(version)}")
        fields = _checked(Manifest, given, "")
        parts = {name: _part(part, f"parts.{name}") for name, part in fields.pop("parts").items()}
        if seal != sealed:
            raise ValueError(
                f"{_SEAL} is {shortened(seal)}, but its other fields have {sealed}: some were edited"
            )
        return Manifest(**fields, parts=parts)
    except ValueError as error:
        raise CheckpointError(f"{path} is not as it was written: {error}; {CONVERT_AGAIN}") from None


def seal_of(fields: Mapping[str, Any]) -> str:
    """The checksum of a manifest's fields, however they are ordered and laid out."""
    return sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """A file's checksum, in hexadecimal digits."""
    with path.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def _part(given: Any, where: str) -> Part:
    fields = _checked(Part, given, where)
    part = Part(
        {name: _made(SavedArray, each, f"{where}.arrays.{name}") for name, each in fields["arrays"].items()},
        {
            name: _made(StoredFormat, each, f"{where}.formats.{name}")
            for name, each in fields["formats"].items()
        },
        tuple(_made(SavedFile, each, f"{where}.files[{at}]") for at, each in enumerate(fields["files"])),
    )
    for name in part.arrays:
        _require_grain(part.arrays, name, where)
    return part


_T = TypeVar("_T")


def _made(kind: type[_T], given: Any, where: str) -> _T:
    """As it was before it became JSON, whose lists were tuples."""
    fields = _checked(kind, given, where)
    return kind(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    )


def _checked(kind: type, given: Any, where: str) -> dict[str, Any]:
    """The fields, all of them and each as it may be. Raises ValueError that names one which is not."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} must be an object, but is {shortened(given)}")
    allowed, prefix = _FIELDS[kind], where and f"{where}."
    for name in allowed.keys() - given.keys():
        raise ValueError(f"{prefix}{name} is missing; it must be {allowed[name].words}")
    for name, value in given.items():
        if name not in allowed:
            raise ValueError(f"{prefix}{name} is unknown; known are {', '.join(allowed)}")
        if not allowed[name].fits(value):
            raise ValueError(f"{prefix}{name} must be {allowed[name].words}, but is {shortened(value)}")
    return dict(given)


def _require_grain(arrays: Mapping[str, SavedArray], name: str, where: str) -> None:
    """Scales, one for each grain, are those of all codes and of no more."""
    base, _, last = name.rpartition(".")
    own, codes = arrays[name], arrays.get(f"{base}.codes")
    if last != "scales":
        if own.grain != (1, 1):
            raise ValueError(
                f"{where}.arrays.{name}.grain must be [1, 1], as it is no scales, but is {list(own.grain)}"
            )
        return
    if codes is None:
        raise ValueError(f"{where}.arrays.{name} are scales, but there is no {base}.codes")
    in_a_code = 2 if f"{base}.outer" in arrays else 1
    whole = (*codes.shape[:-1], *(size * in_a_code for size in codes.shape[-1:]))
    covered = (*own.shape[:-2], *(n * size for n, size in zip(own.shape[-2:], own.grain, strict=False)))
    if covered != whole:
        raise ValueError(
            f"{where}.arrays.{name}: scales {list(own.shape)} of grain {list(own.grain)} are those of {list(covered)} "
            f"weights, but there are codes of {list(whole)}"
        )
