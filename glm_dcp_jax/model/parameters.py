"""How parameters are declared: shape, logical axes, and where in a checkpoint their values come from.

A module declares each of its parameters once, through `Maker`; sharding, loading and the list of expected checkpoint
tensors are all derived from that declaration.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from glm_dcp_jax.kernels.dispatch import Backend
from glm_dcp_jax.kernels.linear import linear
from glm_dcp_jax.kernels.weights import NVFP4_GROUP, Fp8Weight, Nvfp4Weight, PlainWeight, Weight
from glm_dcp_jax.model.stored_weights import ALL_PLAIN, PLAIN, Part, StoredFormat, WeightFormats
from glm_dcp_jax.parallel.sharding import padded

_WIDEST_GRAIN = 128
Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class Source:
    """The checkpoint tensors behind a parameter.

    names: of weights, `{layer}` standing for the layer index; several are stacked along `stack` leading axes.
    shape: of each weight in the file. part: which part of them, in the format `stored`, with `grain` rows and columns
    to a scale. view: that weight reshaped (heads split off its rows), None if unchanged. window: (axis, start, stop) of
    the view to take, None for all of it.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stack: tuple[int, ...] = ()
    view: tuple[int, ...] | None = None
    window: tuple[int, int, int] | None = None
    part: Part = "values"
    stored: StoredFormat = PLAIN
    grain: tuple[int, int] = (1, 1)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of one tensor's part of the parameter, before zero padding."""
        shape = list(self.view or self.stored.part_shape(self.part, self.shape, self.grain))
        if self.window is not None:
            axis, start, stop = self.window
            shape[axis] = stop - start
        return tuple(shape)


class StoredWeight(nnx.Module):
    """A weight matrix, or a stack of some, in the format in which the checkpoint stores it."""

    def __init__(self, kind: type[Weight], arrays: dict[str, nnx.Param]) -> None:
        self.kind = kind
        for name, array in arrays.items():
            setattr(self, name, array)

    @property
    def arrays(self) -> Weight:
        """What the ops take; [*S, O, I] as they count it."""
        return self.kind(*(getattr(self, name)[...] for name in self.kind._fields))

    def __call__(
        self,
        x: Float[Array, "T I"],
        group: Int[Array, ""] | int,
        kernels: Backend,
        out_dtype: DTypeLike | None = None,
    ) -> Float[Array, "T O"]:
        """See kernels.linear.linear."""
        return linear(x, self.arrays, group, out_dtype, kernels)


@dataclass(frozen=True)
class Maker:
    """Declares parameters. dtype: of plain weights. tp: how many parts sharded axes have.

    formats: how the checkpoint stores its weights. layers: the layer that `{layer}` stands for, or those of all groups
    that are stacked along a leading axis (`stacked`). expert_parallel: experts are whole on one rank each.
    """

    dtype: Any
    tp: int
    formats: WeightFormats = ALL_PLAIN
    layers: tuple[int, ...] = ()
    stacked: bool = False
    expert_parallel: bool = False

    def __call__(self, source: Source, axes: Axes, dtype: Any = None) -> nnx.Param:
        """A parameter for `source`, with a logical axis per dimension; zeros, so build it under nnx.eval_shape.

        Sharded dimensions are padded to a multiple of the ranks.
        """
        shape = source.stack + source.part_shape
        if len(shape) != len(axes):
            raise ValueError(f"{source.names[0]}: shape {shape} has not as many dimensions as axes {axes}")
        shape = tuple(
            size if axis is None else padded(size, self.tp) for size, axis in zip(shape, axes, strict=True)
        )
        return self._param(source, shape, axes, dtype or self.dtype, in_place=False)

    def weight(
        self, name: str, shape: tuple[int, ...], axes: Axes | None = None, dtype: Any = None
    ) -> nnx.Param:
        """A parameter that is one checkpoint tensor as it is, dequantised; replicated unless axes are given."""
        return self(Source((name,), shape), axes or (None,) * len(shape), dtype)

    def linear(
        self,
        names: str | tuple[str, ...],
        shape: tuple[int, int],
        axes: tuple[str | None, str | None] = (None, None),
        stack: tuple[int, ...] = (),
        stack_axes: Axes | None = None,
        units: tuple[int, int] = (1, 1),
        dtype: Any = None,
    ) -> StoredWeight:
        """A weight [O, I], or a stack of weights, as the checkpoint stores it.

        units: rows and columns that stay on one rank, such as those of a head. What has no format in common, or
        cannot be shared evenly without cutting a group of NVFP4, is dequantised when it is loaded; so is whatever a
        dtype is given for, which it then has.
        """
        names = (names,) if isinstance(names, str) else names
        stack_axes = stack_axes or (None,) * len(stack)
        stack_shape = tuple(
            size if axis is None else padded(size, self.tp)
            for size, axis in zip(stack, stack_axes, strict=True)
        )
        whole = tuple(
            size if axis is None else padded(size, self.tp * unit)
            for size, axis, unit in zip(shape, axes, units, strict=True)
        )
        shares = tuple(
            size if axis is None else size // self.tp for size, axis in zip(whole, axes, strict=True)
        )
        stored = self._format(names) if dtype is None else PLAIN
        if stored.kind == "nvfp4" and shares[1] % NVFP4_GROUP:
            stored = PLAIN
        grain = _grain(stored, shares)

        def part(part: Part, shape_: tuple[int, ...], dtype: Any) -> nnx.Param:
            source = Source(names, shape, stack, part=part, stored=stored, grain=grain)
            own = axes if shape_ else ()
            return self._param(source, stack_shape + shape_, stack_axes + own, dtype, in_place=True)

        rows, columns = whole
        scales = rows // grain[0], columns // grain[1]
        if stored.kind == "plain":
            return StoredWeight(PlainWeight, {"values": part("values", whole, dtype or self.dtype)})
        if stored.kind == "fp8":
            return StoredWeight(
                Fp8Weight,
                {
                    "codes": part("codes", whole, jnp.float8_e4m3fn),
                    "scales": part("scales", scales, jnp.float32),
                },
            )
        return StoredWeight(
            Nvfp4Weight,
            {
                "codes": part("codes", (rows, columns // 2), jnp.uint8),
                "scales": part("scales", scales, jnp.float8_e4m3fn),
                "outer": part("outer", (), jnp.float32),
            },
        )

    def width_unit(self, width: int) -> int:
        """Columns of a feed-forward layer that stay on one rank, lest scales be cut finer than their blocks.

        The largest that wastes little: padding is computed with.
        """
        if not self.formats.quantised:
            return 1
        for unit in (128, 64, 32):
            if padded(width, self.tp * unit) <= width * 9 / 8:
                return unit
        return NVFP4_GROUP

    def _param(
        self, source: Source, shape: tuple[int, ...], axes: Axes, dtype: Any, in_place: bool
    ) -> nnx.Param:
        """in_place: kernels take it with all its groups, so that a scan need not slice it."""
        if self.stacked:
            shape, axes = (len(self.layers), *shape), (None, *axes)
        return nnx.Param(jnp.zeros(shape, dtype), axes=axes, source=source, in_place=in_place)

    def _format(self, names: tuple[str, ...]) -> StoredFormat:
        """The one format of all these weights; PLAIN where they have several."""
        layers = self.layers or (0,)
        found = {self.formats.of(name.format(layer=layer)) for name in names for layer in layers}
        return found.pop() if len(found) == 1 else PLAIN


def _grain(stored: StoredFormat, shares: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns that share a scale on the device: no more than in the file, and even shares of each rank's."""
    if stored.kind == "nvfp4":
        return stored.block
    rows, columns = (
        math.gcd(block, share, _WIDEST_GRAIN) if block > 1 else 1
        for block, share in zip(stored.block, shares, strict=True)
    )
    return rows, columns
