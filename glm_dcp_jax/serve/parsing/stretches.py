"""Which of a turn's tokens are reasoning, and which say what."""

from collections.abc import Mapping, Sequence

from glm_dcp_jax.serve.parsing.tags import Tag
from glm_dcp_jax.serve.parsing.turn import Content, Reasoning, Stretch

_ENDS = (Tag.THINK_END, Tag.CALL_END, Tag.KEY_END, Tag.VALUE_END)
"""Tags that belong to what stands before them; others to what follows."""


class TokenSorter:
    """Sorts tokens by the stretches that a parser finds. `</think>` is the last token of reasoning."""

    def __init__(self, tags: Mapping[int, Tag], stretches: Sequence[Stretch]) -> None:
        """tags: by the ids of their tokens. stretches: of the parser, which goes on with them."""
        self._tags, self._stretches = tags, stretches
        self._place = self._tokens = 0
        self.reasoning = 0
        """Tokens of reasoning so far."""

    def sort(self, token_ids: Sequence[int]) -> list[int | None]:
        """Of each token that was not sorted before: the number of its stretch of content, None if it is of none.

        token_ids: all tokens so far. Of the last ones it may be open yet what they are: those are not sorted.
        """
        sorted_ones = []
        for token in token_ids[self._tokens :]:
            tag = self._tags.get(token)
            place = self._place + (tag is not None)
            belongs = place - (tag in _ENDS)
            if belongs >= len(self._stretches) or self._stretches[belongs].kind is None:
                break
            stretch = self._stretches[belongs]
            self._place = place
            self._tokens += 1
            self.reasoning += stretch.kind is Reasoning
            sorted_ones.append(stretch.number if stretch.kind is Content else None)
        return sorted_ones
