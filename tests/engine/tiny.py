"""A very small random checkpoint, engines on it, and what tests ask of them.

A Full layer with a dense feed-forward and a Shared one with experts, so that each kind of part occurs once and a step
compiles in a second. Steps come in few sizes: one decode batch, and prefills of 16 and 64 rows.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from glm_dcp_jax import LLM, SamplingParams
from glm_dcp_jax.engine.outputs import CompletionOutput, RequestOutput

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


def write_drafting(directory: Path, **changes) -> Path:
    """The checkpoint with an MTP layer that guesses right about every other time: all layers add little to a token's
    embedding, and the MTP layer begins with that of its own token."""
    config = CONFIG | changes
    write_checkpoint(directory, config, drafting_tensors(config))
    make_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def drafting_tensors(config: dict) -> dict[str, np.ndarray]:
    """Its weights."""
    tensors = make_tensors(config, mtp=True)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = (tensor.astype(np.float32) * 0.1).astype(tensor.dtype)
    mtp, hidden = f"model.layers.{config['num_hidden_layers']}", config["hidden_size"]
    first_half = np.eye(hidden, 2 * hidden)
    tensors[f"{mtp}.eh_proj.weight"] = first_half.astype(tensors[f"{mtp}.eh_proj.weight"].dtype)
    tensors[f"{mtp}.enorm.weight"] = np.ones_like(tensors[f"{mtp}.enorm.weight"])
    tensors[f"{mtp}.shared_head.norm.weight"] = tensors["model.norm.weight"]
    return tensors


def tiny_llm(directory: Path, **settings) -> LLM:
    """An LLM on such a directory; settings change SETTINGS."""
    return LLM(str(directory), **{**SETTINGS, **settings})


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths, without the end-of-sequence token."""
    rng = np.random.default_rng(seed)
    return [rng.integers(6, CONFIG["vocab_size"], length).tolist() for length in lengths]


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = random_prompts(11, seed=4)[0]
MIXED = random_prompts(5, 30, 1, 70, 9, 17, 64, 65, 12)
"""Prompts of all kinds of length: of one token, of a bucket exactly, of more than a chunk."""


def generate(
    llm: LLM, prompts: object, params: SamplingParams | list[SamplingParams] = GREEDY
) -> list[RequestOutput]:
    """LLM.generate without its progress bar."""
    return llm.generate(prompts, params, use_tqdm=False)


def changed(params: SamplingParams, **changes: object) -> SamplingParams:
    """The same parameters but for the changes."""
    return dataclasses.replace(params, **changes)


def only(llm: LLM, prompt: object, params: SamplingParams = GREEDY, **changes: object) -> CompletionOutput:
    """The one output of one prompt; changes are to params."""
    (request,) = generate(llm, [prompt], changed(params, **changes))
    (output,) = request.outputs
    assert request.finished and output.finished
    return output


def tokens_of(requests: list[RequestOutput]) -> list[list[int]]:
    """The tokens of all outputs, in order."""
    return [output.token_ids for request in requests for output in request.outputs]


def left_behind(llm: LLM) -> list[str]:
    """Requests that a test left in the engine; they are aborted, so that the next test starts afresh."""
    left = list(llm.engine._requests)
    for request_id in left:
        llm.engine.abort(request_id)
    return left


def check_idle(llm: LLM) -> None:
    """Whatever a test did, no request and no page may be left."""
    assert left_behind(llm) == []
    allocator = llm.engine.scheduler.allocator
    allocator.check()
    assert allocator.num_used == 0 and llm.engine.stats().cache_usage == 0
