"""Checkpoint -> converted checkpoint: each layer is loaded as for serving, saved with orbax, and forgotten."""

import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from glm_dcp_jax.config import ModelConfig
from glm_dcp_jax.model.converted import array_name, part_name
from glm_dcp_jax.model.converted import without_experts as collapsed
from glm_dcp_jax.model.load import Leaf, check_tensors, leaves_on, load_leaves
from glm_dcp_jax.model.manifest import WEIGHTS, Manifest, Part, SavedArray, SavedFile
from glm_dcp_jax.model.network import NetworkShape, is_variable
from glm_dcp_jax.model.stored_weights import PLAIN, StoredWeights

CHUNK_BYTES = 64 << 20
"""What is read at once: another mesh's share of an array should not need much more than itself."""
_HASHERS = 4

Parts = dict[str, dict[str, Leaf]]
"""For each part its parameters by name."""


def has_mtp(stored: StoredWeights, config: ModelConfig) -> bool:
    """Whether the checkpoint has an MTP layer: exporters drop it, and config.json tells of it all the same."""
    prefix = f"model.layers.{config.num_hidden_layers}."
    return config.num_nextn_predict_layers > 0 and any(name.startswith(prefix) for name in stored.names())


def parts_of(shape: NetworkShape, mesh: Mesh) -> Parts:
    """The network, made without group_values, cut into what is saved together."""
    flat, _ = jax.tree_util.tree_flatten_with_path(shape.parameters, is_leaf=is_variable)
    parts: Parts = {}
    for (path, _), leaf in zip(flat, leaves_on(mesh, shape), strict=True):
        for group, layer in enumerate(shape.layers_of(path)):
            parts.setdefault(part_name(layer), {})[array_name(path)] = leaf.of_group(group)
    return parts


def nbytes_of(stored: StoredWeights, parts: Parts) -> int:
    """Bytes of all arrays, as they are written."""
    return sum(_exact(stored, leaf).nbytes for part in parts.values() for leaf in part.values())


def check(stored: StoredWeights, config: ModelConfig, shape: NetworkShape, parts: Parts) -> None:
    """Raise CheckpointError unless the checkpoint has all that these are made of."""
    check_tensors(stored, config, shape, [leaf for part in parts.values() for leaf in part.values()])


def convert_weights(
    stored: StoredWeights, parts: Parts, manifest: Manifest, directory: Path, done: Callable[[int], object]
) -> Manifest:
    """Write the weights and the manifest into a model directory. Needs memory for one part.

    manifest: without parts. done: is told how many bytes have been converted, again and again. Returns the manifest as
    written. Raises CheckpointError for a checkpoint that changes in the meantime.
    """
    saved = {}
    for name, given in parts.items():
        leaves = {key: _exact(stored, leaf) for key, leaf in given.items()}
        folder = directory / WEIGHTS / name
        _save(folder, dict(zip(leaves, load_leaves(stored, list(leaves.values()), done), strict=True)))
        arrays = {key: _saved(leaf) for key, leaf in leaves.items()}
        saved[name] = Part(arrays, _formats(leaves.values()), _files(directory, folder))
    stored.checkpoint.require_unchanged()
    whole = replace(manifest, parts=saved)
    whole.write(directory)
    return whole


def _exact(stored: StoredWeights, leaf: Leaf) -> Leaf:
    """In float32 what is dequantised, such as kv_b: whoever serves it rounds it once, as from the original."""
    (source,) = leaf.sources
    if source.part != "values" or all(stored.of(name) == PLAIN for name in source.names if name):
        return leaf
    return leaf._replace(variable=jax.ShapeDtypeStruct(leaf.variable.shape, np.float32))


def _save(folder: Path, arrays: dict[str, jax.Array]) -> None:
    import orbax.checkpoint as ocp  # slow to import, and only converted checkpoints need it

    # What several devices hold is written by one, not in slices of each. Codes of weights are as good as random, so
    # compressing them costs time and gains nothing.
    by_one = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, by_one))
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
    each = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            args = ocp.args.PyTreeSave(arrays, save_args=dict.fromkeys(arrays, each))
            checkpointer.save(folder.absolute(), args=args)
    except Exception as error:  # tensorstore fails in many ways
        of_system = re.search(r"os_error_code='(\d+)'", str(error))
        why = os.strerror(int(of_system[1])) if of_system else str(error)
        raise OSError(
            f"{folder} cannot be written: {why}; make room there, or give a directory on another disk"
        ) from error


def _saved(leaf: Leaf) -> SavedArray:
    (source,) = leaf.sources
    inner = source.part_shape if source.part == "values" else source.shape
    grain = source.grain if source.part == "scales" else (1, 1)
    return SavedArray(source.stack + inner, leaf.variable.shape, np.dtype(leaf.variable.dtype).name, grain)


def _formats(leaves: Iterable[Leaf]) -> dict:
    """Of each weight that is not plain."""
    return {
        collapsed(name.split(".", 3)[3]): source.stored
        for leaf in leaves
        for source in leaf.sources
        if source.stored != PLAIN
        for name in source.names
    }


def _files(directory: Path, folder: Path) -> tuple[SavedFile, ...]:
    """All files of a part, on the disk and with their checksums."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(_HASHERS, "checksums") as hashers:
        return tuple(hashers.map(lambda path: _settled(directory, path), paths))


def _settled(directory: Path, path: Path) -> SavedFile:
    """A power failure must not leave a complete directory of incomplete files."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    return SavedFile.of(directory, path)
