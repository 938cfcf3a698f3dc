"""Checkpoint -> parameters, straight into shards.

Each parameter says which tensors it is made of (parameters.Source). A device's shard is cut out of memory-mapped
tensors, zero-padded, moved, and forgotten, so host memory stays near one shard of one layer's parameter.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from glm_dcp_jax.config import ModelConfig, Run
from glm_dcp_jax.model.network import NetworkShape, is_variable
from glm_dcp_jax.model.parameters import Source
from glm_dcp_jax.model.safetensors_reader import Checkpoint, CheckpointError, verify

_log = logging.getLogger(__name__)

_DTYPES = ("BF16", "F16", "F32")
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
    runs = [_run_of(path, config) for path in paths]
    members = [_member_of(path) for path in paths]
    expected = _expected(leaves, runs, members)
    verify(expected, checkpoint, ignored=_ignored(config))
    _refuse_quantised(checkpoint, expected)
    _say_what_is_left_out(checkpoint, config)
    loaded = []
    parts = list(zip(leaves, specs, runs, members, strict=True))
    for leaf, spec, run, member in tqdm(parts, desc="Loading weights", unit="param", mininterval=1.0):
        sharding = NamedSharding(mesh, spec)
        names = [_names(leaf.get_metadata("source"), run, group, member) for group in _groups(run)]
        loaded.append(leaf.replace(_load_parameter(checkpoint, leaf, names, sharding)))
    return jax.tree.unflatten(tree, loaded)


def _keys(path: tuple) -> list:
    return [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]


def _run_of(path: tuple, config: ModelConfig) -> Run | None:
    keys = _keys(path)
    return config.stages[keys[1]] if keys[0] == "stages" else None


def _member_of(path: tuple) -> int:
    keys = _keys(path)
    return keys[3] if keys[0] == "stages" else 0


def _groups(run: Run | None) -> range:
    return range(1 if run is None else run.num_groups)


def _names(source: Source, run: Run | None, group: int, member: int) -> tuple[str, ...]:
    if run is None:
        return source.names
    layer = run.layer(group, member)
    return tuple(name.format(layer=layer) for name in source.names)


def _expected(leaves: list, runs: list, members: list[int]) -> dict[str, tuple[int, ...]]:
    expected = {}
    for leaf, run, member in zip(leaves, runs, members, strict=True):
        source = leaf.get_metadata("source")
        for group in _groups(run):
            expected.update(dict.fromkeys(_names(source, run, group, member), source.shape))
    return expected


def _refuse_quantised(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Casting 8-bit weights without their scales would load noise."""
    found = {name: kind for name in names if (kind := checkpoint.info(name).dtype) not in _DTYPES}
    if found:
        name, kind = next(iter(found.items()))
        raise CheckpointError(
            f"{len(found)} tensors are stored as something else than {', '.join(_DTYPES)}, the first is {name} "
            f"({kind}); quantised weights cannot be loaded"
        )


def _ignored(config: ModelConfig) -> Callable[[str], bool]:
    """Tensors that files may carry but this network lacks: MTP layers, indexers of Shared layers, a tied head."""

    def ignored(name: str) -> bool:
        if name.startswith("model.layers."):
            layer = name.split(".")[2]
            if layer.isdigit() and int(layer) >= config.num_hidden_layers:
                return True
            return ".self_attn.indexer." in name and layer.isdigit() and not config.full[int(layer)]
        return name.endswith("rotary_emb.inv_freq") or (
            config.tie_word_embeddings and name == "lm_head.weight"
        )

    return ignored


def _say_what_is_left_out(checkpoint: Checkpoint, config: ModelConfig) -> None:
    ignored = _ignored(config)
    left = [name for name in checkpoint.names() if ignored(name)]
    if left:
        _log.info(
            "%d tensors are not loaded (MTP layers, or indexers of layers that share); the first is %s",
            len(left),
            left[0],
        )


def _load_parameter(
    checkpoint: Checkpoint, leaf: Any, names: list[tuple[str, ...]], sharding: NamedSharding
) -> jax.Array:
    """One parameter; stacked groups are written one by one into a sharded array that is updated in place."""
    source, dtype = leaf.get_metadata("source"), leaf.dtype
    if len(names) == 1:
        return _load_group(checkpoint, source, names[0], leaf.shape, dtype, sharding)
    inner = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    whole = _zeros(leaf.shape, dtype, sharding)
    for group, group_names in enumerate(names):
        part = _load_group(checkpoint, source, group_names, leaf.shape[1:], dtype, inner)
        whole = _set_group(whole, part, group)
    return whole


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


@functools.partial(jax.jit, donate_argnums=0)
def _set_group(whole: jax.Array, part: jax.Array, group: int) -> jax.Array:
    return whole.at[group].set(part)


def _load_group(
    checkpoint: Checkpoint,
    source: Source,
    names: tuple[str, ...],
    shape: tuple[int, ...],
    dtype: Any,
    sharding: NamedSharding,
) -> jax.Array:
    """One group's parameter: each distinct shard is cut out once, then placed on every device that holds it."""
    by_index: dict[str, tuple[Index, list[jax.Device]]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None  # only devices of the mesh are asked for
        by_index.setdefault(str(index), (index, []))[1].append(device)
    arrays = []
    for index, devices in by_index.values():
        shard = _cut(checkpoint, source, names, shape, index, np.dtype(dtype))
        arrays += [jax.device_put(shard, device) for device in devices]
        jax.block_until_ready(arrays[-len(devices) :])
    for name in names:
        checkpoint.release(name)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _cut(
    checkpoint: Checkpoint,
    source: Source,
    names: tuple[str, ...],
    shape: tuple[int, ...],
    index: Index,
    dtype: np.dtype,
) -> np.ndarray:
    """The part `index` of a parameter as a host array: tensors viewed, windowed, sliced, cast, and zero-padded."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    outer = len(source.stack)
    inner = tuple(slice(*bound) for bound in bounds[outer:])
    shard = np.zeros([stop - start for start, stop in bounds], dtype)
    for place, position in _stacked(bounds[:outer]):
        name = names[np.ravel_multi_index(position, source.stack) if outer else 0]
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
