"""What a model's weights come to, counted on its abstract tree: parameters and bytes of the checkpoint, and bytes on
each GPU by part."""

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from glm_dcp_jax.model.network import NetworkShape, is_variable, keys_of
from glm_dcp_jax.model.parameters import Source
from glm_dcp_jax.model.stored_weights import StoredFormat, StoredWeights, WeightFormats
from glm_dcp_jax.parallel.sharding import padded

WEIGHT_PARTS = (
    "embedding",
    "head",
    "attention",
    "value_expansions",
    "indexer",
    "dense",
    "routed_experts",
    "shared_experts",
    "router",
    "norms",
    "mtp",
)
"""The parts of a network that weights belong to; `mtp` is all of the MTP layer. value_expansions: copies of all heads'
of the DCP group, which path `queries` may project with first."""
_MARKS = {
    ".indexer.": "indexer",
    ".self_attn.": "attention",
    ".mlp.experts.": "routed_experts",
    ".mlp.shared_experts.": "shared_experts",
    ".mlp.gate.": "router",
    ".mlp.": "dense",
}
_FLOAT32 = 4
SECOND_COPY = "group_values"
"""A leaf that path `queries` may read in place of another."""


class Leaf(NamedTuple):
    """One array of the parameters. keys: its path in the tree. part: of WEIGHT_PARTS. inner: what it belongs to in a
    layer, the MTP layer too, whose input projection is `join`.

    shape, nbytes: of one GPU's share. layers: of each group that it is stacked of.
    """

    keys: tuple
    part: str
    inner: str
    source: Source
    shape: tuple[int, ...]
    nbytes: int
    layers: tuple[int | None, ...]

    @property
    def tensors(self) -> Iterator[str]:
        """Names of the checkpoint's weights that it is made of."""
        for layer in self.layers:
            for name in self.source.names:
                yield name.format(layer=layer)


class Parameters(NamedTuple):
    """total: parameters, without scales. trunk: without the MTP layer's. tensors, nbytes: of the checkpoint, scales
    included, those of activations left out. trunk_nbytes: without the MTP layer's."""

    total: int
    trunk: int
    tensors: int
    nbytes: int
    trunk_nbytes: int


def leaves(shape: NetworkShape, axis_sizes: dict[str, int]) -> tuple[Leaf, ...]:
    """All arrays of a network, as one GPU of a mesh with these axes holds them."""
    flat, _ = jax.tree_util.tree_flatten_with_path(shape.parameters, is_leaf=is_variable)
    found = []
    for (path, variable), spec in zip(flat, shape.leaf_specs, strict=True):
        keys = tuple(keys_of(path))
        own = tuple(
            size // math.prod(axis_sizes[axis] for axis in _names(axes))
            for size, axes in zip(variable.shape, (*spec, *[None] * variable.ndim), strict=False)
        )
        source = variable.get_metadata("source")
        nbytes = math.prod(own) * np.dtype(variable.dtype).itemsize
        inner = _part(keys, source.names[0])
        part = "mtp" if keys[0] == "mtp" else "value_expansions" if SECOND_COPY in keys else inner
        found.append(Leaf(keys, part, inner, source, own, nbytes, shape.layers_of(path)))
    return tuple(found)


def bytes_by_part(all_leaves: Iterable[Leaf], drafts: bool) -> dict[str, int]:
    """Bytes of weights on each GPU. drafts: whether the MTP layer is loaded at all."""
    total = dict.fromkeys(WEIGHT_PARTS, 0)
    for leaf in all_leaves:
        if leaf.part != "mtp" or drafts:
            total[leaf.part] += leaf.nbytes
    return total


def parameters(all_leaves: Iterable[Leaf], weights: WeightFormats, itemsize: int) -> Parameters:
    """Counted over the checkpoint's tensors that the tree is made of. itemsize: of a plain weight's element."""
    counts = {"total": 0, "trunk": 0, "tensors": 0, "nbytes": 0, "trunk_nbytes": 0}
    seen: set[str] = set()
    for leaf in all_leaves:
        for name in leaf.tensors:
            if name in seen:
                continue
            seen.add(name)
            size = math.prod(leaf.source.shape)
            plain = _FLOAT32 if name.endswith("e_score_correction_bias") else itemsize
            tensors, nbytes = _stored(name, leaf.source.shape, weights, plain)
            counts["total"] += size
            counts["tensors"] += tensors
            counts["nbytes"] += nbytes
            if leaf.part != "mtp":
                counts["trunk"] += size
                counts["trunk_nbytes"] += nbytes
    return Parameters(**counts)


def stored_bytes(stored: StoredFormat, shape: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Tensors and bytes that a weight takes in a file."""
    size = math.prod(shape)
    if stored.kind == "plain":
        return 1, size * itemsize
    rows, columns = shape
    if stored.kind == "fp8":
        blocks = math.prod(padded(n, own) // own for n, own in zip(shape, stored.block, strict=True))
        return 2, size + _FLOAT32 * blocks
    return 3, size // 2 + rows * (columns // stored.block[1]) + _FLOAT32


def _stored(name: str, shape: tuple[int, ...], weights: WeightFormats, itemsize: int) -> tuple[int, int]:
    if not isinstance(weights, StoredWeights):
        return stored_bytes(weights.of(name), shape, itemsize)
    tensors = weights.tensors(name)
    return len(tensors), sum(weights.checkpoint.info(tensor).nbytes for tensor in tensors)


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _part(keys: tuple, name: str) -> str:
    """By the array's place in the tree, and the name of its first tensor."""
    if keys[0] in ("embedding", "head"):
        return str(keys[0])
    if re.search(r"norm\.(?:weight|bias)$", name):
        return "norms"
    return next((part for mark, part in _MARKS.items() if mark in name), "join")
