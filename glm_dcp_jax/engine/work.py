"""What one step does: chunks of prompts, sequences that decode, pages that are copied first."""

from dataclasses import dataclass, field
from typing import NamedTuple

from glm_dcp_jax.engine.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens start .. start + count - 1 of a sequence, whose first tokens are in the cache already.

    is_last: whether the next token is sampled behind it. first_scored: its first row that tells how likely the prompt's
    token behind it was; those behind that row do too, up to the prompt's end.
    """

    sequence: Sequence
    start: int
    count: int
    is_last: bool
    first_scored: int

    @property
    def end(self) -> int:
        """How many tokens the cache holds afterwards."""
        return self.start + self.count

    @property
    def scored_tokens(self) -> list[int]:
        """The prompt's tokens behind the rows that are scored."""
        sequence = self.sequence
        return sequence.tokens[self.start + self.first_scored + 1 : min(self.end + 1, sequence.prompt_length)]


class PageCopy(NamedTuple):
    """What page `source` holds goes to page `target` before the step."""

    source: int
    target: int


@dataclass
class Work:
    """One step: pages to copy first, sequences that decode, chunks of prompts. copied_for: whom the copies are for.

    loads: sequences that now have pages for what comes from another engine.

    reaches: tokens that each of those that decode may come to have in the cache: all drafts may be accepted, and
    further ones are made behind them.
    """

    copies: list[PageCopy] = field(default_factory=list)
    copied_for: list[Sequence] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    reaches: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    loads: list[Sequence] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        """All that take part, those that decode first; each once."""
        return [*self.decodes, *[chunk.sequence for chunk in self.chunks]]

    @property
    def drawing(self) -> list[Sequence]:
        """Those that get a token, or several."""
        return [*self.decodes, *[chunk.sequence for chunk in self.chunks if chunk.is_last]]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self.decodes and not self.chunks
