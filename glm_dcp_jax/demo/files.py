"""The built-in model as files of a Hugging Face checkpoint directory, made in memory."""

import json
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save

from glm_dcp_jax.config import ModelConfig
from glm_dcp_jax.demo.description import CONTEXT, VOCABULARY, describe
from glm_dcp_jax.demo.tokenizer import END_OF_TEXT, STOPS, make_tokenizer, tokenizer_settings
from glm_dcp_jax.demo.weights import make_weights
from glm_dcp_jax.engine.chat_template import glm_template


def make_files() -> dict[str, bytes]:
    """Name -> content of every file. The same bytes on every run with the same versions of numpy and tokenizers."""
    tokenizer = make_tokenizer(VOCABULARY)
    ids = tokenizer.get_vocab()
    stops, padding = [ids[token] for token in STOPS], ids[END_OF_TEXT]
    description = describe(stops, padding)
    weights = make_weights(ModelConfig.from_hf(description), _writable(tokenizer, stops))
    generation = {"temperature": 1.0, "top_p": 0.95, "eos_token_id": stops, "pad_token_id": padding}
    return {
        "config.json": _json(description),
        "generation_config.json": _json(generation),
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": _json(tokenizer_settings(CONTEXT)),
        "chat_template.jinja": glm_template().encode(),
        "model.safetensors": save(weights, metadata={"format": "pt"}),
    }


def _writable(tokenizer: tokenizers.Tokenizer, stops: list[int]) -> np.ndarray:
    """[V] bool: tokens that are plain text, and those that end an answer. Nonsense of the rest is hard to look at."""
    special = tokenizer.get_added_tokens_decoder()
    texts = (tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size()))
    return np.array(
        [
            token in stops or (token not in special and text.isascii() and text.isprintable())
            for token, text in enumerate(texts)
        ]
    )


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
