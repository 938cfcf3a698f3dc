"""How likely a prompt's own tokens were, for requests that ask: a step's rows go through the output head once more.

They do so in blocks of a fixed number of rows, so that prompts of any length need one program, and little memory.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from glm_dcp_jax.engine.sampling import Scores, score
from glm_dcp_jax.model.network import NetworkShape

ROWS = 64


class ScoredRows(NamedTuple):
    """rows: [n] int32, into the rows of all blocks of a step. tokens: [n] int32, the prompt's token behind each."""

    rows: np.ndarray
    tokens: np.ndarray


class PromptScorer:
    """The programs for one network on one mesh."""

    def __init__(self, mesh: Mesh, shape: NetworkShape) -> None:
        self._everywhere = NamedSharding(mesh, P())
        self._reads = shape.places("head")
        head_specs = tuple(shape.leaf_specs[at] for at in self._reads)

        def on_device(leaves: tuple[Array, ...], normed: Float[Array, "M H"]) -> Float[Array, "M V"]:
            return shape.network(self._reads, leaves).logits(normed)

        self._head = jax.jit(
            jax.shard_map(on_device, mesh=mesh, in_specs=(head_specs, P()), out_specs=P(), check_vma=False)
        )

    def __call__(self, leaves: tuple[Any, ...], hidden: Any, wanted: ScoredRows) -> tuple[Scores, ...]:
        """Scores of blocks of ROWS rows, on the device; what is behind the last wanted row means nothing.

        leaves: of all parameters. hidden: [T, H], of all rows of a step, behind the final norm.
        """
        found = []
        for at in range(0, len(wanted.rows), ROWS):
            rows, tokens = (np.resize(column[at : at + ROWS], ROWS) for column in wanted)
            logits = self._head(tuple(leaves[read] for read in self._reads), _take(hidden, rows))
            found.append(score(logits, tokens))
        return tuple(found)

    def warm_up(self, leaves: tuple[Any, ...], total_rows: int) -> None:
        """Compile what steps of so many rows need."""
        (head,) = (leaves[read] for read in self._reads)
        hidden = jax.device_put(np.zeros((total_rows, head.shape[1]), head.dtype), self._everywhere)
        self(leaves, hidden, ScoredRows(*[np.zeros(1, np.int32)] * 2))


def fetched(scores: tuple[Scores, ...], count: int) -> Scores:
    """The first `count` rows of blocks of scores, as numpy arrays; waits for them."""
    return Scores(*(np.concatenate(column)[:count] for column in zip(*jax.device_get(scores), strict=True)))


@jax.jit
def _take(hidden: Float[Array, "T H"], rows: Int[Array, " M"]) -> Float[Array, "M H"]:
    return hidden[rows]
