"""The MTP layer: its tensors in their places, what is said where there are none, and an independent reference."""

import logging
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glm_dcp_jax.config import ConfigError, ModelConfig, ParallelConfig
from glm_dcp_jax.model.load import load_parameters
from glm_dcp_jax.model.network import Network, abstract_network
from glm_dcp_jax.model.safetensors_reader import Checkpoint, CheckpointError
from glm_dcp_jax.model.stored_weights import StoredWeights
from glm_dcp_jax.parallel.batch import Block
from glm_dcp_jax.parallel.mesh import make_mesh

sys.path.append(str(Path(__file__).parents[1] / "oracle"))

from drafting import Drafting
from numpy_reference import NumpyReference
from random_models import EXPERT_MARGIN, INDEX_MARGIN, make_model, write_checkpoint

from glm_dcp_jax.engine.draft_steps import FirstShape
from glm_dcp_jax.engine.steps import BlockShape

NAME = "one_dense"
PREFIX = "model.layers.6."


def load(directory: Path, tp: int = 1, mtp: bool = True) -> Network:
    config = ModelConfig.load(directory)
    shape = abstract_network(config, jnp.dtype("float32"), tp, mtp=mtp)
    mesh = make_mesh(ParallelConfig(tp))
    return nnx.merge(
        shape.definition, load_parameters(StoredWeights(Checkpoint.open(directory)), config, shape, mesh)
    )


def tensors_with(**others: np.ndarray) -> tuple[dict, dict]:
    """The model with its MTP layer, and others of that layer: None takes one away."""
    config, tensors = make_model(NAME, mtp=True)
    named = {PREFIX + name.replace("__", "."): tensor for name, tensor in others.items()}
    return config, {name: tensor for name, tensor in (tensors | named).items() if tensor is not None}


class TestLoading:
    def test_every_tensor_is_in_its_place(self, tmp_path):
        config, tensors = make_model(NAME, mtp=True)
        mtp = load(write_checkpoint(tmp_path, config, tensors)).mtp
        layer = mtp.group.layers[0]
        for parameter, name in (
            (mtp.embedding_norm, "enorm"),
            (mtp.hidden_norm, "hnorm"),
            (mtp.join.values, "eh_proj"),
            (mtp.head_norm, "shared_head.norm"),
            (layer.input_norm, "input_layernorm"),
            (layer.attention.kv_a.values, "self_attn.kv_a_proj_with_mqa"),
            (layer.indexer.keys.values, "self_attn.indexer.wk"),
            (layer.indexer.head_weights.values, "self_attn.indexer.weights_proj"),
            (layer.feed_forward.router.values, "mlp.gate"),
            (layer.feed_forward.shared.down.values, "mlp.shared_experts.down_proj"),
        ):
            np.testing.assert_array_equal(
                parameter[...], tensors[f"{PREFIX}{name}.weight"].astype(np.float32)
            )

    def test_its_input_projection_is_split_over_all_devices_and_padded(self, devices, tmp_path):
        devices(3)
        config, tensors = make_model(NAME, mtp=True)  # hidden size 64
        join = load(write_checkpoint(tmp_path, config, tensors), tp=3).mtp.join.values[...]
        assert join.shape == (66, 128)
        assert {shard.data.shape for shard in join.addressable_shards} == {(22, 128)}
        np.testing.assert_array_equal(join[:64], tensors[PREFIX + "eh_proj.weight"].astype(np.float32))

    def test_the_rest_of_the_network_is_as_without_it(self, tmp_path):
        directory = write_checkpoint(tmp_path, *make_model(NAME, mtp=True))
        whole, plain = (nnx.to_flat_state(nnx.state(load(directory, mtp=mtp))) for mtp in (True, False))
        rest = [(path, leaf) for path, leaf in whole if path[0] != "mtp"]
        assert len(rest) < len(whole)
        for (path, leaf), (same, other) in zip(rest, plain, strict=True):
            assert path == same
            np.testing.assert_array_equal(leaf.get_value(), other.get_value())

    def test_copies_of_embedding_and_head_are_left_out_and_that_is_said(self, tmp_path, caplog):
        """Some files have them; they are the main model's, whatever is in them."""
        copies = {"embed_tokens__weight": np.ones((2, 2)), "shared_head__head__weight": np.ones(3)}
        with caplog.at_level(logging.INFO):
            load(write_checkpoint(tmp_path, *tensors_with(**copies)))
        assert "2 tensors are not loaded: 2 the MTP layer's copies of embedding and head" in caplog.text

    def test_without_drafts_the_layer_is_left_out_and_that_is_said(self, tmp_path, caplog):
        config, tensors = make_model(NAME, mtp=True)
        count = sum(name.startswith(PREFIX) for name in tensors)
        with caplog.at_level(logging.INFO):
            assert load(write_checkpoint(tmp_path, config, tensors), mtp=False).mtp is None
        assert f"{count} tensors are not loaded" in caplog.text and "--speculative-config" in caplog.text

    def test_a_checkpoint_without_the_layer_is_refused_before_anything_is_loaded(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("read a tensor"))
        with pytest.raises(CheckpointError, match=r"no tensors of the MTP layer \(model\.layers\.6\.\*\)"):
            load(write_checkpoint(tmp_path, *make_model(NAME)))

    @pytest.mark.parametrize(
        ("others", "says"),
        [
            ({"enorm__weight": None}, r"1 missing: model\.layers\.6\.enorm\.weight"),
            (
                {"self_attn__indexer__wk__weight": None},
                r"1 missing: model\.layers\.6\.self_attn\.indexer\.wk",
            ),
            ({"self_attn__indexers_proj__weight": np.ones(3)}, r"1 unexpected: model\.layers\.6\.self_attn"),
            (
                {"eh_proj__weight": np.ones((64, 64), np.float32)},
                r"eh_proj\.weight is \(64, 64\) but should be \(64, 128\)",
            ),
        ],
    )
    def test_what_is_wrong_with_it_is_named(self, tmp_path, others, says):
        with pytest.raises(CheckpointError, match=says):
            load(write_checkpoint(tmp_path, *tensors_with(**others)))

    def test_a_model_without_such_a_layer_does_not_draft(self, tmp_path):
        config, tensors = make_model(NAME)
        directory = write_checkpoint(tmp_path, config | {"num_nextn_predict_layers": 0}, tensors)
        with pytest.raises(ConfigError, match="num_nextn_predict_layers 0; leave --speculative-config out"):
            Drafting(directory, 1, 8, {})


class MtpReference(NumpyReference):
    """The MTP layer in numpy, as the layer behind the last of an independent network.

    margin: how near the nearest decision of the last call was, as a share of what is called safe.
    """

    def draft_logits(self, following: list[int], hidden: np.ndarray) -> np.ndarray:
        """[S, V] of rows 0 .. S-1. following: each row's next token. hidden: [S, H] behind the main model's norm."""
        layer = self.config["num_hidden_layers"]
        name = f"model.layers.{layer}"
        embedded = self._weights["model.embed_tokens.weight"][following]
        halves = self._norm(embedded, f"{name}.enorm"), self._norm(hidden, f"{name}.hnorm")
        h = self._project(np.concatenate(halves, axis=1), f"{name}.eh_proj")
        x = self._norm(h, f"{name}.input_layernorm")
        query_latent = self._query_latent(layer, x)
        selected, index_gap = self._select(layer, x, query_latent)
        h = h + self._attend(layer, x, query_latent, selected)
        x = self._norm(h, f"{name}.post_attention_layernorm")
        ids, weights, expert_gap = self._route(layer, x)
        h = h + self._mixture(layer, x, ids, weights)
        self.margin = min(index_gap.min() / INDEX_MARGIN, expert_gap.min() / EXPERT_MARGIN)
        return self._project(self._norm(h, f"{name}.shared_head.norm"), "lm_head")


@pytest.mark.parametrize(("name", "tp", "dcp"), [("odd_sizes", 7, 7), ("expert_groups", 4, 2)])
def test_logits_are_those_of_an_independent_reference(devices, tmp_path, name, tp, dcp):
    """Sizes that 7 does not divide; a router with groups. Random hidden states stand for the main model's."""
    devices(tp)
    config, tensors = make_model(name, mtp=True)
    reference, rows = MtpReference(config, tensors), 40
    for seed in range(200):
        rng = np.random.default_rng(seed)
        following = rng.integers(config["vocab_size"], size=rows).tolist()
        hidden = rng.standard_normal((rows, config["hidden_size"])).astype(np.float32)
        expected = reference.draft_logits(following, hidden)
        if reference.margin >= 1:
            break
    else:
        pytest.fail("no rows leave every decision room")
    settings = {"tensor_parallel_size": tp, "decode_context_parallel_size": dcp, "block_size": 4}
    engine = Drafting(write_checkpoint(tmp_path, config, tensors), 1, rows, settings)
    shape = BlockShape("prefill", 1, rows, engine.pages)
    wanted = FirstShape((shape,), rows, logits=True)
    first = engine.blueprint.drafts.first(wanted, engine.parameters, engine.mtp_pools)
    every_row = np.arange(rows, dtype=np.int32)
    block = Block(np.array([following], np.int32), every_row[None], engine.page_table)
    out = first(engine.leaves, engine.mtp_pools, (block,), hidden, every_row)
    np.testing.assert_allclose(out.logits, expected, rtol=0, atol=2e-4)
    np.testing.assert_array_equal(out.draft.tokens, expected.argmax(axis=1))
