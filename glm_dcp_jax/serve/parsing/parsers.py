"""Which of a model's tags are read: chosen once, from the flags and the tokenizer."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from glm_dcp_jax.engine.tokenizer import Tokenizer
from glm_dcp_jax.serve.parsing.tags import CALL_TAGS, REASONING_TAGS, Tag, TagTable

_LOG = logging.getLogger(__name__)
CHOICES = ("auto", "none", "glm45", "glm47")
"""vLLM's names. glm45 and glm47 are the same here: blanks and line ends between tags are allowed, and so is a call
without arguments."""


@dataclass(frozen=True)
class Parsers:
    """Whether outputs are searched for reasoning, and for tool calls."""

    reasoning: bool = False
    tool_calls: bool = False

    @staticmethod
    def chosen(reasoning: str, tool_calls: str, tokenizer: Tokenizer | None) -> "Parsers":
        """As two of CHOICES say; auto is for tokenizers that have all the tags as tokens. Logs what was chosen."""
        return Parsers(
            _is_on("reasoning", reasoning, REASONING_TAGS, tokenizer),
            _is_on("tool call", tool_calls, CALL_TAGS, tokenizer),
        )


def _is_on(what: str, choice: str, tags: Sequence[Tag], tokenizer: Tokenizer | None) -> bool:
    if tokenizer is None or choice == "none":
        _LOG.info("%s parser: none", what)
        return False
    in_text = [tag.value for tag in TagTable.of(tokenizer, tags).texts]
    if choice == "auto":
        _LOG.info("%s parser: %s (auto)", what, "none" if in_text else "glm47")
        return not in_text
    _LOG.info("%s parser: %s", what, choice)
    if in_text:
        _LOG.warning(
            "the tokenizer has no %s; the %s parser looks for them in the text", ", ".join(in_text), what
        )
    return True


def begins_in_reasoning(tokenizer: Tokenizer, table: TagTable, prompt: Sequence[int]) -> bool:
    """Whether a prompt ends within `<think>`: in what the turn that is to go on has of its own already."""
    if not {Tag.THINK, Tag.THINK_END}.isdisjoint(table.texts):
        tail = prompt[-_TAIL:]
        roles = [
            place
            for place, token in enumerate(tail, 1)
            if token in tokenizer.special_ids - table.tokens.keys()
        ]
        text = tokenizer.decode(tail[max(roles, default=0) :], skip_special_tokens=False)
        return text.rfind(Tag.THINK.value) > text.rfind(Tag.THINK_END.value)
    for token in reversed(prompt):
        if table.tokens.get(token) in REASONING_TAGS:
            return table.tokens[token] is Tag.THINK
        if token in tokenizer.special_ids:
            return False  # of a role: behind it the turn begins
    return False


_TAIL = 64
"""Tokens at a prompt's end in which tags are looked for that are no tokens."""
