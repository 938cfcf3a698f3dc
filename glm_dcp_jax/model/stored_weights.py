"""How a checkpoint stores each of its weights, decided by the tensors that are there, and reading any part of one.

Beside `X.weight`, or in its place, lie the scales of a quantised weight:

fp8                       X.weight E4M3, X.weight_scale_inv: one scale per block; value = code * scale, despite the name
compressed-tensors fp8    X.weight E4M3, X.weight_scale: one per block, per row [O, 1], or one for all
ModelOpt NVFP4            X.weight, two codes a byte, X.weight_scale E4M3 per 16 inputs, X.weight_scale_2: multiplied
compressed-tensors NVFP4  X.weight_packed, X.weight_scale E4M3, X.weight_global_scale: divided by

What config.json lists as not converted is no help: lists name modules that do not exist. Scales of activations
(input_scale, input_global_scale) are not used: activations stay as they are.
"""

import logging
import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from glm_dcp_jax.cache.codecs import E2M1_MAX, E4M3_MAX
from glm_dcp_jax.config.quantisation import FP8_BLOCK
from glm_dcp_jax.kernels.weights import NVFP4_GROUP
from glm_dcp_jax.model.safetensors_reader import Checkpoint, CheckpointError

_log = logging.getLogger(__name__)

Part = Literal["values", "codes", "scales", "outer"]
"""values: of the weight, dequantised where it is quantised. The others: what a quantised weight is made of."""

_PLAIN_DTYPES = ("BF16", "F16", "F32")
_KIND_OF = {"F8_E4M3": "fp8", "U8": "nvfp4"}
_SCALES = ("weight_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale")
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
_OUTER_DTYPES = ("F32", "BF16", "F16", "F64")
_UNUSED = ("input_scale", "input_global_scale")
_LOOKED_AT = 1 << 18
"""Codes that are looked at together, twice: few enough to stay in a processor's cache."""
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class StoredFormat:
    """kind: of the kernels' weights. block: rows and columns that share a scale in the file, fp8 only."""

    kind: Literal["plain", "fp8", "nvfp4"] = "plain"
    block: tuple[int, int] = (1, 1)

    def bytes_per_parameter(self, plain: int) -> float:
        """Of codes and scales. plain: bytes of an element that is not quantised."""
        if self.kind == "nvfp4":
            return 0.5 + 1 / NVFP4_GROUP
        rows, columns = self.block
        return plain if self.kind == "plain" else 1 + 4 / (rows * columns)

    def part_shape(self, part: Part, shape: tuple[int, ...], grain: tuple[int, int]) -> tuple[int, ...]:
        """Shape of a part of a weight of this shape. grain: rows and columns that share a scale on the device."""
        if part == "values":
            return shape
        rows, columns = shape
        if part == "outer":
            return ()
        if part == "codes":
            return (rows, columns // 2) if self.kind == "nvfp4" else shape
        return -(-rows // grain[0]), -(-columns // grain[1])


PLAIN = StoredFormat()
NVFP4 = StoredFormat("nvfp4", (1, NVFP4_GROUP))


class WeightFormats(Protocol):
    """Tells how each weight is stored; weights are named as in a checkpoint that is not quantised, `X.weight`."""

    @property
    def quantised(self) -> bool:
        """Whether any weight is."""

    def of(self, name: str) -> StoredFormat:
        """The format of one weight; PLAIN for what is not there."""

    def layer_kinds(self, layers: int) -> tuple[Hashable, ...]:
        """For each layer what its weights are stored as; layers with equal ones can be stacked."""


class _AllPlain:
    """The formats of a checkpoint that is not quantised."""

    quantised = False

    def of(self, name: str) -> StoredFormat:
        return PLAIN

    def layer_kinds(self, layers: int) -> tuple[Hashable, ...]:
        return ((),) * layers


ALL_PLAIN: WeightFormats = _AllPlain()


class StoredWeights:
    """The weights of a checkpoint, whatever they are stored as.

    block: rows and columns of FP8 blocks, by config.json's quantization_config.
    """

    def __init__(self, checkpoint: Checkpoint, block: tuple[int, int] = FP8_BLOCK) -> None:
        self.checkpoint = checkpoint
        self._block = block
        self._formats: dict[str, StoredFormat] = {}
        self._warned = False
        self._unreadable: dict[str, str] = {}
        for name in self.names():
            try:
                self._formats[name] = self._read_format(name)
            except CheckpointError as error:
                self._unreadable[name] = str(error)

    def names(self) -> list[str]:
        """Every tensor's name but those of scales; a packed weight is named as if it were not."""
        return [
            re.sub(r"\.weight_packed$", ".weight", name)
            for name in self.checkpoint.names()
            if not name.endswith((*_SCALES, *_UNUSED))
        ]

    @property
    def quantised(self) -> bool:
        """Whether any weight is."""
        return any(stored != PLAIN for stored in self._formats.values())

    @property
    def kinds(self) -> frozenset[str]:
        """What weights are stored as: each StoredFormat.kind that there is, or would be if it could be read."""
        unreadable = {self.checkpoint.info(self._main(name)).dtype for name in self._unreadable}
        found = {stored.kind for stored in self._formats.values()}
        return frozenset(found | {_KIND_OF[dtype] for dtype in unreadable & _KIND_OF.keys()})

    def of(self, name: str) -> StoredFormat:
        """The format of one weight; PLAIN for what is not there."""
        return self._formats.get(name, PLAIN)

    def shape(self, name: str) -> tuple[int, ...]:
        """The weight's shape, [O, I] whatever it is stored as."""
        stored = self.checkpoint.info(self._main(name)).shape
        return (stored[0], 2 * stored[1]) if self.of(name).kind == "nvfp4" else stored

    def tensors(self, name: str) -> list[str]:
        """The tensors that a weight is made of, the scales of activations left out."""
        if self.of(name) == PLAIN:
            return [name]
        base = name.removesuffix("weight")
        return [self._main(name), *(base + scale for scale in _SCALES if base + scale in self.checkpoint)]

    def check(self, names: Iterable[str]) -> None:
        """Raise CheckpointError, with up to 5 of them in one message, if any of these cannot be read."""
        problems = [self._unreadable[name] for name in names if name in self._unreadable]
        if problems:
            more = f"\nand {len(problems) - 5} more" if len(problems) > 5 else ""
            raise CheckpointError("\n".join(problems[:5]) + more)

    def layer_kinds(self, layers: int) -> tuple[Hashable, ...]:
        """For each layer what its weights are stored as; layers with equal ones can be stacked."""
        found: list[set] = [set() for _ in range(layers)]
        for name, stored in self._formats.items():
            layer = re.match(r"model\.layers\.(\d+)\.(.*)", name)
            if layer and int(layer[1]) < layers and stored != PLAIN:
                found[int(layer[1])].add((re.sub(r"experts\.\d+", "experts", layer[2]), stored))
        return tuple(frozenset(kinds) for kinds in found)

    def read(
        self, name: str, part: Part, grain: tuple[int, int], index: tuple[slice, ...] = ()
    ) -> np.ndarray:
        """A slice of one part, as `StoredFormat.part_shape` counts it; slices have a start and a stop.

        Values of quantised weights are float32; others and codes are views of the mapped file.
        """
        stored, checkpoint = self.of(name), self.checkpoint
        if stored == PLAIN:
            return checkpoint.read(name, index)
        if part == "outer":
            return self._outer(name)
        shape = stored.part_shape(part, self.shape(name), grain)
        bounds = [
            (piece.start or 0, size if piece.stop is None else min(piece.stop, size))
            for piece, size in zip((*index, *[slice(None)] * (2 - len(index))), shape, strict=True)
        ]
        if part == "codes":
            return self._codes(name, bounds)
        if part == "scales":
            return self._scales(name, bounds, grain)
        return self._values(name, bounds)

    def release(self, name: str) -> None:
        """See Checkpoint.release."""
        for tensor in self.tensors(name):
            self.checkpoint.release(tensor)

    def _main(self, name: str) -> str:
        """The tensor that holds codes or values."""
        packed = f"{name}_packed"
        return packed if packed in self.checkpoint else name

    def _scale_name(self, name: str) -> str:
        inverse = f"{name}_scale_inv"
        return inverse if inverse in self.checkpoint else f"{name}_scale"

    def _scales(self, name: str, bounds: list[tuple[int, int]], grain: tuple[int, int]) -> np.ndarray:
        """Scales of some rows and columns of grains: of the blocks that these lie in."""
        stored, block = self.checkpoint.read(self._scale_name(name)), self.of(name).block
        if self.of(name).kind == "nvfp4":
            return _checked(self._scale_name(name), stored[tuple(slice(*bound) for bound in bounds)])
        places = [
            np.arange(*bound) * size // own for bound, size, own in zip(bounds, grain, block, strict=True)
        ]
        two = stored.astype(np.float32).reshape(stored.shape if stored.ndim == 2 else (stored.size, 1))
        return _checked(self._scale_name(name), two[np.ix_(*places)])

    def _outer(self, name: str) -> np.ndarray:
        divided = f"{name}_global_scale" in self.checkpoint
        tensor = f"{name}_global_scale" if divided else f"{name}_scale_2"
        scale = self.checkpoint.read(tensor).astype(np.float32).reshape(())
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            outer = np.float32(1) / scale if divided else scale
            largest = outer * np.float32(E2M1_MAX * E4M3_MAX)
        if not (scale > 0 and largest > 0 and np.isfinite(largest)):
            raise CheckpointError(
                f"{tensor} is {scale}; the scale of NVFP4 weights must be a positive number, and leave them finite"
            )
        if outer > 1 and not self._warned:
            self._warned = True
            _log.warning(
                "%s is %g, which makes weights of up to %g; a scale that is stored as its reciprocal would look so",
                tensor,
                scale,
                E2M1_MAX * E4M3_MAX * float(outer),
            )
        return np.asarray(outer, np.float32)

    def _codes(self, name: str, bounds: list[tuple[int, int]]) -> np.ndarray:
        """A view of some rows and columns of codes. Raises CheckpointError for FP8 codes that are no number."""
        codes = self.checkpoint.read(self._main(name), tuple(slice(*bound) for bound in bounds))
        if self.of(name).kind == "fp8" and (place := _first_nan(codes)) is not None:
            row, column = (start + at for (start, _), at in zip(bounds, place, strict=True))
            raise CheckpointError(
                f"{name} holds the code 0x{codes.view(np.uint8)[place]:02X} at [{row}, {column}], which is not a "
                "number in E4M3; download the file again, or use the checkpoint as its publisher made it"
            )
        return codes

    def _values(self, name: str, bounds: list[tuple[int, int]]) -> np.ndarray:
        if self.of(name).kind == "fp8":
            return self._codes(name, bounds).astype(np.float32) * self._scales(name, bounds, (1, 1))
        (top, bottom), (left, right) = bounds
        first, last = left // NVFP4_GROUP, -(-right // NVFP4_GROUP)
        packed = self._codes(name, [(top, bottom), (first * NVFP4_GROUP // 2, last * NVFP4_GROUP // 2)])
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), 2 * packed.shape[1])
        scales = self._scales(name, [(top, bottom), (first, last)], (1, NVFP4_GROUP)).astype(np.float32)
        values = _E2M1[codes] * np.repeat(scales, NVFP4_GROUP, axis=1) * self._outer(name)
        return values[:, left - first * NVFP4_GROUP : right - first * NVFP4_GROUP]

    def _read_format(self, name: str) -> StoredFormat:
        main, checkpoint = self.checkpoint.info(self._main(name)), self.checkpoint
        if main.name != name and name in checkpoint:
            raise CheckpointError(
                f"there are both {name} and {main.name}, of which one can count; remove the other"
            )
        base = name.removesuffix("weight")
        scales = (
            {kind for kind in _SCALES if base + kind in checkpoint} if name.endswith(".weight") else set()
        )
        if main.dtype in _PLAIN_DTYPES:
            if scales:
                raise CheckpointError(
                    f"{name} is stored as {main.dtype}, but has scales as well ({', '.join(sorted(scales))}); "
                    "use the checkpoint as its publisher made it"
                )
            return PLAIN
        if main.dtype == "F8_E4M3" and scales in ({"weight_scale_inv"}, {"weight_scale"}):
            self._require_dtype(self._scale_name(name), _SCALE_DTYPES)
            return StoredFormat("fp8", self._fp8_block(name, main.shape))
        outer = {"weight_scale_2"} if main.name == name else {"weight_global_scale"}
        if main.dtype == "U8" and scales == {"weight_scale"} | outer:
            return self._check_nvfp4(name, main.shape)
        raise CheckpointError(
            f"{main.name} is stored as {main.dtype} with {', '.join(sorted(scales)) or 'no scales'}, which cannot be "
            f"loaded; readable are {', '.join(_PLAIN_DTYPES)} without scales, F8_E4M3 with weight_scale_inv or "
            "weight_scale, and NVFP4 as ModelOpt or compressed-tensors store it"
        )

    def _fp8_block(self, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of a block, by the shape of the scales."""
        scale = self.checkpoint.info(self._scale_name(name))
        if len(shape) != 2:
            raise CheckpointError(f"{name} has shape {shape}; only matrices can be stored as F8_E4M3")
        rows, columns = shape
        expected = tuple(-(-size // own) for size, own in zip(shape, self._block, strict=True))
        if scale.shape in ((), (1,)) or scale.shape == expected == (1, 1):
            return rows, columns
        if scale.shape in ((rows,), (rows, 1)):
            return 1, columns
        if scale.shape == expected:
            return self._block
        raise CheckpointError(
            f"{scale.name} is {list(scale.shape)}, but {name} of {list(shape)} in blocks of {list(self._block)} has "
            f"{list(expected)} scales; use the config.json (weight_block_size or block_structure) and the weights of "
            "one checkpoint"
        )

    def _check_nvfp4(self, name: str, shape: tuple[int, ...]) -> StoredFormat:
        scale = self.checkpoint.info(f"{name}_scale")
        if len(shape) != 2:
            raise CheckpointError(
                f"{self._main(name)} is {list(shape)}; only matrices can be stored as NVFP4"
            )
        inputs = 2 * shape[-1]
        expected = (shape[0], inputs // NVFP4_GROUP)
        if inputs % NVFP4_GROUP or scale.shape != expected or scale.dtype != "F8_E4M3":
            raise CheckpointError(
                f"{scale.name} is {scale.dtype} {list(scale.shape)}; NVFP4 weights of {inputs} inputs have F8_E4M3 "
                f"scales {list(expected)}, one per {NVFP4_GROUP} inputs, which must divide evenly"
            )
        for kind in ("weight_scale_2", "weight_global_scale"):
            outer = f"{name.removesuffix('weight')}{kind}"
            if outer not in self.checkpoint:
                continue
            self._require_dtype(outer, _OUTER_DTYPES)
            if np.prod(self.checkpoint.info(outer).shape, dtype=int) != 1:
                raise CheckpointError(
                    f"{outer} is {list(self.checkpoint.info(outer).shape)}; it must be one number"
                )
        return NVFP4

    def _require_dtype(self, tensor: str, allowed: tuple[str, ...]) -> None:
        """Integers might be exponents, or anything."""
        if (dtype := self.checkpoint.info(tensor).dtype) not in allowed:
            raise CheckpointError(f"{tensor} is stored as {dtype}; scales are {', '.join(allowed)}")


def require_range(name: str, values: np.ndarray, cast: np.ndarray) -> None:
    """Raise CheckpointError for values that became infinite when they were cast: bfloat16's to float16."""
    if cast.dtype != np.float16 or values.dtype == cast.dtype:
        return
    lost = np.isinf(cast) & np.isfinite(values)
    if lost.any():
        raise CheckpointError(
            f"{name} holds {float(values[lost].flat[0]):g}, and float16 ends at {np.finfo(np.float16).max:g}; use "
            "--dtype bfloat16 or float32"
        )


def _first_nan(codes: np.ndarray) -> tuple[int, int] | None:
    """Row and column of the first E4M3 code that is no number. Copies nothing: such codes are the largest bytes."""
    rows = max(1, _LOOKED_AT // max(1, codes.shape[1]))
    for start in range(0, len(codes) if codes.size else 0, rows):
        some = codes[start : start + rows]
        if some.view(np.int8).max() == 0x7F or some.view(np.uint8).max() == 0xFF:
            row, column = np.argwhere(np.isnan(some))[0]
            return start + int(row), int(column)
    return None


def _checked(tensor: str, scales: np.ndarray) -> np.ndarray:
    """The scales. Raises CheckpointError for any that makes no weight, or turns signs around."""
    wide = scales.astype(np.float32)
    if not (np.isfinite(wide) & ~np.signbit(wide)).all():
        wrong = wide[~np.isfinite(wide) | np.signbit(wide)].flat[0]
        raise CheckpointError(f"{tensor} holds {wrong}; scales must be finite and not negative")
    return scales
