"""The built-in model's tokenizer: byte-level BPE learned from its own texts, with GLM's special tokens behind it."""

import random
import re
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from demo_training import documents
from demo_training.words import BEGINNINGS, ENDINGS, World

CONTROL_TOKENS = (
    "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|> "
    "<|code_prefix|> <|code_middle|> <|code_suffix|>"
).split()
"""Never part of a text that is shown."""
MARKUP_TOKENS = (
    "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> "
    "<arg_value> </arg_value> /nothink"
).split()
"""Single tokens too, but shown: whoever parses reasoning and tool calls looks for them."""

END_OF_TEXT = "<|endoftext|>"
STOPS = (END_OF_TEXT, "<|user|>", "<|observation|>")
"""What ends an answer: the end of the text, or another speaker's turn."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What is never merged across: contractions, words, digits by three, punctuation, line ends, blanks."""

_DOCUMENTS, _ROOM = 6000, 150
_SYLLABLES = 20_000
"""How often each is seen: more than anything else, so that every name is the tokens of its two syllables."""
_NUMBERS = 500
"""How often each number below 100 is seen besides, so that all are tokens."""


def make_tokenizer(vocabulary: int) -> tokenizers.Tokenizer:
    """A tokenizer of exactly `vocabulary` tokens: 256 bytes, merges, then the special tokens. The same on every run.

    It adds nothing to a text: `[gMASK]<sop>` comes from the chat template.
    """
    special = [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    shown = [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(special) - len(shown),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_corpus(), trainer)
    made.add_special_tokens(special)
    made.add_tokens(shown)
    if made.get_vocab_size() != vocabulary:
        raise ValueError(f"the texts yield {made.get_vocab_size()} tokens of {vocabulary}")
    return made


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


def tokenizer_settings(max_length: int) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": CONTROL_TOKENS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "padding_side": "left",
    }
