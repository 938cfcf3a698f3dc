"""Checkpoint -> parameters, straight into shards.

Each parameter says which tensors it is made of (parameters.Source). They are taken a piece at a time, a piece being one
tensor, or of stacked ones as many as fit into PIECE_BYTES: each device's part of it is cut out of the mapped file,
zero-padded, moved, written into the parameter in place, and forgotten. Host memory stays near one piece.
"""

import collections
import dataclasses
import functools
import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from glm_dcp_jax.config import ModelConfig
from glm_dcp_jax.model.network import NetworkShape, is_variable
from glm_dcp_jax.model.parameters import Source
from glm_dcp_jax.model.safetensors_reader import Checkpoint, CheckpointError, verify

_log = logging.getLogger(__name__)

_DTYPES = ("BF16", "F16", "F32")
# Stacked tensors that together stay below this are moved as one; a larger tensor is moved alone.
PIECE_BYTES = 32 << 20
_MTP_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""The MTP layer takes the main model's instead, which published files rely on."""
Index = tuple[slice, ...]


def load_parameters(checkpoint: Checkpoint, config: ModelConfig, shape: NetworkShape, mesh: Mesh) -> Any:
    """The network's parameters on the mesh, as an nnx.State like shape.parameters.

    Raises CheckpointError naming missing, unexpected, mis-shaped or truncated tensors before anything is loaded.
    """
    leaves, tree = jax.tree.flatten(shape.parameters, is_leaf=is_variable)
    specs = jax.tree.leaves(shape.specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    paths = [
        path for path, _ in jax.tree_util.tree_flatten_with_path(shape.parameters, is_leaf=is_variable)[0]
    ]
    sources = [
        [_of_layer(leaf.get_metadata("source"), layer) for layer in shape.layers_of(path)]
        for leaf, path in zip(leaves, paths, strict=True)
    ]
    expected = {name: source.shape for groups in sources for source in groups for name in source.names}
    _require_mtp(checkpoint, shape)
    verify(expected, checkpoint, ignored=lambda name: _why_left_out(name, config, shape) is not None)
    _refuse_quantised(checkpoint, expected)
    _say_what_is_left_out(checkpoint, config, shape)
    loaded = []
    parts = list(zip(leaves, specs, sources, strict=True))
    for leaf, spec, groups in tqdm(parts, desc="Loading weights", unit="param", mininterval=1.0):
        loaded.append(leaf.replace(_load_parameter(checkpoint, leaf, groups, NamedSharding(mesh, spec))))
    return jax.tree.unflatten(tree, loaded)


def _of_layer(source: Source, layer: int | None) -> Source:
    """The source with its layer's number in the names."""
    return dataclasses.replace(source, names=tuple(name.format(layer=layer) for name in source.names))


def _require_mtp(checkpoint: Checkpoint, shape: NetworkShape) -> None:
    """Many checkpoints are without the MTP layer that their config.json tells of: exporters drop it."""
    prefix = f"model.layers.{shape.mtp_layer}."
    if shape.mtp_layer is not None and not any(name.startswith(prefix) for name in checkpoint.names()):
        raise CheckpointError(
            f"{checkpoint.directory} has no tensors of the MTP layer ({prefix}*), which speculative decoding drafts "
            "with; use a checkpoint that has them, or leave --speculative-config out"
        )


def _refuse_quantised(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Casting 8-bit weights without their scales would load noise."""
    found = {name: kind for name in names if (kind := checkpoint.info(name).dtype) not in _DTYPES}
    if found:
        name, kind = next(iter(found.items()))
        raise CheckpointError(
            f"{len(found)} tensors are stored as something else than {', '.join(_DTYPES)}, the first is {name} "
            f"({kind}); quantised weights cannot be loaded"
        )


def _why_left_out(name: str, config: ModelConfig, shape: NetworkShape) -> str | None:
    """What a tensor is that files may carry but this network lacks; None for any other."""
    if name.endswith("rotary_emb.inv_freq"):
        return "tables of rotary frequencies"
    if name == "lm_head.weight" and config.tie_word_embeddings:
        return "a head where it is tied to the embedding"
    start, _, rest = name.removeprefix("model.layers.").partition(".")
    if not name.startswith("model.layers.") or not start.isdigit():
        return None
    layer = int(start)
    if layer == shape.mtp_layer:
        return "the MTP layer's copies of embedding and head" if rest in _MTP_COPIES else None
    if layer >= config.num_hidden_layers:
        return "of layers behind the last, such as the MTP layer that --speculative-config loads"
    if rest.startswith("self_attn.indexer.") and not config.full[layer]:
        return "indexers of layers that share"
    return None


def _say_what_is_left_out(checkpoint: Checkpoint, config: ModelConfig, shape: NetworkShape) -> None:
    kinds = {name: kind for name in checkpoint.names() if (kind := _why_left_out(name, config, shape))}
    if kinds:
        first = {kind: name for name, kind in reversed(kinds.items())}
        counts = collections.Counter(kinds.values())
        listed = "; ".join(f"{count} {kind} ({first[kind]})" for kind, count in counts.items())
        _log.info("%d tensors are not loaded: %s", len(kinds), listed)


def _load_parameter(
    checkpoint: Checkpoint, leaf: Any, sources: list[Source], sharding: NamedSharding
) -> jax.Array:
    """One parameter, sources[g] being its group g's; it is written piece by piece into an array updated in place."""
    grouped = leaf.ndim > len(sources[0].stack) + len(sources[0].part_shape)
    inner_shape = leaf.shape[1:] if grouped else leaf.shape
    inner = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:])) if grouped else sharding
    pieces = [
        ((group, start) if grouped else (start,), piece)
        for group, source in enumerate(sources)
        for start, piece in _pieces(source, np.dtype(leaf.dtype).itemsize)
    ]
    if len(pieces) == 1 and not grouped:
        return _load_piece(checkpoint, sources[0], inner_shape, leaf.dtype, inner)
    whole = _zeros(leaf.shape, leaf.dtype, sharding)
    for place, piece in pieces:
        shape = piece.stack[:1] + inner_shape[1:] if piece.stack else inner_shape
        part = _load_piece(checkpoint, piece, shape, leaf.dtype, inner)
        whole = _write(whole, part, place, sharding)
        del part
        # Writes that wait would each keep their piece.
        jax.block_until_ready(whole)
    return whole


def _pieces(source: Source, itemsize: int) -> Iterator[tuple[int, Source]]:
    """(where it begins along the first stacked axis, piece); pieces of one source are of one size."""
    if not source.stack:
        yield 0, source
        return
    count, *rest = source.stack
    names = math.prod(rest)
    fitting = max(1, PIECE_BYTES // (names * math.prod(source.shape) * itemsize))
    size = next(size for size in range(min(count, fitting), 0, -1) if count % size == 0)
    for start in range(0, count, size):
        own = source.names[start * names : (start + size) * names]
        yield start, dataclasses.replace(source, names=own, stack=(size, *rest))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _write(whole: jax.Array, part: jax.Array, place: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """whole with part at `place`, which counts along the first axes; the others begin at 0."""
    starts = (*place, *(0,) * (whole.ndim - len(place)))
    part = jax.lax.expand_dims(part, range(whole.ndim - part.ndim))
    return jax.lax.with_sharding_constraint(jax.lax.dynamic_update_slice(whole, part, starts), sharding)


def _load_piece(
    checkpoint: Checkpoint, source: Source, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding
) -> jax.Array:
    """One piece on the mesh: each distinct shard is cut out once, then placed on every device that holds it."""
    by_index: dict[str, tuple[Index, list[jax.Device]]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None  # only devices of the mesh are asked for
        by_index.setdefault(str(index), (index, []))[1].append(device)
    arrays = []
    for index, devices in by_index.values():
        shard = _cut(checkpoint, source, shape, index, np.dtype(dtype))
        arrays += [jax.device_put(shard, device) for device in devices]
        jax.block_until_ready(arrays[-len(devices) :])
    for name in source.names:
        checkpoint.release(name)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _cut(
    checkpoint: Checkpoint, source: Source, shape: tuple[int, ...], index: Index, dtype: np.dtype
) -> np.ndarray:
    """The part `index` of a piece as a host array: tensors viewed, windowed, sliced, cast, and zero-padded."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    outer = len(source.stack)
    inner = tuple(slice(*bound) for bound in bounds[outer:])
    shard = np.zeros([stop - start for start, stop in bounds], dtype)
    for place, position in _stacked(bounds[:outer]):
        name = source.names[np.ravel_multi_index(position, source.stack) if outer else 0]
        tensor = checkpoint.read(name)
        tensor = tensor if source.view is None else tensor.reshape(source.view)
        if source.window is not None:
            axis, start, stop = source.window
            tensor = tensor[(slice(None),) * axis + (slice(start, stop),)]
        found = tensor[inner]
        shard[place + tuple(slice(0, size) for size in found.shape)] = found
    return shard


def _stacked(bounds: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Pairs (place in the shard, index of the tensor) over the leading, stacked axes."""
    for place in np.ndindex(*(stop - start for start, stop in bounds)):
        yield place, tuple(start + at for (start, _), at in zip(bounds, place, strict=True))
