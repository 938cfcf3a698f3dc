"""The shortened network that stands for all layers."""

from glm_dcp_jax.config import ModelConfig
from glm_dcp_jax.model.stored_weights import ALL_PLAIN, NVFP4
from glm_dcp_jax.plan import glm52
from glm_dcp_jax.plan.presets import fp8_formats, nvfp4_formats
from glm_dcp_jax.plan.shortened import Repeat, shortened

FULL = glm52.glm52()


def test_glm52_is_its_first_14_layers_and_one_group_counts_for_those_left_out():
    short = shortened(FULL, ALL_PLAIN)
    assert short.origins == (*range(14), 78)
    assert (short.model.full, short.model.sparse) == (FULL.full[:14], FULL.sparse[:14])
    assert short.repeats == (Repeat(6, 9, 17),)


def test_no_layer_is_in_a_loop():
    short = shortened(FULL, ALL_PLAIN)
    assert [run.sparse for run in short.model.stages] == [
        (False,),
        (False,),
        (False, True, True, True),
        (True,) * 4,
        (True,) * 4,
    ]
    assert all(stage.num_groups == 1 for stage in short.model.stages), "layers of a scan cannot be told apart"


def test_what_counts_more_makes_up_for_what_is_missing():
    for model in (FULL, all_full()):
        short = shortened(model, ALL_PLAIN)
        layers = short.model.num_hidden_layers
        counted = layers + sum((each.times - 1) * (each.last + 1 - each.first) for each in short.repeats)
        assert counted == model.num_hidden_layers
        assert short.origins[-1] == model.num_hidden_layers, "the MTP layer keeps its place behind the others"


def all_full() -> ModelConfig:
    """GLM-5's schedule: every layer has an indexer."""
    return ModelConfig.from_hf(glm52.CONFIG | {"indexer_types": ["full"] * 78})


def test_several_runs_are_shortened_at_once():
    short = shortened(all_full(), ALL_PLAIN)
    assert short.origins == (0, 1, 3, 4, 78)
    assert short.repeats == (Repeat(0, 0, 2), Repeat(2, 2, 74))


def test_a_model_that_is_short_already_stays_as_it_is():
    kept = {name: glm52.CONFIG[name][:14] for name in ("indexer_types", "mlp_layer_types")}
    model = ModelConfig.from_hf(glm52.CONFIG | {"num_hidden_layers": 14} | kept)
    short = shortened(model, ALL_PLAIN)
    assert (short.model, short.repeats) == (model, ())


def test_weights_are_stored_as_those_they_stand_for():
    short = shortened(all_full(), nvfp4_formats(FULL)).weights
    expert = "model.layers.{}.mlp.experts.3.up_proj.weight"
    assert short.of(expert.format(3)) == NVFP4
    assert short.of(expert.format(4)).kind == "plain", "the MTP layer's, which is layer 78 of the checkpoint"
    assert short.of("lm_head.weight").kind == "plain"
    mtp = shortened(FULL, fp8_formats(FULL)).weights
    assert mtp.of(expert.format(14)).kind == "fp8"
