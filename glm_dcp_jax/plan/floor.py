"""The least bytes that a decode step reads on each GPU: used weights, records and index keys, each once.

Weights count as they lie on the device: what is replicated, on every GPU; of routed experts those that the step's rows
are expected to choose; of the embedding the rows' own. Records are those of a request's selections, each once: rows
beside the first add a quarter of theirs (parallel/capacity.py). On path `queries` each rank reads those that it owns.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.config import ModelConfig
from glm_dcp_jax.parallel.capacity import NEW_PER_ROW
from glm_dcp_jax.plan.bytes_read import Bytes
from glm_dcp_jax.plan.parts import INDEX_KEYS, RECORDS
from glm_dcp_jax.plan.times import expected_experts
from glm_dcp_jax.plan.weights import SECOND_COPY, Leaf


@dataclass(frozen=True)
class Floor:
    """Of a step of `requests` requests of `rows` rows that see `context` tokens. leaves: of all parameters.

    drafts: tokens that the MTP layer guesses behind the step; 0 for none.
    """

    model: ModelConfig
    leaves: tuple[Leaf, ...]
    layout: Layout
    record: RecordFormat
    path: str
    requests: int
    rows: int
    context: int
    drafts: int = 0

    def total(self) -> Bytes:
        """By part, drafts included."""
        total: Bytes = defaultdict(float, self.step())
        for part, nbytes in self.drafting().items():
            total[part] += nbytes
        return dict(total)

    def step(self) -> Bytes:
        """The main model's part of it, by part."""
        total = self._weights((leaf for leaf in self.leaves if leaf.part != "mtp"), self.rows)
        model, own = self.model, self.layout.world if self.path == "queries" else 1
        total[RECORDS] = model.num_hidden_layers * self.unique_records * self.record.record_bytes / own
        total[INDEX_KEYS] = model.num_full_layers * self._index_bytes / self.layout.index_shards
        return total

    def drafting(self) -> Bytes:
        """The MTP layer's part of it: once over the step's rows, then one row for each further draft."""
        total: Bytes = defaultdict(float)
        own = self.layout.world if self.path == "queries" else 1
        for number in range(self.drafts):
            rows = self.rows if number == 0 else 1
            read = [leaf for leaf in self.leaves if leaf.part in ("mtp", "head", "embedding")]
            if number and self.model.index_share_for_mtp_iteration:
                read = [leaf for leaf in read if leaf.inner != "indexer"]
            else:
                total[INDEX_KEYS] += self._index_bytes / self.layout.world
            for part, nbytes in self._weights(read, rows).items():
                total[part] += nbytes
            total[RECORDS] += self._unique(rows) * self.record.record_bytes / own
        return dict(total)

    @property
    def unique_records(self) -> float:
        """Records of one layer that all requests select."""
        return self._unique(self.rows)

    @property
    def _index_bytes(self) -> float:
        """Index keys of one layer, all of them."""
        return self.requests * self.context * self.record.index.key_bytes

    def _unique(self, rows: int) -> float:
        most = self.model.index_topk * (1 + NEW_PER_ROW * (rows - 1))
        return self.requests * min(most, self.context)

    def _weights(self, leaves: Iterable[Leaf], rows: int) -> Bytes:
        total: Bytes = defaultdict(float)
        model, all_rows = self.model, self.requests * rows
        for leaf in leaves:
            nbytes = float(leaf.nbytes)
            if SECOND_COPY in leaf.keys:
                continue  # counted by the other
            if leaf.inner == "routed_experts":
                used = expected_experts(all_rows, model.n_routed_experts, model.num_experts_per_tok)
                nbytes *= used / model.n_routed_experts
            elif leaf.inner == "embedding":
                nbytes *= all_rows / leaf.shape[0]
            total[leaf.inner] += nbytes
        return dict(total)
