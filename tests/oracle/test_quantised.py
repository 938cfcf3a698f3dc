"""Quantised checkpoints against the numpy program and against the plain checkpoint that they stand for."""

from functools import cache

import numpy as np
import pytest
from quantised_models import CONFIG, MODELS, make_quantised
from random_models import pick_prompts, write_checkpoint

from glm_dcp_jax import LLM, SamplingParams

LENGTHS = (1, 9, 40)
NUMPY_TOLERANCE, TOLERANCE = 2e-4, 1e-4
MESHES = {
    "fp8": (4, 2),
    "fp8_per_row": (2, 1),
    "fp8_one_scale": (3, 3),
    "modelopt": (2, 2),
    "modelopt_all": (3, 1),
    "compressed": (1, 1),
    "mixed": (4, 4),
}


@cache
def prompts_of(name: str):
    """On the plain weights: their decisions have room for what float32 arithmetic differs by."""
    _, _, plain = make_quantised(name)
    return pick_prompts(CONFIG, plain, LENGTHS, greedy_tokens=4)


def load(directory, mesh: tuple[int, int], **settings) -> LLM:
    return LLM(
        model=str(directory),
        tensor_parallel_size=mesh[0],
        decode_context_parallel_size=mesh[1],
        block_size=4,
        max_model_len=64,
        max_num_batched_tokens=24,
        max_num_seqs=len(LENGTHS),
        precompile_bs_paddings=(len(LENGTHS),),
        precompile_token_paddings=(24,),
        kv_cache_memory_bytes=2**24,
        dtype="float32",
        **settings,
    )


QUICK = {("mixed", True)}
"""In the default run: every form of storage is in it."""
CASES = [
    pytest.param(
        name,
        split,
        marks=[] if (name, split) in QUICK else pytest.mark.slow,
        id=f"{name}-{'ep' if split else 'tp'}",
    )
    for name in MODELS
    for split in (False, True)
]


@pytest.mark.parametrize(("name", "expert_parallel"), CASES)
def test_a_quantised_checkpoint_is_the_plain_one_it_stands_for(name, expert_parallel, tmp_path, devices):
    mesh = MESHES[name]
    devices(mesh[0])
    config, stored, plain = make_quantised(name)
    llm = load(
        write_checkpoint(tmp_path / "quantised", config, stored, shards=3),
        mesh,
        enable_expert_parallel=expert_parallel,
        quantization=config["quantization_config"]["quant_method"],
    )
    same = load(write_checkpoint(tmp_path / "plain", CONFIG, plain), mesh)
    prompts = prompts_of(name)
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = llm.generate([prompt.ids for prompt in prompts], greedy, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == prompt.continuation
        tokens = [*prompt.ids, *prompt.continuation[:-1]]
        seen = llm.compute_logits(tokens, capture=True)
        np.testing.assert_allclose(seen.logits, prompt.forward.logits, rtol=0, atol=NUMPY_TOLERANCE)
        np.testing.assert_allclose(seen.logits, same.compute_logits(tokens), rtol=0, atol=TOLERANCE)
        for layer, chosen in prompt.forward.selections.items():
            np.testing.assert_array_equal(seen.selections[layer], chosen)
