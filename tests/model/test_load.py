"""Checkpoint to parameters: every tensor in its place, sharded and padded, and what is wrong with a file by name."""

import logging
import math
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from glm_dcp_jax.config import ModelConfig, ParallelConfig
from glm_dcp_jax.model.load import load_leaves, load_parameters
from glm_dcp_jax.model.network import abstract_network
from glm_dcp_jax.model.safetensors_reader import Checkpoint, CheckpointError
from glm_dcp_jax.model.stored_weights import StoredWeights
from glm_dcp_jax.parallel.mesh import make_mesh

sys.path.append(str(Path(__file__).parents[1] / "oracle"))

from random_models import BASE_CONFIG, make_model, make_tensors, write_checkpoint

SHARDED = {"embedding", "head", "q_b", "key_expansion", "value_expansion", "output", "gate_up", "down"}


def load(directory: Path, tp: int = 1, dtype: str = "float32") -> nnx.Module:
    """The network with its weights, on the first tp devices as (tp, 1)."""
    config = ModelConfig.load(directory)
    shape = abstract_network(config, jnp.dtype(dtype), tp)
    mesh = make_mesh(ParallelConfig(tp))
    stored = StoredWeights(Checkpoint.open(directory))
    return nnx.merge(shape.definition, load_parameters(stored, config, shape, mesh))


def leaves(network: nnx.Module) -> dict[str, jax.Array]:
    """All parameters by path, as "stages.1.layers.0.attention.q_b"."""
    flat = nnx.to_flat_state(nnx.state(network))
    return {".".join(map(str, path)).removesuffix(".values"): variable.get_value() for path, variable in flat}


def assert_same(one: nnx.Module, other: nnx.Module) -> None:
    left, right = leaves(one), leaves(other)
    assert left.keys() == right.keys()
    for path, value in left.items():
        assert value.dtype == right[path].dtype, path
        np.testing.assert_array_equal(value, right[path], err_msg=path)


@pytest.fixture(scope="module")
def grouped(tmp_path_factory) -> tuple[nnx.Module, dict]:
    """[F dense] then [F S S] four times, which one stacked run holds; with the tensors of its file in float32."""
    config, tensors = make_model("equal_groups")
    directory = write_checkpoint(tmp_path_factory.mktemp("grouped"), config, tensors)
    return load(directory), {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}


class TestPlaces:
    def test_embedding_norm_and_head(self, grouped):
        network, tensors = grouped
        for parameter, name in (
            ("embedding", "model.embed_tokens"),
            ("norm", "model.norm"),
            ("head", "lm_head"),
        ):
            np.testing.assert_array_equal(getattr(network, parameter)[...], tensors[name + ".weight"])

    @pytest.mark.parametrize(("group", "member"), [(0, 0), (1, 2), (3, 1)])
    def test_attention_of_a_layer_in_a_stacked_run(self, grouped, group, member):
        network, tensors = grouped
        found = network.stages[1].layers[member].attention
        layer = f"model.layers.{1 + 3 * group + member}.self_attn."
        weight = lambda name: tensors[layer + name + ".weight"]  # noqa: E731
        np.testing.assert_array_equal(found.q_a.values[...][group], weight("q_a_proj"))
        np.testing.assert_array_equal(found.q_a_norm[...][group], weight("q_a_layernorm"))
        np.testing.assert_array_equal(found.kv_a.values[...][group], weight("kv_a_proj_with_mqa"))
        np.testing.assert_array_equal(found.kv_a_norm[...][group], weight("kv_a_layernorm"))
        np.testing.assert_array_equal(found.q_b.values[...][group], weight("q_b_proj"))
        np.testing.assert_array_equal(found.output.values[...][group], weight("o_proj"))
        for head in range(4):  # 16 nope, then 16 v rows a head in kv_b
            own = weight("kv_b_proj")[32 * head :]
            np.testing.assert_array_equal(found.key_expansion[...][group, head], own[:16])
            np.testing.assert_array_equal(found.value_expansion[...][group, head], own[16:32])

    def test_norms_of_a_layer(self, grouped):
        network, tensors = grouped
        for group in range(4):
            layer, name = network.stages[1].layers[2], f"model.layers.{3 + 3 * group}."
            np.testing.assert_array_equal(
                layer.input_norm[...][group], tensors[name + "input_layernorm.weight"]
            )
            after = tensors[name + "post_attention_layernorm.weight"]
            np.testing.assert_array_equal(layer.feed_forward_norm[...][group], after)

    def test_only_full_layers_have_an_indexer(self, grouped):
        network, tensors = grouped
        first, *shared = network.stages[1].layers
        assert all(layer.indexer is None for layer in shared)
        for group in range(4):
            name = f"model.layers.{1 + 3 * group}.self_attn.indexer."
            queries = first.indexer.queries.values[...][group]
            np.testing.assert_array_equal(queries, tensors[name + "wq_b.weight"])
            np.testing.assert_array_equal(first.indexer.keys.values[...][group], tensors[name + "wk.weight"])
            np.testing.assert_array_equal(first.indexer.key_norm[...][group], tensors[name + "k_norm.weight"])
            np.testing.assert_array_equal(
                first.indexer.key_norm_bias[...][group], tensors[name + "k_norm.bias"]
            )
            weights = tensors[name + "weights_proj.weight"]
            np.testing.assert_array_equal(first.indexer.head_weights.values[...][group], weights)

    def test_dense_layers(self, grouped):
        network, tensors = grouped
        found, name = network.stages[0].layers[0].feed_forward, "model.layers.0.mlp."
        for part, kind in enumerate(("gate_proj", "up_proj")):
            np.testing.assert_array_equal(found.gate_up.values[...][part], tensors[f"{name}{kind}.weight"])
        np.testing.assert_array_equal(found.down.values[...], tensors[name + "down_proj.weight"])

    def test_router_experts_and_shared_expert(self, grouped):
        network, tensors = grouped
        for group, member in ((0, 1), (2, 0), (3, 2)):
            found = network.stages[1].layers[member].feed_forward
            name = f"model.layers.{1 + 3 * group + member}.mlp."
            np.testing.assert_array_equal(found.router.values[...][group], tensors[name + "gate.weight"])
            np.testing.assert_array_equal(
                found.bias[...][group], tensors[name + "gate.e_score_correction_bias"]
            )
            places = [(found, (group, expert), f"experts.{expert}.") for expert in range(6)]
            for at, index, prefix in (*places, (found.shared, (group,), "shared_experts.")):
                for part, kind in enumerate(("gate_proj", "up_proj")):
                    weight = tensors[f"{name}{prefix}{kind}.weight"]
                    np.testing.assert_array_equal(at.gate_up.values[...][index + (part,)], weight)
                np.testing.assert_array_equal(
                    at.down.values[...][index], tensors[f"{name}{prefix}down_proj.weight"]
                )

    def test_bfloat16_arithmetic_keeps_router_and_head_weights_in_float32(self, grouped, tmp_path):
        config, tensors = make_model("single_layer")
        found = leaves(load(write_checkpoint(tmp_path, config, tensors), dtype="bfloat16"))
        wide = {path.rpartition(".")[2] for path, value in found.items() if value.dtype == jnp.float32}
        assert wide == {"router", "bias", "head_weights"}
        bias = next(value for path, value in found.items() if path.endswith(".bias"))
        np.testing.assert_array_equal(bias, tensors["model.layers.0.mlp.gate.e_score_correction_bias"])


class TestFiles:
    def test_two_shards_are_one_file(self, tmp_path):
        config, tensors = make_model("pattern_string")
        one = load(write_checkpoint(tmp_path / "one", config, tensors))
        assert_same(one, load(write_checkpoint(tmp_path / "two", config, tensors, shards=2)))

    @pytest.mark.parametrize("stored", [np.float32, np.float16])
    def test_every_float_type_of_a_file_gives_the_same_parameters(self, tmp_path, stored):
        config, tensors = make_model("single_layer")
        # Values of few bits, which all three types hold exactly.
        coarse = {
            name: np.round(np.asarray(tensor, np.float32) * 32) / 32 for name, tensor in tensors.items()
        }
        assert all(np.abs(tensor).max() < 8 for tensor in coarse.values())
        written = {
            str(dtype): write_checkpoint(
                tmp_path / np.dtype(dtype).name,
                config,
                {n: tensor.astype(dtype) for n, tensor in coarse.items()},
            )
            for dtype in (ml_dtypes.bfloat16, stored)
        }
        assert_same(*(load(directory) for directory in written.values()))

    @pytest.mark.parametrize("stored", [ml_dtypes.float8_e4m3fn, np.int8, np.uint8])
    def test_other_types_are_quantised_and_refused_by_name(self, tmp_path, stored):
        """Their numbers mean nothing without scales; cast as they are, they would give a network of garbage."""
        config, tensors = make_model("single_layer")
        name = "model.layers.0.self_attn.o_proj.weight"
        quantised = tensors | {name: np.asarray(tensors[name], np.float32).astype(stored)}
        with pytest.raises(CheckpointError, match="o_proj"):
            load(write_checkpoint(tmp_path, config, quantised))

    def test_mtp_tensors_and_indexers_of_shared_layers_are_left_out_and_that_is_said(self, tmp_path, caplog):
        config, tensors = make_model("one_dense")
        plain = load(write_checkpoint(tmp_path / "plain", config, tensors))
        _, with_mtp = make_model("one_dense", mtp=True)
        extra = {
            name.replace("layers.0.", "layers.3."): tensor
            for name, tensor in tensors.items()
            if "indexer" in name
        }
        assert len(with_mtp) > len(tensors) and not extra.keys() <= tensors.keys()
        carried = extra | with_mtp | {"model.layers.6.embed_tokens.weight": tensors["lm_head.weight"]}
        left_out = len(carried) - len(tensors)
        with caplog.at_level(logging.INFO, logger="glm_dcp_jax"):
            assert_same(plain, load(write_checkpoint(tmp_path / "carried", config, carried)))
        assert f"{left_out} tensors are not loaded" in caplog.text

    @pytest.mark.parametrize(
        "module",
        ["", "k_proj.", "attn.", "kv_b_proj.", "kv_a_proj_with_mqa."],
        ids=lambda module: module or "none",
    )
    def test_scales_of_a_quantised_cache_are_left_out_and_that_is_said(self, tmp_path, caplog, module):
        config, tensors = make_model("one_dense")
        plain = load(write_checkpoint(tmp_path / "plain", config, tensors))
        scales = {
            f"model.layers.{layer}.self_attn.{module}{letter}_scale": np.ones((), np.float32)
            for layer in (0, 6)  # the MTP layer's, too
            for letter in ("k", "v", "kv")
        }
        with caplog.at_level(logging.INFO, logger="glm_dcp_jax"):
            assert_same(plain, load(write_checkpoint(tmp_path / "carried", config, tensors | scales)))
        said = [record.getMessage() for record in caplog.records if "cache" in record.getMessage()]
        assert said == [
            "6 tensors are not loaded: 6 scales of a quantised KV cache, whose formats here have scales of their own "
            f"({min(scales)})"
        ]

    def test_scales_that_no_cache_has_are_not(self, tmp_path):
        config, tensors = make_model("single_layer")
        odd = {
            f"model.layers.0.mlp.{name}": np.ones(1, np.float32) for name in ("k_scale", "gate.bulk_scale")
        }
        with pytest.raises(CheckpointError, match="2 unexpected: model.layers.0.mlp"):
            load(write_checkpoint(tmp_path, config, tensors | odd))

    def test_a_tied_head_is_the_embedding_whether_or_not_the_file_has_one(self, tmp_path):
        config = BASE_CONFIG | {"num_hidden_layers": 1, "tie_word_embeddings": True}
        tensors = make_tensors(config)
        other_head = tensors.pop("lm_head.weight")
        tied = load(write_checkpoint(tmp_path / "tied", config, tensors))
        np.testing.assert_array_equal(tied.head[...], tied.embedding[...])
        carried = tensors | {"lm_head.weight": other_head}
        assert_same(tied, load(write_checkpoint(tmp_path / "carried", config, carried)))

    def test_layers_beyond_the_configs_count_are_left_out(self, tmp_path):
        config, tensors = make_model("all_full")
        network = load(write_checkpoint(tmp_path, config | {"num_hidden_layers": 2}, tensors))
        assert [len(stage.layers) for stage in network.stages] == [1, 1]


class TestErrors:
    @staticmethod
    def message(directory: Path, tensors: dict, **changes) -> str:
        write_checkpoint(directory, make_model("single_layer")[0] | changes, tensors)
        with pytest.raises(CheckpointError) as raised:
            load(directory)
        return str(raised.value)

    def test_missing_unexpected_and_misshapen_tensors_are_named_together(self, tmp_path):
        _, tensors = make_model("single_layer")
        norm = tensors.pop("model.norm.weight")
        tensors["model.layers.0.self_attn.q_proj.weight"] = norm
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
        message = self.message(tmp_path, tensors)
        for part in (
            "1 missing: model.norm.weight",
            "1 unexpected: model.layers.0.self_attn.q_proj.weight",
            "1 mis-shaped: lm_head.weight is (255, 64) but should be (256, 64)",
            str(tmp_path),
        ):
            assert part in message

    def test_a_config_of_another_size_is_a_mismatch_not_a_crash(self, tmp_path):
        message = self.message(tmp_path, make_model("single_layer")[1], n_routed_experts=9, hidden_size=63)
        assert "model.layers.0.mlp.experts.8.gate_proj.weight" in message
        assert "model.norm.weight is (64,) but should be (63,)" in message

    def test_a_full_layer_needs_its_indexer(self, tmp_path):
        config, tensors = make_model("one_dense")
        write_checkpoint(tmp_path, config | {"index_topk_freq": 1}, tensors)
        with pytest.raises(CheckpointError, match=r"missing: model\.layers\.3\.self_attn\.indexer\."):
            load(tmp_path)

    @pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.experts.2.up_proj.weight"])
    def test_weights_that_float16_cannot_hold_are_not_made_infinite(self, tmp_path, name):
        config, tensors = make_model("equal_groups")
        tensors[name] = tensors[name].astype(np.float32)
        tensors[name].flat[3] = 7e4
        directory = write_checkpoint(tmp_path, config, tensors)
        with pytest.raises(
            CheckpointError, match=f"{name} holds 70000, and float16 ends at 65504; use --dtype"
        ):
            load(directory, dtype="float16")
        tensors[name].flat[3] = 65504
        load(write_checkpoint(tmp_path, config, tensors), dtype="float16")

    def test_a_file_that_changes_while_it_is_read_is_named_at_the_end(self, tmp_path, monkeypatch):
        directory = write_checkpoint(tmp_path, *make_model("equal_groups"))

        def loaded(*arguments):
            arrays = load_leaves(*arguments)
            os.utime(directory / "model.safetensors", ns=(0, 1))
            return arrays

        monkeypatch.setattr("glm_dcp_jax.model.load.load_leaves", loaded)
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors was changed while it was being loaded"
        ):
            load(directory)

    def test_a_truncated_file_is_named_before_anything_is_loaded(self, tmp_path):
        directory = write_checkpoint(tmp_path, *make_model("single_layer"))
        file = directory / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-5])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: .* 5 bytes are missing"):
            load(directory)


@pytest.fixture(scope="module")
def five_heads(tmp_path_factory) -> Path:
    """5 heads, 96 wide dense and 16 wide expert layers, 256 tokens: 3 divides only the 96."""
    return write_checkpoint(tmp_path_factory.mktemp("five"), *make_model("five_heads"))


class TestShards:
    @pytest.mark.parametrize("tp", [2, 3, 4])
    def test_padding_is_zeros_behind_what_one_device_has(self, devices, five_heads, tp):
        devices(tp)
        whole, padded = leaves(load(five_heads)), leaves(load(five_heads, tp))
        longer = set()
        for path, value in padded.items():
            own = np.zeros(value.shape, np.float32)
            own[tuple(map(slice, whole[path].shape))] = whole[path]
            np.testing.assert_array_equal(value, own, err_msg=path)
            if value.shape != whole[path].shape:
                longer.add(path.rpartition(".")[2])
        heads = {"q_b", "key_expansion", "value_expansion", "output"}
        assert longer == (heads | {"embedding", "head", "gate_up", "down"} if tp == 3 else heads)
        rows_of_a_head = whole["stages.0.layers.0.attention.q_b"].shape[-2] // 5
        rows = padded["stages.0.layers.0.attention.q_b"].shape[-2]
        assert rows == math.ceil(5 / tp) * tp * rows_of_a_head

    def test_sharded_weights_exist_once_in_all_and_replicated_ones_once_per_device(self, devices, five_heads):
        chips = devices(4)
        for path, value in leaves(load(five_heads, 4)).items():
            assert [shard.device for shard in value.addressable_shards] == chips
            parts = 4 if path.rpartition(".")[2] in SHARDED else 1
            for shard in value.addressable_shards:
                assert shard.data.nbytes * parts == value.nbytes, path
            distinct = {str(shard.index) for shard in value.addressable_shards}
            assert len(distinct) == parts, path

    def test_every_tensor_is_given_back_once_it_is_read(self, five_heads, monkeypatch):
        """So that a large checkpoint does not pile up in host memory."""
        read, released = set(), set()
        for log, method in ((read, "read"), (released, "release")):
            own = getattr(Checkpoint, method)

            def noted(self, name, *rest, log=log, own=own):
                log.add(name)
                return own(self, name, *rest)

            monkeypatch.setattr(Checkpoint, method, noted)
        load(five_heads)
        assert read == released == set(make_model("five_heads")[1])


class TestPieces:
    @pytest.mark.parametrize(("name", "tp"), [("equal_groups", 1), ("equal_groups", 2), ("five_heads", 3)])
    def test_the_size_of_a_piece_does_not_show(self, devices, tmp_path, monkeypatch, name, tp):
        devices(tp)
        directory = write_checkpoint(tmp_path, *make_model(name))
        whole = load(directory, tp)
        for size in (1, 20_000):  # each stacked tensor alone; a few at a time
            monkeypatch.setattr("glm_dcp_jax.model.load.PIECE_BYTES", size)
            assert_same(whole, load(directory, tp))
