"""Measuring the link of a DCP group: a few exchanges of two sizes, timed on the mesh that will run them."""

import contextlib
import json
import logging
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from glm_dcp_jax.parallel.exchange import Transport, exchange
from glm_dcp_jax.parallel.link import Link
from glm_dcp_jax.parallel.mesh import DCP

_log = logging.getLogger(__name__)

_SMALL, _LARGE = 4 * 2**10, 2**20
"""Bytes that each rank hands out."""
_RECEIVED = 8 * 2**20
"""Most bytes that each rank gets: virtual devices share a machine, whose memory all of them together would take."""
_CHAIN = 8
"""Exchanges that one program runs, each on what the one before brought: a single one would be lost in its start."""
_REPEATS = 7


def measured_link(mesh: Mesh, transport: Transport, folder: Path | None = None) -> Link:
    """The link of the mesh's DCP groups, all of them busy at once, from a folder's file or by measuring.

    folder: where results are kept by machine and versions; None keeps none. A file that cannot be read is made anew.
    """
    file = folder / f"{_key(mesh, transport)}.json" if folder else None
    if file and (kept := _read(file)):
        return kept
    world = mesh.shape[DCP]
    large = min(_LARGE, _RECEIVED // world)
    few, many = (_seconds(mesh, transport, size) for size in (_SMALL, large))
    moved = (world - 1) * (large - _SMALL)
    bandwidth = moved / max(many - few, 1e-9)
    latency = max(few - (world - 1) * _SMALL / bandwidth, 1e-7)
    link = Link(latency, bandwidth, "measured")
    if file:
        _write(file, link)
    return link


def _seconds(mesh: Mesh, transport: Transport, size: int) -> float:
    """How long one exchange takes when each rank hands out `size` bytes: the median over repeats."""
    world = mesh.shape[DCP]

    def chain(mine: jax.Array) -> jax.Array:
        for _ in range(_CHAIN):
            everything = exchange(mine, transport).reshape(world, *mine.shape)
            # A part that arrived goes out next: the exchanges cannot overlap, and none can be left out.
            mine = everything[jax.lax.rem(jax.lax.axis_index(DCP) + 1, world)] + 1
        return mine

    spec = P(mesh.axis_names)
    program = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    rows = mesh.size * max(size // 512, 1)
    mine = jax.device_put(jnp.zeros((rows, 128), jnp.int32), NamedSharding(mesh, spec))
    run: Callable[[], Any] = lambda: jax.block_until_ready(program(mine))  # noqa: E731
    run()
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) / _CHAIN


_LONGEST, _SLOWEST = 10.0, 1e3
"""Seconds and bytes/s beyond which a kept figure is no link's."""


def _key(mesh: Mesh, transport: Transport) -> str:
    device = mesh.devices.flat[0]
    kind = "".join(letter if letter.isalnum() else "-" for letter in device.device_kind)
    shape = "x".join(str(size) for size in np.shape(mesh.devices))
    return f"{kind}-{shape}-{transport}-{os.cpu_count()}cores-jax{jax.__version__}"


def _read(file: Path) -> Link | None:
    try:
        kept = json.loads(file.read_text())
        link = Link(float(kept["latency"]), float(kept["bandwidth"]), f"measured before, kept in {file}")
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    possible = 0 < link.latency < _LONGEST and _SLOWEST < link.bandwidth < math.inf
    return link if possible else None


def _write(file: Path, link: Link) -> None:
    """A folder that cannot be written costs a measurement at the next start, nothing else."""
    scratch = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps({"latency": link.latency, "bandwidth": link.bandwidth}))
        scratch.replace(file)
    except OSError as error:
        _log.warning("the measured link is not kept: %s", error)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
