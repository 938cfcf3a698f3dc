"""Which decode path a batch takes: what each path makes a step wait for, by bytes, collectives and the link.

The model: a collective that blocks costs its whole time. One that travels in a window costs what the window, the
reading of a layer's feed-forward weights, is too short for. Nothing else differs between the paths: each attends to the
same records with as many multiplications.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from glm_dcp_jax.config import ModelConfig
from glm_dcp_jax.parallel.attention import AttentionSettings
from glm_dcp_jax.parallel.capacity import Capacity
from glm_dcp_jax.parallel.link import Link

_FLOAT32 = 4


class Estimate(NamedTuple):
    """Of one path, for all layers of one decode step. received: bytes that each device is expected to get from others,
    by the step's shapes: without the rounds of overflows; where exchanges have too little memory for what a selection
    typically brings, the typical count of records instead of the room that rounds have.

    waited: seconds that the step waits for its exchanges; modelled.
    """

    path: str
    blocking: int
    hidden: int
    received: int
    waited: float


@dataclass(frozen=True)
class DecodePolicy:
    """Estimates for a model on a mesh. heads: of one device. memory_bandwidth: bytes/s.

    element_bytes: of activations and plain weights. expert_bytes, dense_bytes: of a parameter of experts and of dense
    feed-forwards as the checkpoint stores it, scales included.
    """

    model: ModelConfig
    settings: AttentionSettings
    heads: int
    tp: int
    element_bytes: int
    link: Link
    memory_bandwidth: float
    expert_bytes: float = 2.0
    dense_bytes: float = 2.0

    def choose(self, wanted: str, requests: int, rows: int, local_tokens: int) -> Estimate:
        """The path that was asked for; of `auto`, the one that waits least, and of equals the first."""
        found = self.estimates(requests, rows, local_tokens)
        if wanted != "auto":
            return next(estimate for estimate in found if estimate.path == wanted)
        return min(found, key=lambda estimate: estimate.waited)

    def estimates(self, requests: int, rows: int, local_tokens: int) -> tuple[Estimate, Estimate, Estimate]:
        """`queries`, `records` and `bulk`, for `requests` of `rows` rows whose page tables span local_tokens a rank."""
        return (
            self._queries(requests * rows),
            self._records(requests, rows, local_tokens),
            self._bulk(requests, rows, local_tokens),
        )

    @property
    def paying_rows(self) -> int | None:
        """From how many rows on it pays to project partial outputs to values before they are merged; None: never.

        Each row then sends v instead of C numbers a head, for the reading of the other ranks' value expansions.
        """
        spared = self.settings.latent_width - self.model.v_head_dim
        if spared <= 0 or math.isinf(self.memory_bandwidth):
            return None
        expansion = self.settings.latent_width * self.model.v_head_dim * self.element_bytes
        reading = expansion / self.memory_bandwidth
        return math.ceil(reading / (spared * self._partial_bytes / self.link.bandwidth))

    @property
    def _partial_bytes(self) -> int:
        """Of an element of partial outputs: a2a sends the activations' type, ag_rs sums in float32."""
        return self.element_bytes if self.settings.comm_backend == "a2a" else _FLOAT32

    def _queries(self, rows: int) -> Estimate:
        others, heads = self.settings.layout.world - 1, self.heads
        projected = self.settings.project_rows is not None and rows >= self.settings.project_rows
        columns = self.model.v_head_dim if projected else self.settings.latent_width
        gathered = others * rows * heads * self.model.record_width * self.element_bytes
        partials = others * rows * heads * columns * self._partial_bytes
        if self.settings.comm_backend == "a2a":
            parts = [gathered, partials + others * rows * heads * _FLOAT32]
        else:
            parts = [gathered, others * rows * heads * (others + 1) * _FLOAT32, partials]
        layers = self.model.num_hidden_layers
        waited = layers * sum(self.link.seconds(part) for part in parts)
        return Estimate("queries", layers * len(parts), 0, layers * sum(parts), waited)

    def _records(self, requests: int, rows: int, local_tokens: int) -> Estimate:
        layers, plane = self.model.num_hidden_layers, self._plane(requests, rows, local_tokens)
        each = self.link.seconds(plane) + self.rounds(requests, rows, local_tokens) * self.link.latency
        return Estimate("records", layers, 0, layers * plane, layers * each)

    def _bulk(self, requests: int, rows: int, local_tokens: int) -> Estimate:
        plane, rounds = (of(requests, rows, local_tokens) for of in (self._plane, self.rounds))
        each, waited, hidden = self.link.seconds(plane) + rounds * self.link.latency, 0.0, 0
        for run in self.model.runs:
            windows = [self._window(sparse, requests * rows) for sparse in run.sparse[:-1]]
            waited += run.num_groups * (each + sum(max(each - window, 0.0) for window in windows))
            hidden += run.num_groups * sum(window > 0 for window in windows)
        layers = self.model.num_hidden_layers
        return Estimate("bulk", layers - hidden, hidden, layers * plane, waited)

    def rounds(self, requests: int, rows: int, local_tokens: int) -> int:
        """Exchanges of each layer that an ordinary step needs beside the fast one, which --dcp-exchange-memory keeps
        too small for what is typical; 0 where it does not."""
        capacity = self._capacity(requests, rows, local_tokens)
        return -(-max(capacity.expected - capacity.fast, 0) // capacity.each_round)

    def _capacity(self, requests: int, rows: int, local_tokens: int) -> Capacity:
        return Capacity.for_block(self.settings, requests, rows, self.settings.index_topk, local_tokens)

    def _plane(self, requests: int, rows: int, local_tokens: int) -> int:
        """Bytes that one layer's fast exchange brings, and on average what a rest that cannot be fast does."""
        settings, world = self.settings, self.settings.layout.world
        capacity = self._capacity(requests, rows, local_tokens)
        return (world - 1) * max(capacity.fast, capacity.expected) * settings.record.record_bytes

    def _window(self, sparse: bool, rows: int) -> float:
        """Seconds that reading a feed-forward's weights takes: of experts, those that a row is expected to choose."""
        model = self.model
        if sparse:
            count, chosen = model.n_routed_experts, model.num_experts_per_tok
            read = count * (1 - (1 - chosen / count) ** rows) + model.n_shared_experts
            width, stored = read * model.moe_intermediate_size, self.expert_bytes
        else:
            width, stored = model.intermediate_size, self.dense_bytes
        return 3 * model.hidden_size * width * stored / self.tp / self.memory_bandwidth


def as_table(policy: DecodePolicy, wanted: str, buckets: Sequence[tuple[int, int, int]]) -> str:
    """A line per bucket (requests, rows of each, local tokens): what each path would wait for, and which is taken."""
    lines = [f"{'requests':>8} {'rows':>4} {'context':>9}  {'queries':>9} {'records':>9} {'bulk':>9}  taken"]
    for requests, rows, local_tokens in buckets:
        found = policy.estimates(requests, rows, local_tokens)
        waits = [f"{1e3 * estimate.waited:6.2f} ms" for estimate in found]
        taken = policy.choose(wanted, requests, rows, local_tokens).path
        taken += "" if wanted == "auto" else " (asked for)"
        lines.append(
            f"{requests:>8} {rows:>4} {local_tokens * policy.settings.layout.world:>9}  {' '.join(waits)}  {taken}"
        )
    return "\n".join(lines)
