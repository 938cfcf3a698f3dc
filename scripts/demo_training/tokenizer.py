"""What the built-in model's tokenizer learns from: its own texts."""

import random
import re

import tokenizers

from demo_training import documents
from demo_training.words import BEGINNINGS, ENDINGS, World
from glm_dcp_jax.demo import tokenizer
from glm_dcp_jax.demo.tokenizer import CONTROL_TOKENS, MARKUP_TOKENS

_DOCUMENTS, _ROOM = 6000, 150
_SYLLABLES = 20_000
"""How often each is seen: more than anything else, so that every name is the tokens of its two syllables."""
_NUMBERS = 500
"""How often each number below 100 is seen besides, so that all are tokens."""


def make_tokenizer(vocabulary: int) -> tokenizers.Tokenizer:
    """A tokenizer of exactly `vocabulary` tokens. The same on every run."""
    return tokenizer.make_tokenizer(vocabulary, _corpus())


def _corpus() -> list[str]:
    rng = random.Random("tokenizer")
    makers = (documents.reading, documents.word_problems, documents.small_talk, documents.tool_call)
    special = re.compile("|".join(map(re.escape, (*CONTROL_TOKENS, *MARKUP_TOKENS))))
    name = re.compile(f"({'|'.join(BEGINNINGS)})({'|'.join(ENDINGS)})")
    texts = []
    for number in range(_DOCUMENTS):
        text = "".join(piece.text for piece in makers[number % len(makers)](World(rng), _ROOM))
        texts += special.split(name.sub(r"\1\n\2", text))
    syllables = [*BEGINNINGS, *(f" {one}" for one in BEGINNINGS), *ENDINGS]
    often = [(one, _SYLLABLES) for one in syllables] + [(str(number), _NUMBERS) for number in range(10, 100)]
    return texts + [f"{text}\n" for text, times in often for _ in range(times)]
