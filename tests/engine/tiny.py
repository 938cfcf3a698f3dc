"""A very small random checkpoint and the engines on it, for tests of everything around the network.

A Full layer with a dense feed-forward and a Shared one with experts, so that each kind of part occurs once and a step
compiles in a second. Steps come in few sizes: one decode batch, and prefills of 16 and 64 rows.
"""

import sys
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from glm_dcp_jax import LLM

sys.path.append(str(Path(__file__).parents[1] / "oracle"))

from random_models import BASE_CONFIG, make_tensors, write_checkpoint

CONFIG = BASE_CONFIG | {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "index_topk_pattern": "FS",
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "index_topk": 8,
    "eos_token_id": 5,
    "max_position_embeddings": 512,
}
SETTINGS = {
    "block_size": 4,
    "max_model_len": 100,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "precompile_bs_paddings": (4,),
    "precompile_token_paddings": (16, 64),
    "num_gpu_blocks_override": 30,
}


def make_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE of 300 tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat and the rat sat too"] * 20, trainer)
    return tokenizer


def write_tiny(directory: Path, nan_tokens: tuple[int, ...] = (), **changes) -> Path:
    """The checkpoint with a tokenizer. nan_tokens: whose embedding is NaN. changes: of config.json."""
    config = CONFIG | changes
    tensors = make_tensors(config)
    if nan_tokens:
        tensors["model.embed_tokens.weight"][list(nan_tokens)] = np.nan
    write_checkpoint(directory, config, tensors)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def tiny_llm(directory: Path, **settings) -> LLM:
    """An LLM on such a directory; settings change SETTINGS."""
    return LLM(str(directory), **{**SETTINGS, **settings})


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths, without the end-of-sequence token."""
    rng = np.random.default_rng(seed)
    return [rng.integers(6, CONFIG["vocab_size"], length).tolist() for length in lengths]
