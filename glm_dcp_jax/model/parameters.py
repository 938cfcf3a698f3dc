"""How parameters are declared: shape, logical axes, and where in a checkpoint their values come from.

A module declares each of its parameters once, through `Maker`; sharding, loading and the list of expected checkpoint
tensors are all derived from that declaration.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx

from glm_dcp_jax.parallel.sharding import padded


@dataclass(frozen=True)
class Source:
    """The checkpoint tensors behind a parameter.

    names: tensor names, `{layer}` standing for the layer index; several are stacked along `stack` leading axes.
    shape: shape of each tensor in the file. view: that tensor reshaped (heads split off), None if unchanged.
    window: (axis, start, stop) of the view to take, None for all of it.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stack: tuple[int, ...] = ()
    view: tuple[int, ...] | None = None
    window: tuple[int, int, int] | None = None

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of one tensor's part of the parameter, before zero padding."""
        shape = list(self.view or self.shape)
        if self.window is not None:
            axis, start, stop = self.window
            shape[axis] = stop - start
        return tuple(shape)


@dataclass(frozen=True)
class Maker:
    """Declares parameters. dtype: of weights. tp: what sharded axes are padded to a multiple of.

    groups: how many share groups are stacked along a leading axis; None for parameters outside of runs or in a run of
    one group.
    """

    dtype: Any
    tp: int
    groups: int | None = None

    def __call__(self, source: Source, axes: tuple[str | None, ...], dtype: Any = None) -> nnx.Param:
        """A parameter for `source`, with a logical axis per dimension; zeros, so build it under nnx.eval_shape."""
        shape = source.stack + source.part_shape
        if len(shape) != len(axes):
            raise ValueError(f"{source.names[0]}: shape {shape} has not as many dimensions as axes {axes}")
        shape = tuple(
            size if axis is None else padded(size, self.tp) for size, axis in zip(shape, axes, strict=True)
        )
        lead = () if self.groups is None else (self.groups,)
        axes = (*(None,) * len(lead), *axes)
        return nnx.Param(jnp.zeros((*lead, *shape), dtype or self.dtype), axes=axes, source=source)

    def weight(
        self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...] | None = None, dtype: Any = None
    ) -> nnx.Param:
        """A parameter that is one checkpoint tensor as it is; replicated unless axes are given."""
        return self(Source((name,), shape), axes or (None,) * len(shape), dtype)
