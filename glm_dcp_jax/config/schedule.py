"""Which layers are Full, which share, and how equal share groups line up into runs.

A Full layer runs the indexer; the Shared layers behind it reuse its selection. A *share group* is a Full layer and its
Shared layers; a *run* is a maximal sequence of consecutive groups of equal length and equal feed-forward kinds, which
the network can execute as one scan. Rules: transformers' `indexer_types`, `index_topk_pattern`, `index_topk_freq` and
`index_skip_topk_offset`, in this order of precedence.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from glm_dcp_jax.config.errors import ConfigError
from glm_dcp_jax.config.fields import Fields


@dataclass(frozen=True)
class Run:
    """`num_groups` equal share groups, one after the other.

    first_layer: index of the run's first layer. first_full: how many Full layers come before it.
    sparse: for each layer of one group, whether its feed-forward is a mixture of experts. stored: for each layer of one
    group, what its weights are stored as, where that differs between layers.
    """

    first_layer: int
    first_full: int
    num_groups: int
    sparse: tuple[bool, ...]
    stored: tuple[Hashable, ...] = ()

    @property
    def group_size(self) -> int:
        """Layers in one group: one Full layer and `group_size - 1` Shared ones."""
        return len(self.sparse)

    def layer(self, group: int, member: int) -> int:
        """The model's layer index of a group's member (0 is the Full layer)."""
        return self.first_layer + group * self.group_size + member


def full_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """True for each layer that runs the indexer, from config.json's fields.

    Raises ConfigError for wrong lengths, unknown words and a Shared layer 0 (nothing precedes it to share from).
    """
    fields = Fields(config)
    types = fields.words("indexer_types")
    pattern = fields.words("index_topk_pattern", text_allowed=True)
    if types is not None:
        full = _from_words(types, num_layers, "indexer_types")
    elif pattern is not None:
        full = _from_words(pattern, num_layers, "index_topk_pattern")
    else:
        full = _from_frequency(fields, num_layers)
    if not full[0]:
        raise ConfigError(
            "layer 0 is marked shared, but there is no Full layer before it; layer 0 must be full"
        )
    return full


def _from_words(words: Sequence[str] | str, num_layers: int, field: str) -> tuple[bool, ...]:
    meaning = {"full": True, "f": True, "shared": False, "s": False}
    if len(words) != num_layers:
        raise ConfigError(f"{field} has {len(words)} entries, but num_hidden_layers is {num_layers}")
    unknown = sorted({str(w) for w in words if str(w).lower() not in meaning})
    if unknown:
        raise ConfigError(f"{field} holds {unknown}; allowed are full, shared, F and S")
    return tuple(meaning[str(word).lower()] for word in words)


def _from_frequency(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    freq = max(fields.integer("index_topk_freq", 1, least=0), 1)
    offset = fields.integer("index_skip_topk_offset", 2, least=0)
    return tuple(max(layer - offset + 1, 0) % freq == 0 for layer in range(num_layers))


def sparse_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """True for each layer with experts: `mlp_layer_types`, else `first_k_dense_replace` and `moe_layer_freq`."""
    fields = Fields(config)
    types = fields.words("mlp_layer_types")
    if types is None:
        dense = fields.integer("first_k_dense_replace", 3, least=0)
        freq = fields.integer("moe_layer_freq", 1)
        return tuple(layer >= dense and layer % freq == 0 for layer in range(num_layers))
    if len(types) != num_layers:
        raise ConfigError(f"mlp_layer_types has {len(types)} entries, but num_hidden_layers is {num_layers}")
    unknown = sorted({str(t) for t in types} - {"dense", "sparse"})
    if unknown:
        raise ConfigError(f"mlp_layer_types holds {unknown}; allowed are dense and sparse")
    return tuple(kind == "sparse" for kind in types)


SHORTEST_SCAN = 3
"""Runs of fewer groups are not worth a scan, which reads its weights through copies."""


def stages_of(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs as the network executes them: each scanned, but short ones as single groups one after the other."""
    stages: list[Run] = []
    for run in runs:
        if run.num_groups >= SHORTEST_SCAN:
            stages.append(run)
        else:
            for group in range(run.num_groups):
                stages.append(_group(run, group))
    return tuple(stages)


def segments_of(runs: Sequence[Run], count: int) -> tuple[tuple[Run, ...], ...]:
    """The stages of each of `count` consecutive parts of the network, which have about as many layers each.

    Raises ConfigError for more parts than share groups.
    """
    groups = [_group(run, group) for run in runs for group in range(run.num_groups)]
    if not 1 <= count <= len(groups):
        raise ConfigError(f"{len(groups)} share groups do not make {count} segments; use 1 to {len(groups)}")
    layers = groups[-1].first_layer + groups[-1].group_size
    cuts = [0]
    for part in range(1, count):
        allowed = range(cuts[-1] + 1, len(groups) - count + part + 1)
        cuts.append(min(allowed, key=lambda at: abs(groups[at].first_layer - part * layers / count)))
    ends = [*cuts[1:], len(groups)]
    return tuple(stages_of(_joined(groups[cut:end])) for cut, end in zip(cuts, ends, strict=True))


def runs_of(full: Sequence[bool], sparse: Sequence[bool], stored: Sequence[Hashable] = ()) -> tuple[Run, ...]:
    """Cut the layers into share groups and join equal neighbours into runs. stored: see Run, of all layers."""
    starts = [layer for layer, is_full in enumerate(full) if is_full] + [len(full)]
    return _joined(
        Run(start, ordinal, 1, tuple(sparse[start:stop]), tuple(stored[start:stop]))
        for ordinal, (start, stop) in enumerate(zip(starts, starts[1:], strict=False))
    )


def _group(run: Run, number: int) -> Run:
    """One group of a run, as a run."""
    return replace(run, first_layer=run.layer(number, 0), first_full=run.first_full + number, num_groups=1)


def _joined(groups: Iterable[Run]) -> tuple[Run, ...]:
    """Single groups one after the other, equal neighbours as one run."""
    runs: list[Run] = []
    for group in groups:
        if runs and (runs[-1].sparse, runs[-1].stored) == (group.sparse, group.stored):
            last = runs.pop()
            runs.append(replace(last, num_groups=last.num_groups + 1))
        else:
            runs.append(group)
    return tuple(runs)
