"""Turns as a model writes them: tags as tokens of their own, everything else byte by byte."""

import re
from functools import cache

from fake_engine import FakeEngine

from glm_dcp_jax.demo.description import VOCABULARY
from glm_dcp_jax.demo.tokenizer import make_tokenizer
from glm_dcp_jax.engine.chat_template import glm_template
from glm_dcp_jax.engine.tokenizer import Tokenizer
from glm_dcp_jax.serve.parsing.tags import Tag

HELLO = [{"role": "user", "content": "Hi"}]
FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "limit": {"type": "integer"}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = (
    "<tool_call>find<arg_key>text</arg_key><arg_value>a\n</arg_value>"
    "<arg_key>limit</arg_key><arg_value>3</arg_value></tool_call>"
)
ARGUMENTS = {"text": "a\n", "limit": 3}
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


def engine_that_says(*turns: str, burst: int = 3) -> FakeEngine:
    """A GLM whose choices are these turns."""
    engine = FakeEngine(burst=burst)
    engine.tokenizer, engine.max_model_len = glm_tokenizer(), 4096
    engine.says = [written(turn) for turn in turns]
    engine.eos = engine.tokenizer.token_id("<|endoftext|>")
    return engine
