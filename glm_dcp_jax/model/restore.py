"""Converted checkpoint -> parameters, on whatever mesh.

A part is read at a time, each device's shards alone, written into the stacks in place, and forgotten. Arrays are padded
with zeros at their ends, so those of another mesh are cut or padded; and a device's scales are of whole fractions of
the original's blocks, so scales of other fractions are found among them.
"""

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm_dcp_jax.kernels.weights import Fp8Weight, Nvfp4Weight, dequantised
from glm_dcp_jax.model.converted import OUTSIDE, ConvertedCheckpoint, array_name, part_name
from glm_dcp_jax.model.load import Leaf, as_parameters, leaves_on, write
from glm_dcp_jax.model.manifest import CONVERT_AGAIN, MANIFEST, WEIGHTS, Part, SavedArray
from glm_dcp_jax.model.network import NetworkShape, is_variable
from glm_dcp_jax.model.safetensors_reader import CheckpointError
from glm_dcp_jax.progress import progress

_log = logging.getLogger(__name__)
_COPIES = {"group_values": "value_expansion"}
"""Parameters that hold the same values as others, sharded in another way."""
_PARTS_OF_CODES = ("codes", "scales", "outer")


class _Wanted(NamedTuple):
    """A parameter's group that a part is read for. own: that group's part of it. base: its name less `.values`."""

    leaf: Leaf
    group: int
    own: Leaf
    name: str

    @property
    def base(self) -> str:
        return self.name.removesuffix(".values")


def restore_parameters(converted: ConvertedCheckpoint, shape: NetworkShape, mesh: Mesh) -> Any:
    """The network's parameters on the mesh, as an nnx.State like shape.parameters.

    Needs memory for one part beside them. Raises CheckpointError naming what the checkpoint lacks or holds in other
    sizes, before anything is read, and parts that cannot be read.
    """
    leaves = leaves_on(mesh, shape)
    check_parts(converted, shape, leaves)
    wanted = _wanted(shape, leaves)
    _say_what_is_cast(converted, wanted)
    whole: dict[int, jax.Array] = {}
    with progress("Loading weights", sum(leaf.nbytes for leaf in leaves), "B") as bar:
        for name, of_part in wanted.items():
            arrays = _read(converted, name, of_part, mesh)
            for each in of_part:
                number, array = id(each.leaf.variable), _made(each, arrays, converted.manifest.parts[name])
                if each.leaf.grouped:
                    array = write(each.leaf, array, (each.group,), whole.get(number))
                whole[number] = array
                bar.update(each.own.nbytes)
            del arrays, array
    return as_parameters(shape, [whole[id(leaf.variable)] for leaf in leaves])


def check_parts(converted: ConvertedCheckpoint, shape: NetworkShape, leaves: Iterable[Leaf]) -> None:
    """Raise CheckpointError naming what the checkpoint lacks, or holds in other sizes than these leaves need."""
    _check(converted, shape, _wanted(shape, leaves))


def _wanted(shape: NetworkShape, leaves: Iterable[Leaf]) -> dict[str, list[_Wanted]]:
    """By part."""
    flat, _ = jax.tree_util.tree_flatten_with_path(shape.parameters, is_leaf=is_variable)
    wanted: dict[str, list[_Wanted]] = {}
    for (path, _), leaf in zip(flat, leaves, strict=True):
        *start, last = array_name(path).split(".")
        name = ".".join([*start, _COPIES.get(last, last)])
        for group, layer in enumerate(shape.layers_of(path)):
            wanted.setdefault(part_name(layer), []).append(_Wanted(leaf, group, leaf.of_group(group), name))
    return wanted


def _check(converted: ConvertedCheckpoint, shape: NetworkShape, wanted: Mapping[str, list[_Wanted]]) -> None:
    made, parts = converted.manifest, converted.manifest.parts
    if shape.mtp_layer is not None and shape.mtp_layer != made.mtp_layer:
        raise CheckpointError(
            f"{converted.directory} was converted without the MTP layer {shape.mtp_layer}, which speculative decoding "
            f"drafts with; {CONVERT_AGAIN} without --no-mtp, or leave --speculative-config out"
        )
    problems = [
        problem for name, of_part in wanted.items() for problem in _problems(name, of_part, parts.get(name))
    ]
    if problems:
        more = f"\nand {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"the weights of {converted.directory} ({MANIFEST}) do not match the model that its config.json describes; "
            f"use the config.json that was converted with them, or {CONVERT_AGAIN}:\n"
            + "\n".join(problems[:5])
            + more
        )


def _problems(name: str, wanted: Iterable[_Wanted], part: Part | None) -> Iterator[str]:
    """What a part lacks, or holds in other sizes."""
    if part is None:
        yield f"  {name} is missing"
        return
    for each in wanted:
        needed, saved = _weight_shape(each.own), list(_sources(each, part).values())
        if not saved:
            yield f"  {name} has no {each.name}"
        elif saved[0].weight != needed:
            yield f"  {name}: {each.name} is of {list(saved[0].weight)} instead of {list(needed)}"


def _weight_shape(own: Leaf) -> tuple[int, ...]:
    (source,) = own.sources
    return source.stack + (source.part_shape if source.part == "values" else source.shape)


def _sources(each: _Wanted, part: Part) -> dict[str, SavedArray]:
    """What a parameter is made of: the array of that name, or codes and scales where it is kept as values alone."""
    if each.name in part.arrays:
        return {each.name: part.arrays[each.name]}
    names = [f"{each.base}.{kind}" for kind in _PARTS_OF_CODES]
    return {name: part.arrays[name] for name in names if name in part.arrays and each.name != each.base}


def _say_what_is_cast(converted: ConvertedCheckpoint, wanted: Mapping[str, list[_Wanted]]) -> None:
    outside = converted.manifest.parts[OUTSIDE].arrays
    asked = {np.dtype(each.own.variable.dtype).name for each in wanted[OUTSIDE] if each.name in outside}
    if asked != {converted.manifest.dtype}:
        _log.info(
            "weights that are not quantised were converted as %s, and are cast to %s while they are loaded",
            converted.manifest.dtype,
            ", ".join(sorted(asked)),
        )


def _read(
    converted: ConvertedCheckpoint, name: str, wanted: Iterable[_Wanted], mesh: Mesh
) -> dict[str, jax.Array]:
    """A part's arrays by name: as the parameters are, or whole on each device where they are made into others."""
    import orbax.checkpoint as ocp  # slow to import, and only converted checkpoints need it

    part = converted.manifest.parts[name]
    everywhere = NamedSharding(mesh, PartitionSpec())
    arguments = {}
    for each in wanted:
        own, (source,) = each.own.variable, each.own.sources
        for key, saved in _sources(each, part).items():
            as_it_is = key == each.name and (source.part != "scales" or saved.grain == source.grain)
            arguments[key] = (
                ocp.ArrayRestoreArgs(
                    sharding=each.own.sharding, global_shape=own.shape, strict=False, dtype=own.dtype
                )
                if as_it_is
                else ocp.ArrayRestoreArgs(sharding=everywhere)
            )
    folder = converted.directory / WEIGHTS / name
    shapes = {key: jax.ShapeDtypeStruct(part.arrays[key].shape, part.arrays[key].dtype) for key in arguments}
    args = ocp.args.PyTreeRestore(item=shapes, restore_args=arguments, partial_restore=True)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            held = dict(checkpointer.metadata(folder.absolute()).item_metadata)
            # Padded or cut to what the manifest says, arrays would be other arrays.
            if not (contradiction := _contradiction(part, held, arguments)):
                return checkpointer.restore(folder.absolute(), args=args)
    except Exception as error:  # tensorstore fails in many ways
        raise CheckpointError(
            f"{folder} cannot be read ({error}); --verify-checksums tells whether its files are as they were written: "
            f"if not, copy them again, or {CONVERT_AGAIN}"
        ) from error
    raise CheckpointError(
        f"{converted.directory / MANIFEST} contradicts {folder}: {contradiction}; {CONVERT_AGAIN}"
    )


def _contradiction(part: Part, held: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """What the manifest says otherwise than orbax's own description."""
    for name in names:
        said, found = part.arrays[name], held.get(name)
        if found is None:
            return f"there is no {name}"
        if (said.shape, said.dtype) != (tuple(found.shape), np.dtype(found.dtype).name):
            return f"{name} is {found.dtype} {list(found.shape)} instead of {said.dtype} {list(said.shape)}"
    return None


def _made(each: _Wanted, arrays: Mapping[str, jax.Array], part: Part) -> jax.Array:
    """One parameter's group from what was read for it."""
    own, (source,) = each.own, each.own.sources
    shape, sharding = own.variable.shape, own.sharding
    saved = _sources(each, part)
    if each.name not in saved:
        kind = Nvfp4Weight if f"{each.base}.outer" in saved else Fp8Weight
        weight = kind(*(arrays[key] for key in saved))
        found = _values(weight, shape, own.variable.dtype, sharding)
    elif source.part == "scales" and saved[each.name].grain != source.grain:
        counts = source.part_shape[-2:]
        places = zip(counts, source.grain, saved[each.name].grain, strict=True)
        # A block of the original's has one scale: that of its first row or column.
        rows, columns = (np.arange(count) * own_grain // grain for count, own_grain, grain in places)
        found = _picked(arrays[each.name], rows, columns, shape, sharding)
    else:
        found = arrays[each.name]
    _require_range(each, saved, found)
    return jax.block_until_ready(jax.device_put(found, sharding))


def _require_range(each: _Wanted, saved: Mapping[str, SavedArray], found: jax.Array) -> None:
    """As of the original: what was converted as another dtype may not fit into float16."""
    cast = found.dtype == np.float16 and [array.dtype for array in saved.values()] != ["float16"]
    if cast and bool(jnp.isinf(found).any()):
        raise CheckpointError(
            f"{each.name} holds values beyond {np.finfo(np.float16).max:g}, where float16 ends; use --dtype "
            "bfloat16 or float32"
        )


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _values(weight: Any, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.Array:
    return _fitted(dequantised(weight).astype(dtype), shape, sharding)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _picked(
    scales: jax.Array, rows: jax.Array, columns: jax.Array, shape: tuple[int, ...], sharding: NamedSharding
) -> jax.Array:
    return _fitted(scales[..., rows[:, None], columns], shape, sharding)


def _fitted(array: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """Cut or padded at the ends of all axes."""
    cut = array[tuple(slice(0, size) for size in shape)]
    padding = [(0, size - own) for size, own in zip(shape, cut.shape, strict=True)]
    return jax.lax.with_sharding_constraint(jnp.pad(cut, padding), sharding)
