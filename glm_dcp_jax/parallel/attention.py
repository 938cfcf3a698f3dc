"""The interface of attention over the paged, sharded cache.

Per share group, always in this order:

    plan          = path.plan(selection, block)      once, from the Full layer's selection
    flight        = path.start(plan, ckv, planes)    what may travel during the group
    out           = path.attend(plan, flight, layer, queries, current)        once per layer
    value, flight = path.window(flight, layer, "attention"|"ffn", value)      before each all-reduce

All functions run inside `shard_map`: arrays are one device's part. Every path gives the same answer.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels.dispatch import Backend
from glm_dcp_jax.kernels.row_blocks import WORKSPACE_BYTES
from glm_dcp_jax.kernels.sparse_attention.tiling import SHARED_MEMORY
from glm_dcp_jax.parallel.batch import Block, Selection
from glm_dcp_jax.parallel.exchange import Transport

_SHARED_MEMORY = {9: 227 * 1024, 10: 227 * 1024}
"""By compute capability's first number: Hopper and B200 have more than the least that is assumed."""

Plan = Any
Flight = Any
Window = Literal["attention", "ffn"]


class Queries(NamedTuple):
    """This rank's heads, before absorption. nope: [N, S, h, nope]. rope: [N, S, h, R], rotated."""

    nope: Float[Array, "N S h nope"]
    rope: Float[Array, "N S h R"]


class AttentionLayer(NamedTuple):
    """What a path needs to know of a layer. number: in the model. plane: in the pool. member: in its share group.

    kv_b split per local head: key_expansion: [h, nope, C], value_expansion: [h, v, C]. group_values: the latter of all
    heads of the DCP group, where each rank keeps it.
    """

    number: Int[Array, ""] | int
    plane: Int[Array, ""] | int
    member: int
    key_expansion: Float[Array, "h nope C"]
    value_expansion: Float[Array, "h v C"]
    group_values: Float[Array, "WH v C"] | None = None


@dataclass(frozen=True)
class AttentionSettings:
    """What all paths share: cache geometry and format, merge backend, softmax scale and sizes.

    gather_bytes: records that sparse prefill gathers at once. latent_scales: each layer's outer scale; None: all 1.
    transport: how records are exchanged. exchange_bytes: what a device may hold of exchanged records.
    project_rows: from how many rows on partial outputs become values before they are merged; None: never.
    kernels: which implementation of the ops runs. shared_memory: bytes that a program of a kernel may take.
    """

    layout: Layout
    record: RecordFormat
    comm_backend: str
    scale: float
    latent_width: int
    index_topk: int
    gather_bytes: int = WORKSPACE_BYTES
    latent_scales: tuple[float, ...] | None = None
    transport: Transport = "direct"
    exchange_bytes: int = 512 * 2**20
    project_rows: int | None = None
    kernels: Backend = "auto"
    shared_memory: int = SHARED_MEMORY

    def on(self, device: jax.Device) -> "AttentionSettings":
        """The settings with what the device decides: `auto` kernels, and its shared memory.

        Left to each op, `auto` would trace both of its implementations.
        """
        if device.platform == "cpu":
            return replace(self, kernels="reference") if self.kernels == "auto" else self
        kernels = "triton" if self.kernels == "auto" else self.kernels
        major = int(device.compute_capability.split(".")[0])
        return replace(self, kernels=kernels, shared_memory=_SHARED_MEMORY.get(major, SHARED_MEMORY))

    def outer_scale(self, layer: Int[Array, ""] | int) -> Float[Array, ""] | None:
        """What the latents of a layer are divided by before they are encoded; None for nothing."""
        if self.latent_scales is None:
            return None
        return jnp.array(self.latent_scales, jnp.float32)[layer]


class Moved(NamedTuple):
    """What plans make travel in each layer, counted over blocks; all int32, and equal on all ranks.

    entries: selected positions of all rows that earlier steps committed. records: the same, each once per request.
    overflows: 1 if the fast exchange has no room for all of them. In the same shape it describes itself by
    PartitionSpecs, hence the open types.
    """

    entries: Any
    records: Any
    overflows: Any

    @staticmethod
    def nothing() -> "Moved":
        """No record leaves its rank."""
        return Moved(*(jnp.zeros((), jnp.int32) for _ in Moved._fields))

    def plus(self, other: "Moved") -> "Moved":
        """Both together."""
        return Moved(*(one + more for one, more in zip(self, other, strict=True)))


class AttentionPath(Protocol):
    """One way to attend over records that live on other ranks."""

    def wants_mask(self, block: Block) -> bool:
        """Whether `plan` takes the selection as a mask (True) or as positions."""
        ...

    def plan(self, selection: Selection, block: Block) -> Plan:
        """Owners and slots of a selection; serves all layers of the group."""
        ...

    def moved(self, plan: Plan) -> Moved:
        """What the plan makes travel, for metrics."""
        ...

    def start(self, plan: Plan, ckv: Shaped[Array, "layers slots width"], planes: Int[Array, " G"]) -> Flight:
        """Begin what can travel before it is needed. `ckv` holds what earlier steps committed; planes: the group's."""
        ...

    def attend(
        self, plan: Plan, flight: Flight, layer: AttentionLayer, queries: Queries, current: Array
    ) -> Float[Array, "N S h v"]:
        """float32 attention outputs of this rank's heads. current: [N, S, width], the step's own encoded records."""
        ...

    def window(
        self, flight: Flight, layer: AttentionLayer, kind: Window, value: Array
    ) -> tuple[Array, Flight]:
        """Tie what must have arrived by now to `value`, which an all-reduce is about to take."""
        ...


class Stationary:
    """A path that sends nothing ahead: its flight is the pool itself, its windows are empty."""

    def moved(self, plan: Plan) -> Moved:
        """Nothing, unless the path says otherwise."""
        return Moved.nothing()

    def start(self, plan: Plan, ckv: Shaped[Array, "layers slots width"], planes: Int[Array, " G"]) -> Flight:
        """The pool to read from."""
        return ckv

    def window(
        self, flight: Flight, layer: AttentionLayer, kind: Window, value: Array
    ) -> tuple[Array, Flight]:
        """Nothing is in flight."""
        return value, flight
