"""Checkpoint -> parameters, straight into shards.

Each parameter says which tensors it is made of (parameters.Source). They are taken a piece at a time, a piece being one
tensor, or of stacked ones as many as fit into PIECE_BYTES: each device's part of it is cut out of the mapped file,
zero-padded, moved, written into the parameter in place, and forgotten. Some pieces are cut ahead, in threads, as
long as all of them fit into AHEAD_BYTES: host memory stays near that.
"""

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm_dcp_jax.config import ModelConfig
from glm_dcp_jax.model.network import NetworkShape, is_variable
from glm_dcp_jax.model.parameters import Source
from glm_dcp_jax.model.safetensors_reader import CheckpointError, verify
from glm_dcp_jax.model.stored_weights import PLAIN, StoredWeights, require_range
from glm_dcp_jax.progress import progress

_log = logging.getLogger(__name__)

# Stacked tensors that together stay below this are moved as one; a larger tensor is moved alone.
PIECE_BYTES = 32 << 20
AHEAD_BYTES = 192 << 20
READERS = 8
"""Threads that cut pieces: files are read, and values dequantised, beside each other."""
_MTP_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""The MTP layer takes the main model's instead, which published files rely on."""
_CACHE_SCALE = re.compile(r"\.self_attn\..*\b(q|k|v|kv)_(scale|zero_point)$")
"""As ModelOpt (k_proj.k_scale) and compressed-tensors (self_attn.k_scale) name them, before any module."""
Index = tuple[slice, ...]


class Leaf(NamedTuple):
    """A parameter to be loaded. sources: of each group. grouped: whether it has an axis over groups."""

    variable: Any
    sources: list[Source]
    sharding: NamedSharding
    grouped: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all groups, shards that several devices hold counted once."""
        return math.prod(self.variable.shape) * np.dtype(self.variable.dtype).itemsize

    def of_group(self, group: int) -> "Leaf":
        """One group's part as a parameter of its own."""
        alone = jax.ShapeDtypeStruct(self.inner_shape, self.variable.dtype)
        return Leaf(alone, [self.sources[group]], self.inner_sharding, False)

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """Shape of one group's part."""
        return self.variable.shape[1:] if self.grouped else self.variable.shape

    @property
    def parts(self) -> int:
        """How many parts the first axis of a group's part is split into."""
        axes = self.inner_sharding.spec[0] or ()
        return math.prod(
            self.sharding.mesh.shape[axis] for axis in (axes if isinstance(axes, tuple) else (axes,))
        )

    @property
    def inner_sharding(self) -> NamedSharding:
        """How one group's part lies on the mesh."""
        spec = PartitionSpec(*self.sharding.spec[1:]) if self.grouped else self.sharding.spec
        return NamedSharding(self.sharding.mesh, spec)


class _Piece(NamedTuple):
    """Part of a parameter. place: where it begins, along the parameter's first axes. shape: zero-padded."""

    leaf: Leaf
    source: Source
    place: tuple[int, ...]
    shape: tuple[int, ...]
    is_whole: bool

    @property
    def nbytes(self) -> int:
        """Bytes of what is moved, shards that several devices hold counted once."""
        return math.prod(self.shape) * np.dtype(self.leaf.variable.dtype).itemsize


_Shards = list[tuple[np.ndarray, list[jax.Device]]]
"""Each distinct part of a piece, and the devices that hold it."""


def load_parameters(stored: StoredWeights, config: ModelConfig, shape: NetworkShape, mesh: Mesh) -> Any:
    """The network's parameters on the mesh, as an nnx.State like shape.parameters.

    Raises CheckpointError naming missing, unexpected, mis-shaped or truncated tensors before anything is loaded, and
    files that changed in the meantime; for weights that the dtype cannot hold, too.
    """
    leaves = leaves_on(mesh, shape)
    check_tensors(stored, config, shape, leaves)
    with progress("Loading weights", sum(leaf.nbytes for leaf in leaves), "B") as bar:
        loaded = load_leaves(stored, leaves, bar.update)
    stored.checkpoint.require_unchanged()
    return as_parameters(shape, loaded)


def load_leaves(
    stored: StoredWeights, leaves: Sequence[Leaf], done: Callable[[int], object]
) -> list[jax.Array]:
    """These parameters, in their order. done: is told how many bytes have been placed, again and again."""
    loaded: dict[int, jax.Array] = {}
    pieces = [piece for leaf in leaves for piece in _pieces(leaf)]
    for piece, shards in _read_ahead(stored, pieces):
        number = id(piece.leaf.variable)
        loaded[number] = _placed(piece, shards, loaded.get(number))
        done(piece.nbytes)
    return [loaded[id(leaf.variable)] for leaf in leaves]


def as_parameters(shape: NetworkShape, arrays: Iterable[jax.Array]) -> Any:
    """An nnx.State like shape.parameters, of arrays in the order of `leaves_on`."""
    variables, tree = jax.tree.flatten(shape.parameters, is_leaf=is_variable)
    return jax.tree.unflatten(
        tree, [variable.replace(array) for variable, array in zip(variables, arrays, strict=True)]
    )


def check_tensors(
    stored: StoredWeights, config: ModelConfig, shape: NetworkShape, leaves: Iterable[Leaf]
) -> None:
    """Raise CheckpointError unless all of these can be loaded; say what is left out, and what is dequantised."""
    expected = {name: source.shape for leaf in leaves for source in leaf.sources for name in source.names}
    _require_mtp(stored, shape)
    try:
        _verify(stored, expected, config, shape)
    except CheckpointError as error:
        if shape.mtp_layer is None:
            raise
        start = f"model.layers.{shape.mtp_layer}."
        trunk = {name: size for name, size in expected.items() if not name.startswith(start)}
        with contextlib.suppress(CheckpointError):
            _verify(stored, trunk, config, shape._replace(mtp_layer=None))
            error.args = (
                f"{error}\nAll but the MTP layer ({start}*) is as it should be, and only drafts need that: leave "
                "--speculative-config out, or convert with --no-mtp",
            )
        raise
    _say_what_is_left_out(stored, config, shape)
    _say_what_is_dequantised(stored, leaves)


def _verify(
    stored: StoredWeights, expected: Mapping[str, tuple[int, ...]], config: ModelConfig, shape: NetworkShape
) -> None:
    stored.check(expected)  # first: what a weight is stored as decides its shape
    present = {name: stored.shape(name) for name in stored.names()}
    ignored = lambda name: _why_left_out(name, config, shape) is not None  # noqa: E731
    verify(expected, present, stored.checkpoint.directory, ignored=ignored)


def leaves_on(mesh: Mesh, shape: NetworkShape) -> list[Leaf]:
    """All parameters, in the order of the tree's leaves."""
    flat, _ = jax.tree_util.tree_flatten_with_path(shape.parameters, is_leaf=is_variable)
    leaves = []
    for (path, variable), spec in zip(flat, shape.leaf_specs, strict=True):
        source = variable.get_metadata("source")
        sources = [_of_layer(source, layer) for layer in shape.layers_of(path)]
        grouped = variable.ndim > len(source.stack) + len(source.part_shape)
        leaves.append(Leaf(variable, sources, NamedSharding(mesh, spec), grouped))
    return leaves


def _of_layer(source: Source, layer: int | None) -> Source:
    """The source with its layer's number in the names."""
    return dataclasses.replace(source, names=tuple(name.format(layer=layer) for name in source.names))


def _require_mtp(stored: StoredWeights, shape: NetworkShape) -> None:
    """Many checkpoints are without the MTP layer that their config.json tells of: exporters drop it."""
    prefix = f"model.layers.{shape.mtp_layer}."
    if shape.mtp_layer is not None and not any(name.startswith(prefix) for name in stored.names()):
        raise CheckpointError(
            f"{stored.checkpoint.directory} has no tensors of the MTP layer ({prefix}*), which speculative decoding "
            "drafts with; use a checkpoint that has them, or leave --speculative-config out"
        )


def _why_left_out(name: str, config: ModelConfig, shape: NetworkShape) -> str | None:
    """What a tensor is that files may carry but this network lacks; None for any other."""
    if _CACHE_SCALE.search(name):
        return "scales of a quantised KV cache, whose formats here have scales of their own"
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


def _say_what_is_left_out(stored: StoredWeights, config: ModelConfig, shape: NetworkShape) -> None:
    kinds = {name: kind for name in stored.names() if (kind := _why_left_out(name, config, shape))}
    if kinds:
        first = {kind: name for name, kind in reversed(kinds.items())}
        counts = collections.Counter(kinds.values())
        listed = "; ".join(f"{count} {kind} ({first[kind]})" for kind, count in counts.items())
        _log.info("%d tensors are not loaded: %s", len(kinds), listed)


def _say_what_is_dequantised(stored: StoredWeights, leaves: Iterable[Leaf]) -> None:
    names = {
        name
        for leaf in leaves
        for source in leaf.sources
        if source.part == "values"
        for name in source.names
        if stored.of(name) != PLAIN
    }
    if names:
        _log.info(
            "%d quantised weights are dequantised while they are loaded, first %s", len(names), min(names)
        )


def _pieces(leaf: Leaf) -> Iterator[_Piece]:
    """In the order of the parameter; pieces of one source are of one size."""
    itemsize = np.dtype(leaf.variable.dtype).itemsize
    for group, source in enumerate(leaf.sources):
        lead = (group,) if leaf.grouped else ()
        if not source.stack:
            yield _Piece(leaf, source, lead, leaf.inner_shape, not lead)
            continue
        count, *rest = source.stack
        names = math.prod(rest)
        # Where the first stacked axis is split over ranks, a piece has as many of each rank's own.
        parts = leaf.parts
        local = leaf.inner_shape[0] // parts
        fitting = PIECE_BYTES // max(1, parts * names * math.prod(source.part_shape) * itemsize)
        size = next(size for size in range(max(1, min(local, fitting)), 0, -1) if local % size == 0)
        for start in range(0, local, size):
            own = [
                source.names[at * names : (at + 1) * names] if at < count else ("",) * names
                for part in range(parts)
                for at in range(part * local + start, part * local + start + size)
            ]
            piece = dataclasses.replace(source, names=sum(own, ()), stack=(parts * size, *rest))
            shape = (parts * size, *leaf.inner_shape[1:])
            yield _Piece(leaf, piece, (*lead, start), shape, size == local and not lead)


def _read_ahead(stored: StoredWeights, pieces: Iterable[_Piece]) -> Iterator[tuple[_Piece, _Shards]]:
    """Each piece cut into shards, in order."""
    waiting: collections.deque[tuple[_Piece, Future[_Shards]]] = collections.deque()
    under_way = 0
    with ThreadPoolExecutor(READERS, "weights") as readers:
        try:
            for piece in pieces:
                while waiting and under_way + piece.nbytes > AHEAD_BYTES:
                    under_way -= waiting[0][0].nbytes
                    first, future = waiting.popleft()
                    yield first, future.result()
                waiting.append((piece, readers.submit(_shards, stored, piece)))
                under_way += piece.nbytes
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            readers.shutdown(cancel_futures=True)


def _placed(piece: _Piece, shards: _Shards, whole: jax.Array | None) -> jax.Array:
    """The parameter with a piece in its place; whole: what was placed before, which is updated in place."""
    arrays = [jax.device_put(shard, device) for shard, devices in shards for device in devices]
    inner = piece.leaf.inner_sharding
    part = jax.make_array_from_single_device_arrays(piece.shape, inner, arrays)
    return jax.block_until_ready(part) if piece.is_whole else write(piece.leaf, part, piece.place, whole)


def write(leaf: Leaf, part: jax.Array, place: tuple[int, ...], whole: jax.Array | None) -> jax.Array:
    """The parameter with a part, which lies on the mesh as a group's part does, at its place.

    place: counted on each device, along the first axes. whole: what was written before, which is updated in place.
    """
    if whole is None:
        whole = _zeros(leaf.variable.shape, leaf.variable.dtype, leaf.sharding)
    # Writes that wait would each keep their part.
    return jax.block_until_ready(_write(whole, part, place, leaf.sharding, leaf.inner_sharding.spec))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(3, 4))
def _write(
    whole: jax.Array, part: jax.Array, place: tuple[int, ...], sharding: NamedSharding, spec: PartitionSpec
) -> jax.Array:
    """whole with part, which lies as `spec` says, at `place`: on each device, counted along its first axes."""

    def write_own(whole: jax.Array, part: jax.Array, place: tuple[int, ...]) -> jax.Array:
        starts = (*place, *(0,) * (whole.ndim - len(place)))
        part = jax.lax.expand_dims(part, range(whole.ndim - part.ndim))
        if whole.dtype.itemsize > 1:
            return jax.lax.dynamic_update_slice(whole, part, starts)
        # As bytes: to write a part, XLA for CPUs would convert all of an array of float8 there and back.
        codes, own = (jax.lax.bitcast_convert_type(array, jnp.uint8) for array in (whole, part))
        return jax.lax.bitcast_convert_type(jax.lax.dynamic_update_slice(codes, own, starts), whole.dtype)

    specs = (sharding.spec, spec, PartitionSpec())
    return jax.shard_map(write_own, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec)(
        whole, part, place
    )


def _shards(stored: StoredWeights, piece: _Piece) -> _Shards:
    """Cut a piece: each distinct shard once, however many devices hold it."""
    by_index: dict[str, tuple[Index, list[jax.Device]]] = {}
    for device, index in piece.leaf.inner_sharding.addressable_devices_indices_map(piece.shape).items():
        assert index is not None  # only devices of the mesh are asked for
        by_index.setdefault(str(index), (index, []))[1].append(device)
    dtype = np.dtype(piece.leaf.variable.dtype)
    shards = [
        (_cut(stored, piece.source, piece.shape, index, dtype), devices)
        for index, devices in by_index.values()
    ]
    for name in filter(None, piece.source.names):
        stored.release(name)
    return shards


def _cut(
    stored: StoredWeights, source: Source, shape: tuple[int, ...], index: Index, dtype: np.dtype
) -> np.ndarray:
    """The part `index` of a piece as a host array: tensors viewed, windowed, sliced, cast, and zero-padded."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    outer = len(source.stack)
    inner = tuple(slice(*bound) for bound in bounds[outer:])
    shard = np.zeros([stop - start for start, stop in bounds], dtype)
    for place, position in _stacked(bounds[:outer]):
        name = source.names[np.ravel_multi_index(position, source.stack) if outer else 0]
        if not name:  # padding
            continue
        found = _read(stored, name, source, inner)
        # The ellipsis keeps one number a view.
        where: tuple[Any, ...] = (*place, *(slice(0, size) for size in found.shape), ...)
        part = shard[where]
        with np.errstate(over="ignore"):
            part[...] = found
        require_range(name, found, part)
    return shard


def _read(stored: StoredWeights, name: str, source: Source, index: Index) -> np.ndarray:
    """A slice of one tensor's part, as far as there is any of it."""
    if source.view is None:
        return stored.read(name, source.part, source.grain, index)
    heads, rows, *_ = source.view  # a view splits the rows
    first, last = index[0].start, min(index[0].stop, heads)
    own = stored.read(
        name, source.part, source.grain, (slice(first * rows, max(first, last) * rows), index[2])
    )
    viewed = own.reshape(len(own) // rows, rows, own.shape[1])
    if source.window is not None:
        axis, start, stop = source.window
        viewed = viewed[(slice(None),) * axis + (slice(start, stop),)]
    return viewed[:, index[1]]


def _stacked(bounds: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Pairs (place in the shard, index of the tensor) over the leading, stacked axes."""
    for place in np.ndindex(*(stop - start for start, stop in bounds)):
        yield place, tuple(start + at for (start, _), at in zip(bounds, place, strict=True))
