"""Turns as a model writes them: tags as tokens of their own, everything else byte by byte."""

import re
from functools import cache

from glm_dcp_jax.demo.description import VOCABULARY
from glm_dcp_jax.demo.tokenizer import make_tokenizer
from glm_dcp_jax.engine.chat_template import glm_template
from glm_dcp_jax.engine.tokenizer import Tokenizer
from glm_dcp_jax.serve.parsing.tags import Tag

_TAGS = re.compile("(" + "|".join(re.escape(tag.value) for tag in Tag) + ")")


@cache
def glm_tokenizer() -> Tokenizer:
    """The built-in model's, with GLM's template."""
    return Tokenizer(make_tokenizer(VOCABULARY), chat_template=glm_template())


@cache
def _byte_tokens() -> dict[bytes, int]:
    tokens = {glm_tokenizer().token_to_bytes(id): id for id in range(VOCABULARY)}
    return {text: id for text, id in tokens.items() if len(text) == 1}


def spelled(text: str) -> list[int]:
    """Tokens of one byte each, tags too."""
    return [_byte_tokens()[bytes([byte])] for byte in text.encode()]


def written(text: str) -> list[int]:
    """Tokens of one byte each, but for the tags."""
    pieces = _TAGS.split(text)
    return [
        id
        for place, piece in enumerate(pieces)
        for id in ([glm_tokenizer().token_id(piece)] if place % 2 else spelled(piece))
    ]
