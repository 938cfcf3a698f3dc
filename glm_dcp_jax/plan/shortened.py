"""A network with fewer layers that stands for the whole one: equal share groups are kept twice, and one counts more.

A program of all layers either loops over equal groups, whose layers cannot be told apart then, or takes minutes to
compile. Two neighbours show all that a group does beside another.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

from glm_dcp_jax.config import ModelConfig
from glm_dcp_jax.config.schedule import runs_of
from glm_dcp_jax.model.stored_weights import StoredFormat, WeightFormats

_KEPT = 2
"""Groups of a run: as many as are not looped over (config/schedule.py's SHORTEST_SCAN)."""


class Repeat(NamedTuple):
    """first, last: layers of the shortened network that a step runs `times` times in all."""

    first: int
    last: int
    times: int


@dataclass(frozen=True)
class ShortFormats:
    """The formats of some layers of a checkpoint under new numbers. origins: what each is called there."""

    weights: WeightFormats
    origins: tuple[int, ...]

    @property
    def quantised(self) -> bool:
        """Whether any weight of the checkpoint is."""
        return self.weights.quantised

    def of(self, name: str) -> StoredFormat:
        """The format of one weight."""
        front, layers, rest = name.partition("layers.")
        number, dot, end = rest.partition(".")
        if not layers:
            return self.weights.of(name)
        return self.weights.of(f"{front}{layers}{self.origins[int(number)]}{dot}{end}")

    def layer_kinds(self, layers: int) -> tuple[Hashable, ...]:
        """Those of the layers that were kept."""
        kinds = self.weights.layer_kinds(max(self.origins[:layers]) + 1)
        return tuple(kinds[origin] for origin in self.origins[:layers])


class Shortened(NamedTuple):
    """repeats: what is run more than once. origins: the layer of the whole network that each layer is."""

    model: ModelConfig
    weights: WeightFormats
    repeats: tuple[Repeat, ...]
    origins: tuple[int, ...]


def shortened(model: ModelConfig, weights: WeightFormats) -> Shortened:
    """Of each run of equal groups two are kept, the first of which counts for those left out.

    The MTP layer's number becomes that of the last layer plus one, as the network counts it.
    """
    stored = model.stored_as(weights.layer_kinds(model.num_hidden_layers))
    origins: list[int] = []
    repeats: list[Repeat] = []
    for run in stored.runs:
        kept = min(run.num_groups, _KEPT)
        if run.num_groups > kept:
            first = len(origins)
            repeats.append(Repeat(first, first + run.group_size - 1, 1 + run.num_groups - kept))
        origins += range(run.first_layer, run.layer(kept - 1, run.group_size - 1) + 1)
    full = tuple(model.full[origin] for origin in origins)
    sparse = tuple(model.sparse[origin] for origin in origins)
    short = replace(
        model, num_hidden_layers=len(origins), full=full, sparse=sparse, runs=runs_of(full, sparse)
    )
    names = (*origins, model.num_hidden_layers)
    return Shortened(short, ShortFormats(weights, names), tuple(repeats), names)


def said(short: Shortened, whole: ModelConfig) -> str:
    """Which layers were compiled, in words."""
    counted = "; ".join(
        f"the group of layers {repeat.first} to {repeat.last} counts {repeat.times} times"
        for repeat in short.repeats
    )
    return f"{short.model.num_hidden_layers} were compiled; {counted}, for {whole.num_hidden_layers} in all"
