#!/usr/bin/env python
"""Writes the outer scales of nvfp4_ds_mla records for a model, measured on prompts of yours.

    .venv/bin/python scripts/calibrate_nvfp4_scales.py MODEL --prompts FILE [--output scales.json] [-tp N]

FILE holds one prompt a line; if its name ends in .jsonl, each line is a JSON list of token ids, or a JSON string.
Choose prompts of the kind and length that will be served: a latent larger than any that was seen is cut to the largest
one. Each prompt is prefilled with bfloat16 records; a layer's scale is the largest magnitude among its latents / 2688.
Serve with the result:

    scripts/serve MODEL --kv-cache-dtype nvfp4_ds_mla --nvfp4-scales scales.json

Exit code: 0 if the file was written, 2 if the model or the input is no good.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from glm_dcp_jax import LLM, SamplingParams
from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.config.outer_scales import DENOMINATOR, FORMAT

BAD_INPUT = 2
PREFILL_ONLY = SamplingParams(max_tokens=1, temperature=0)

Prompts = dict[int, Any]
"""Text or a list of token ids, by the number of its line."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory, or a name in the local cache")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE")
    parser.add_argument("--output", type=Path, default=Path("scales.json"), metavar="FILE")
    parser.add_argument("-tp", "--tensor-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="longest prompt and one token more"
    )
    return parser.parse_args(arguments)


def read_prompts(file: Path) -> Prompts:
    """The file's prompts; empty lines are skipped. Raises ConfigError for one that is none, and for no prompt."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {file} cannot be read as text: {error}") from None
    prompts: Prompts = {number: line for number, line in enumerate(lines, 1) if line.strip()}
    if not prompts:
        raise ConfigError(f"--prompts {file} holds no prompt; write one a line")
    if file.suffix != ".jsonl":
        return prompts
    for number, line in prompts.items():
        try:
            prompts[number] = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}, line {number}: this is no JSON: {error}") from None
        if not isinstance(prompts[number], str | list):
            raise ConfigError(f"{file}, line {number}: must be a JSON list of token ids, or a JSON string")
    return prompts


def encode(llm: LLM, prompts: Prompts, file: Path) -> list[list[int]]:
    """Token ids of each prompt. Raises ConfigError for those that cannot run."""
    encoded = []
    for number, prompt in prompts.items():
        ids = llm.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        strange = [token for token in ids if type(token) is not int]
        if strange:
            raise ConfigError(f"{file}, line {number}: token ids must be integers, but one is {strange[0]!r}")
        try:
            llm.engine.check_prompt(ids)
        except ValueError as error:
            raise ConfigError(f"{file}, line {number}: {error}") from None
        encoded.append(ids)
    return encoded


def largest_latents(llm: LLM, prompts: list[list[int]]) -> np.ndarray:
    """The largest |latent| of each layer over all prompts, [layers] float32.

    A prompt's records stay in the pool when its request is over, until the next one's are written; whatever else the
    pool holds is zero, or of a prompt before.
    """
    import jax  # as LLM has set it up
    import jax.numpy as jnp

    width = llm.engine.model_config.kv_lora_rank

    @partial(jax.jit, static_argnames="width")
    def largest(ckv: jax.Array, width: int) -> jax.Array:
        return jnp.max(jnp.abs(ckv[..., :width]), axis=(1, 2)).astype(jnp.float32)

    found = np.zeros(llm.engine.model_config.num_hidden_layers, np.float32)
    for ids in tqdm(prompts, desc="Prefilling", unit="prompt"):
        llm.generate([ids], PREFILL_ONLY, use_tqdm=False)
        of_segments = [largest(segment.ckv, width) for segment in llm.engine.runner.pools]
        found = np.maximum(found, np.concatenate(of_segments))
    unusable = np.flatnonzero(~(np.isfinite(found) & (found > 0)))
    if unusable.size:
        layer = unusable[0]
        raise ConfigError(
            f"the largest latent of layer {layer} is {found[layer]}, which makes no scale; check the weights"
        )
    return found


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        if not arguments.output.absolute().parent.is_dir():
            raise ConfigError(f"--output {arguments.output} is in a directory that does not exist")
        prompts = read_prompts(arguments.prompts)
        llm = LLM(
            arguments.model,
            kv_cache_dtype="bfloat16",
            tensor_parallel_size=arguments.tensor_parallel_size,
            max_model_len=arguments.max_model_len,
            max_num_seqs=1,
        )
        encoded = encode(llm, prompts, arguments.prompts)
        found = largest_latents(llm, encoded)
    except ValueError as error:  # ConfigError, and what is wrong with a checkpoint
        print(f"calibrate_nvfp4_scales: {error}", file=sys.stderr)
        return BAD_INPUT
    largest = [float(value) for value in found]
    content = {
        "format": FORMAT,
        "num_layers": len(largest),
        "latent_dim": llm.engine.model_config.kv_lora_rank,
        "denominator": DENOMINATOR,
        "scales": [value / DENOMINATOR for value in largest],
        "max_abs": largest,
    }
    arguments.output.write_text(json.dumps(content, indent=1) + "\n")
    tokens = sum(map(len, encoded))
    print(
        f"wrote {arguments.output}: {len(largest)} layers, largest latents {min(largest):.4g} to {max(largest):.4g}, "
        f"from {len(encoded)} prompts of {tokens:,} tokens"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
