"""The random checkpoints are reproducible and healthy, and each shows the trait it is named for."""

import json

import numpy as np
import pytest
from numpy_reference import NumpyReference, full_layers, load_checkpoint
from random_models import (
    CONFIGS,
    EXPERT_MARGIN,
    INDEX_MARGIN,
    LOGIT_MARGIN,
    make_model,
    pick_prompts,
    write_checkpoint,
)

LENGTHS = (5, 33)

# Readings of each config by a program that misses its trait. All run without an error, so only numbers tell.
MISREADINGS = {
    "odd_sizes": {"indexer_types": ["full", "full", "shared", "shared"]},
    "expert_groups": {"n_group": 1, "topk_group": 1},
    "explicit_lists": {"indexer_types": ["full", "shared", "full"] + ["shared"] * 7},
    "pattern_string": {"index_topk_pattern": "FFSSSS"},
    "all_full": {"index_topk_freq": 4, "index_skip_topk_offset": 3},
    "lone_full_end": {"index_topk_pattern": "FFSSFSSS"},
    "five_heads": {"index_topk_pattern": "FFSSSS"},
    "two_shared_experts": {"norm_topk_prob": True},
    "one_dense": {"index_topk": 8},
    "equal_groups": {"index_topk_freq": 6},
    "single_layer": {"index_topk": 64},
    "half_split_indexer": {"indexer_rope_interleave": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_network_is_healthy_and_prompts_with_room_exist(name):
    config, tensors = make_model(name)
    assert sum(tensor.nbytes for tensor in tensors.values()) < 2**20
    for prompt, length in zip(pick_prompts(config, tensors, LENGTHS), LENGTHS, strict=True):
        forward = prompt.forward
        assert len(prompt.ids) == length and len(prompt.continuation) == 8
        assert np.isfinite(forward.logits).all() and 1 < forward.logits.std() < 10
        assert forward.hidden[-1].std() < 20
        assert forward.index_margin.min() >= INDEX_MARGIN
        assert forward.expert_margin.min() >= EXPERT_MARGIN
        assert forward.logit_margin[length - 1 :].min() >= LOGIT_MARGIN
        np.testing.assert_array_equal(forward.logits[length - 1 :].argmax(-1), prompt.continuation)
    assert np.isfinite(forward.index_margin).any(), (
        "index_topk is longer than the prompt: nothing was selected"
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_missing_the_trait_changes_the_logits(name):
    config, tensors = make_model(name)
    ids = np.random.default_rng(0).integers(config["vocab_size"], size=33)
    right = NumpyReference(config, tensors)(ids).logits
    wrong = NumpyReference(config | MISREADINGS[name], tensors)(ids).logits
    assert np.abs(right - wrong).max() > 0.1


def test_negative_bias_makes_every_choice_negative():
    config, tensors = make_model("expert_groups")
    biases = [tensor for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 4 and all(bias.dtype == np.float32 and bias.max() < -1 for bias in biases)


def test_checkpoints_are_the_same_bytes_every_time(tmp_path):
    for directory in ("one", "two"):
        write_checkpoint(tmp_path / directory, *make_model("pattern_string"))
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert make_model("pattern_string", seed=1)[1]["lm_head.weight"].tobytes() != (
        make_model("pattern_string")[1]["lm_head.weight"].tobytes()
    )


def test_prompts_are_the_same_every_time():
    first, second = (pick_prompts(*make_model("single_layer"), [12], greedy_tokens=3)[0] for _ in range(2))
    assert (first.ids, first.continuation) == (second.ids, second.continuation)


def test_shards_hold_the_same_tensors_and_the_index_finds_them(tmp_path):
    config, tensors = make_model("one_dense")
    write_checkpoint(tmp_path, config, tensors, shards=2)
    read_config, read_tensors = load_checkpoint(tmp_path)
    assert read_config == config and read_tensors.keys() == tensors.keys()
    assert all(np.array_equal(read_tensors[name], tensors[name]) for name in tensors)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert {path.name for path in tmp_path.glob("*.safetensors")} == set(index["weight_map"].values())
    assert len(set(index["weight_map"].values())) == 2


def test_mtp_tensors_are_one_more_layer_and_leave_the_others_alone():
    config, tensors = make_model("five_heads")
    _, with_mtp = make_model("five_heads", mtp=True)
    prefix = f"model.layers.{config['num_hidden_layers']}."
    added = with_mtp.keys() - tensors.keys()
    assert all(name.startswith(prefix) for name in added)
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= {
        name.removeprefix(prefix) for name in added
    }
    assert f"{prefix}self_attn.indexer.wq_b.weight" in added and f"{prefix}mlp.gate.weight" in added
    assert all(np.array_equal(with_mtp[name], tensors[name]) for name in tensors)


def test_shared_layers_hold_no_indexer():
    config, tensors = make_model("equal_groups")
    owners = {int(name.split(".")[2]) for name in tensors if ".indexer." in name}
    assert sorted(owners) == full_layers(config) == [0, 1, 4, 7, 10]
