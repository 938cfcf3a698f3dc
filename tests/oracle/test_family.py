"""Other configurations of the family, against an independent numpy program written from the formulas.

Sizes that divide nothing, expert groups, schedules given in every form, and meshes that heads, widths and vocabulary do
not divide: what no golden shows.
"""

from functools import cache

import numpy as np
import pytest
from random_models import CONFIGS, make_model, pick_prompts, write_checkpoint

from glm_dcp_jax import LLM, SamplingParams

LENGTHS = (1, 7, 19, 45)
LOGIT_TOLERANCE, HIDDEN_TOLERANCE = 2e-4, 3e-4
MESHES = {
    "odd_sizes": ((6, 2),),
    "single_layer": ((2, 1),),
}


@cache
def prompts_of(name: str):
    config, tensors = make_model(name)
    return pick_prompts(config, tensors, LENGTHS)


def load(name: str, mesh: tuple[int, int], directory, **settings) -> LLM:
    config, tensors = make_model(name)
    write_checkpoint(directory, config, tensors, shards=2)
    return LLM(
        model=str(directory),
        tensor_parallel_size=mesh[0],
        decode_context_parallel_size=mesh[1],
        block_size=4,
        cp_kv_cache_interleave_size=2,
        max_model_len=64,
        max_num_batched_tokens=24,
        max_num_seqs=len(LENGTHS),
        precompile_bs_paddings=(len(LENGTHS),),
        precompile_token_paddings=(24,),
        kv_cache_memory_bytes=2**24,
        dtype="float32",
        **settings,
    )


SLOW_MESHES = {
    "odd_sizes": ((1, 1), (4, 4)),
    "explicit_lists": ((3, 3),),
    "half_split_indexer": ((8, 8),),
    "expert_groups": ((4, 2),),
    "five_heads": ((3, 1), (6, 6)),
    "equal_groups": ((1, 1), (7, 7)),
    "lone_full_end": ((4, 4),),
    "pattern_string": ((2, 2),),
    "all_full": ((6, 3),),
    "two_shared_experts": ((8, 4),),
    "one_dense": ((5, 5),),
}
"""Simpler than a mesh above of the same configuration, or configurations whose traits others have too."""


def test_every_configuration_is_run():
    assert MESHES.keys() | SLOW_MESHES.keys() == CONFIGS.keys()


def cases(meshes: dict, *marks: pytest.MarkDecorator) -> list:
    return [
        pytest.param(name, mesh, marks=marks, id=f"{name}-{mesh}")
        for name, of in meshes.items()
        for mesh in of
    ]


@pytest.mark.parametrize(("name", "mesh"), cases(MESHES) + cases(SLOW_MESHES, pytest.mark.slow))
def test_family_member_equals_the_numpy_program(name, mesh, tmp_path, devices):
    devices(mesh[0])
    # Both prefill paths get their share of the configurations.
    llm = load(name, mesh, tmp_path, dcp_prefill_path="queries" if mesh[0] % 2 else "context")
    prompts = prompts_of(name)
    greedy = SamplingParams(temperature=0, max_tokens=len(prompts[0].continuation), ignore_eos=True)
    outputs = llm.generate([prompt.ids for prompt in prompts], greedy, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == prompt.continuation
        seen = llm.compute_logits([*prompt.ids, *prompt.continuation[:-1]], capture=True)
        expected = prompt.forward
        np.testing.assert_allclose(seen.logits, expected.logits, rtol=0, atol=LOGIT_TOLERANCE)
        np.testing.assert_allclose(seen.hidden, expected.hidden, rtol=0, atol=HIDDEN_TOLERANCE)
        assert set(seen.selections) == set(expected.selections)
        for layer, chosen in expected.selections.items():
            np.testing.assert_array_equal(seen.selections[layer], chosen)
        assert set(seen.router_ids) == set(expected.router_ids)
        for layer, experts in expected.router_ids.items():
            np.testing.assert_array_equal(seen.router_ids[layer], experts)
            weights = expected.router_weights[layer]
            np.testing.assert_allclose(seen.router_weights[layer], weights, rtol=0, atol=1e-4)
