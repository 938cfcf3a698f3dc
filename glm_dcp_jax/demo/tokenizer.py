"""The built-in model's tokenizer: byte-level BPE learned from corpus.txt, with GLM's special tokens behind it."""

from collections.abc import Iterable
from importlib import resources
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

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


def make_tokenizer(vocabulary: int, texts: Iterable[str] | None = None) -> tokenizers.Tokenizer:
    """A tokenizer of exactly `vocabulary` tokens: 256 bytes, merges, then the special tokens. The same on every run.

    texts: what it learns from; corpus.txt unless they are given. Raises ValueError where they yield too few tokens.

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
    if texts is None:
        corpus = resources.files(__package__).joinpath("corpus.txt").read_text(encoding="utf-8")
        texts = corpus.splitlines(keepends=True)
    made.train_from_iterator(texts, trainer)
    made.add_special_tokens(special)
    made.add_tokens(shown)
    if made.get_vocab_size() != vocabulary:
        raise ValueError(f"the texts yield {made.get_vocab_size()} tokens of {vocabulary}; it needs more")
    return made


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
