"""config.json as a ModelConfig: the published files, what is refused, and which field the refusal names."""

import json

import pytest
from published import GLM_5, GLM_5_2

from glm_dcp_jax.config import ConfigError, ModelConfig

SIZES = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim index_topk index_n_heads index_head_dim"
).split()
EXPERT_SIZES = ["moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"]


def read(base: dict = GLM_5_2, **changes) -> ModelConfig:
    return ModelConfig.from_hf(base | changes)


def without(*names: str) -> dict:
    return {name: value for name, value in GLM_5_2.items() if name not in names}


def refused(message: str, base: dict = GLM_5_2, **changes) -> None:
    with pytest.raises(ConfigError, match=message):
        read(base, **changes)


class TestPublished:
    def test_glm_5_2(self):
        model = read()
        as_written = [name for name in GLM_5_2 if hasattr(model, name)]
        assert {name: getattr(model, name) for name in as_written} == {n: GLM_5_2[n] for n in as_written}
        assert set(SIZES + EXPERT_SIZES) <= set(as_written) and "rms_norm_eps" in as_written
        assert model.rope_theta == 8e6
        assert model.eos_token_ids == (154820, 154827, 154829)
        assert (model.qk_head_dim, model.record_width, model.num_full_layers) == (256, 576, 21)
        assert [layer for layer in range(78) if model.full[layer]] == [0, 1, *range(2, 78, 4)]
        assert model.sparse == (False,) * 3 + (True,) * 75

    def test_glm_5_has_no_schedule_so_every_layer_is_full(self):
        model = read(GLM_5)
        assert model.full == (True,) * 78 and model.num_full_layers == 78
        assert model.sparse == (False,) * 3 + (True,) * 75
        assert (model.rope_theta, model.max_position_embeddings, model.dtype) == (1e6, 202752, "bfloat16")

    def test_deepseeks_router_groups(self):
        model = read(n_group=8, topk_group=4)
        assert (model.n_group, model.topk_group) == (8, 4)

    @pytest.mark.parametrize("head_dim", [64, 192, 256, -7, 10**9, "nonsense", None])
    def test_head_dim_changes_nothing(self, head_dim):
        assert read(head_dim=head_dim) == ModelConfig.from_hf(without("head_dim"))


class TestDefaults:
    DEFAULTS = {
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "num_nextn_predict_layers": 0,
        "index_share_for_mtp_iteration": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }

    @pytest.mark.parametrize("field", DEFAULTS)
    def test_an_absent_field_and_a_null_one_mean_the_default(self, field):
        absent, null = ModelConfig.from_hf(without(field)), read(**{field: None})
        assert absent == null
        assert getattr(absent, field) == self.DEFAULTS[field]

    @pytest.mark.parametrize(
        "field",
        ["quantization_config", "rope_scaling", "eos_token_id", "num_key_value_heads", "moe_layer_freq"],
    )
    def test_a_null_field_is_an_absent_one(self, field):
        assert read(**{field: None}) == ModelConfig.from_hf(without(field))

    @pytest.mark.parametrize(
        "changes",
        [
            {"n_shared_experts": 3},
            {"norm_topk_prob": False},
            {"routed_scaling_factor": 1.0},
            {"indexer_rope_interleave": False},
            {"tie_word_embeddings": True},
            {"rms_norm_eps": 1e-6},
        ],
    )
    def test_fields_that_are_given_are_taken(self, changes):
        assert {name: getattr(read(**changes), name) for name in changes} == changes

    def test_the_latent_norms_eps_is_a_setting_of_its_own(self):
        assert (read().latent_norm_eps, read().rms_norm_eps) == (1e-6, 1e-5)
        assert ModelConfig.from_hf(GLM_5_2, latent_norm_eps=1e-5).latent_norm_eps == 1e-5
        assert read(rms_norm_eps=1e-4).latent_norm_eps == 1e-6

    @pytest.mark.parametrize(("given", "ids"), [(7, (7,)), ([7, 8], (7, 8)), ([], ()), (None, ())])
    def test_one_end_of_sequence_token_or_several(self, given, ids):
        assert read(eos_token_id=given).eos_token_ids == ids

    def test_older_files_call_dtype_torch_dtype(self):
        assert ModelConfig.from_hf(without("dtype") | {"torch_dtype": "float16"}).dtype == "float16"


class TestRefused:
    @pytest.mark.parametrize("field", [*SIZES, *EXPERT_SIZES, "intermediate_size"])
    def test_a_missing_size_is_named(self, field):
        refused(rf"lacks {field}\b", without(field))
        refused(rf"lacks {field}\b", **{field: None})

    @pytest.mark.parametrize("field", [*SIZES, *EXPERT_SIZES, "intermediate_size"])
    @pytest.mark.parametrize("value", [0, -1, 2.0, "16", True, [16]])
    def test_a_size_is_a_positive_integer(self, field, value):
        refused(rf"{field} must be a positive integer", **{field: value})

    def test_sizes_that_no_layer_uses_may_be_missing(self):
        all_sparse = ModelConfig.from_hf(without("intermediate_size") | {"mlp_layer_types": ["sparse"] * 78})
        all_dense = ModelConfig.from_hf(without(*EXPERT_SIZES) | {"mlp_layer_types": ["dense"] * 78})
        assert all(all_sparse.sparse) and not any(all_dense.sparse)

    @pytest.mark.parametrize("model_type", ["deepseek_v32", "glm5_next", "", 5, None])
    def test_other_model_types(self, model_type):
        refused("model_type .* is not supported; this engine serves 'glm_moe_dsa'", model_type=model_type)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("hidden_act", "gelu"),
            ("scoring_func", "softmax"),
            ("topk_method", "greedy"),
            ("attention_bias", True),
            ("mlp_bias", True),
        ],
    )
    def test_variants_of_the_network_that_we_do_not_have(self, field, value):
        refused(f"{field} {value!r} is not supported; only", **{field: value})

    def test_grouped_queries(self):
        refused("num_key_value_heads 8 differs from num_attention_heads 64", num_key_value_heads=8)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"n_group": 7}, "n_group 7 must divide n_routed_experts 256"),
            ({"n_group": 0}, "n_group must be a positive integer, but is 0"),
            ({"n_group": 4, "topk_group": 5}, "topk_group 5 must lie between 1 and n_group 4"),
            ({"n_group": 4, "topk_group": 0}, "topk_group must be a positive integer, but is 0"),
            ({"n_group": 256, "topk_group": 8}, "a router group needs at least 2 experts"),
            (
                {"n_group": 64, "topk_group": 1},
                "num_experts_per_tok 8 exceeds the 4 experts of 1 kept groups",
            ),
            ({"n_routed_experts": 4}, "num_experts_per_tok 8 exceeds the 4 experts"),
            ({"n_shared_experts": -1}, "n_shared_experts must be an integer of at least 0, but is -1"),
        ],
    )
    def test_routers_that_cannot_choose(self, changes, message):
        refused(message, **changes)

    def test_an_indexer_narrower_than_its_rotation(self):
        refused("index_head_dim 32 is smaller than qk_rope_head_dim 64", index_head_dim=32)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("rms_norm_eps", "small"),
            ("max_position_embeddings", "8k"),
            ("routed_scaling_factor", [2.5]),
            ("n_group", "one"),
            ("norm_topk_prob", "false"),
            ("tie_word_embeddings", "false"),
            ("num_nextn_predict_layers", "none"),
            ("index_share_for_mtp_iteration", "true"),
            ("eos_token_id", "</s>"),
            ("rope_parameters", "default"),
            ("quantization_config", "fp8"),
            ("indexer_types", 78),
            ("mlp_layer_types", 78),
        ],
    )
    def test_a_field_of_a_wrong_type_is_named(self, field, value):
        refused(field, **{field: value})

    @pytest.mark.parametrize("field", ["index_topk_freq", "index_skip_topk_offset"])
    def test_a_schedule_of_a_wrong_type_is_named(self, field):
        refused(field, without("indexer_types"), **{field: "four"})

    @pytest.mark.parametrize("value", [0, -1])
    def test_a_context_of_nothing(self, value):
        refused("max_position_embeddings", max_position_embeddings=value)


class TestRope:
    def test_older_files_have_rope_theta_at_the_top(self):
        assert ModelConfig.from_hf(without("rope_parameters") | {"rope_theta": 1e6}).rope_theta == 1e6

    def test_rope_parameters_win(self):
        assert read(rope_theta=1e4).rope_theta == 8e6

    def test_a_default_rope_scaling_is_no_scaling(self):
        older = without("rope_parameters") | {"rope_theta": 1e6, "rope_scaling": {"type": "default"}}
        assert ModelConfig.from_hf(older).rope_theta == 1e6

    @pytest.mark.parametrize(
        "changes",
        [
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40}},
            {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 40}},
            {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 40}},
            {"rope_scaling": {"rope_type": "yarn", "factor": 40}},
        ],
        ids=["parameters", "scaling, old name", "scaling", "both"],
    )
    def test_stretched_contexts_are_refused(self, changes):
        refused("rope_type 'yarn' is not supported", **changes)

    def test_a_missing_theta_is_named(self):
        refused("lacks rope_theta", rope_parameters={"rope_type": "default"})
        refused("lacks rope_theta", without("rope_parameters"))

    def test_rotated_dimensions_come_in_pairs(self):
        refused("qk_rope_head_dim 63 must be even", qk_rope_head_dim=63)


class TestAbsurdValues:
    @pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
    def test_an_unknown_dtype(self, field):
        refused(
            "dtype 'garbage' is unknown; use one of bfloat16, float16, float32",
            without("dtype"),
            **{field: "garbage"},
        )

    @pytest.mark.parametrize("layers", [10_001, 10**12])
    def test_a_model_without_end(self, layers):
        refused(f"num_hidden_layers {layers} .* at most 10000", num_hidden_layers=layers)

    @pytest.mark.parametrize("experts", [10_001, 10**30])
    def test_experts_without_end(self, experts):
        """Each has weights of its own, whose names are listed."""
        refused(f"n_routed_experts {experts} .* at most 10000", n_routed_experts=experts)

    @pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "index_topk", "max_position_embeddings"])
    def test_sizes_that_no_index_counts(self, field):
        refused(f"{field} {2**31} .* at most {2**31 - 1}", **{field: 2**31})

    def test_a_number_that_is_no_float(self):
        refused("rms_norm_eps must be a number above 0", rms_norm_eps=10**400)


class TestLoad:
    @staticmethod
    def write(directory, name: str, content: object) -> None:
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))

    def test_a_field_that_is_there_twice(self, tmp_path):
        text = json.dumps(GLM_5_2)
        self.write(tmp_path, "config.json", text[:-1] + ', "hidden_size": 4}')
        with pytest.raises(
            ConfigError, match=r"config\.json cannot be .*the key 'hidden_size' is there twice"
        ):
            ModelConfig.load(tmp_path)

    def test_the_directorys_config(self, tmp_path):
        self.write(tmp_path, "config.json", GLM_5_2)
        assert ModelConfig.load(tmp_path) == read()

    def test_generation_configs_stop_tokens_win(self, tmp_path):
        self.write(tmp_path, "config.json", GLM_5_2 | {"eos_token_id": 1})
        self.write(tmp_path, "generation_config.json", {"temperature": 1.0})
        assert ModelConfig.load(tmp_path).eos_token_ids == (1,)
        self.write(tmp_path, "generation_config.json", {"eos_token_id": [2, 3]})
        assert ModelConfig.load(tmp_path).eos_token_ids == (2, 3)

    def test_overrides_lie_on_top(self, tmp_path):
        self.write(tmp_path, "config.json", GLM_5_2)
        self.write(tmp_path, "generation_config.json", {"eos_token_id": [2, 3]})
        overrides = {"index_topk": 64, "eos_token_id": 9, "rms_norm_eps": None}
        model = ModelConfig.load(tmp_path, overrides, latent_norm_eps=1e-5)
        assert (model.index_topk, model.eos_token_ids, model.latent_norm_eps) == (64, (9,), 1e-5)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "config.json does not exist; a checkpoint directory needs a config.json"),
            ("{", "config.json cannot be read as JSON"),
            ("[1]", "config.json must hold a JSON object, but holds a list"),
            pytest.param(
                "[" * 100_000, "config.json cannot be read as JSON: .* nested too deeply", id="deep"
            ),
            pytest.param(
                '{"x": ' + "1" * 5000 + "}",
                "config.json cannot be read as JSON: an integer has more than 4300 digits",
                id="digits",
            ),
        ],
    )
    def test_broken_files_are_named(self, tmp_path, content, message):
        if content is not None:
            self.write(tmp_path, "config.json", content)
        with pytest.raises(ConfigError, match=message):
            ModelConfig.load(tmp_path)

    @pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
    def test_a_directory_in_the_place_of_a_file(self, tmp_path, name):
        if name != "config.json":
            self.write(tmp_path, "config.json", GLM_5_2)
        (tmp_path / name).mkdir()
        with pytest.raises(ConfigError, match=f"/{name} is a directory, but must be a file"):
            ModelConfig.load(tmp_path)

    def test_a_file_that_is_not_text(self, tmp_path):
        (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
            ModelConfig.load(tmp_path)
