"""Which engines fit together, and what is said of those that do not."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.config import ConfigError, ModelConfig
from glm_dcp_jax.model.safetensors_reader import Checkpoint
from glm_dcp_jax.transfer.fingerprint import Fingerprint, check_alike, model_id, record_id

sys.path.append(str(Path(__file__).parents[1] / "engine"))

from tiny import CONFIG, write_tiny

ENGINE = Fingerprint(1, "tcp", "abc", "float32", 4, 2, True, 4, 4, 64, 1, 1, 512)


class TestPairs:
    @pytest.mark.parametrize(
        "change",
        [
            {"tp": 6, "dcp": 3},
            {"block_size": 16},
            {"interleave": 64},
            {"index_shards": 2},
            {"piece_tokens": 1},
            {"mtp": False},
        ],
        ids=str,
    )
    def test_layouts_are_free_and_so_is_a_consumer_without_drafts(self, change):
        consumer = replace(ENGINE, **change)
        check_alike(ENGINE, consumer)
        assert consumer.digest == ENGINE.digest

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"model": "other"}, "digest abc, the consumer serves a model with the digest other"),
            ({"record": "bfloat16"}, "the format float32, the consumer keeps records of the format bfloat16"),
            ({"layers": 5}, "has 4 layers, the consumer has 5 layers"),
            ({"full_layers": 3}, "has 2 Full layers, the consumer has 3 Full layers"),
            ({"connector": "nixl"}, "uses the connector tcp, the consumer uses the connector nixl"),
            ({"protocol": 2}, "speaks version 1 of the protocol, the consumer speaks version 2"),
        ],
        ids=str,
    )
    def test_bytes_that_mean_something_else_are_refused(self, change, said):
        consumer = replace(ENGINE, **change)
        with pytest.raises(ConfigError, match="do not fit together") as caught:
            check_alike(ENGINE, consumer)
        assert said in str(caught.value)
        assert consumer.digest != ENGINE.digest

    def test_drafts_need_a_producer_that_drafts(self):
        with pytest.raises(ConfigError, match="start the producer with --speculative-config too"):
            check_alike(replace(ENGINE, mtp=False), ENGINE)

    def test_all_that_differs_is_said_at_once(self):
        with pytest.raises(ConfigError, match="digest.*Full layers"):
            check_alike(ENGINE, replace(ENGINE, model="x", full_layers=9))


class TestObjects:
    def test_they_travel_as_json(self):
        assert Fingerprint.from_object(json.loads(json.dumps(ENGINE.as_object()))) == ENGINE

    @pytest.mark.parametrize(
        "change",
        [
            {"tp": 0},
            {"tp": True},
            {"dcp": 3},
            {"piece_tokens": 0},
            {"model": None},
            {"mtp": 1},
            {"layers": 4.0},
        ],
        ids=str,
    )
    def test_what_cannot_be_is_refused(self, change):
        with pytest.raises(ConfigError):
            Fingerprint.from_object(ENGINE.as_object() | change)

    @pytest.mark.parametrize("given", [None, [], {}, {"tp": 4}, ENGINE.as_object() | {"more": 1}], ids=str)
    def test_so_is_what_is_none(self, given):
        with pytest.raises(ConfigError, match="a fingerprint has"):
            Fingerprint.from_object(given)

    def test_a_layout_that_cannot_be_is_found_when_it_is_asked_for(self):
        with pytest.raises(ConfigError, match="interleave 3 does not divide"):
            _ = replace(ENGINE, interleave=3).geometry


class TestIds:
    def test_records_differ_by_format_sizes_kinds_and_outer_scales(self):
        formats = [
            RecordFormat.sized("float32", 32, 8, 16),
            RecordFormat.sized("bfloat16", 32, 8, 16),
            RecordFormat.sized("bfloat16", 32, 8, 32),
            RecordFormat.sized("nvfp4_ds_mla", 32, 8, 16),
            RecordFormat.sized("nvfp4_ds_mla", 32, 8, 16, "fp8"),
        ]
        ids = [record_id(record, None) for record in formats]
        ids += [record_id(formats[-1], (1.0, 2.0)), record_id(formats[-1], (1.0, 2.5))]
        assert len(set(ids)) == len(ids)

    def test_the_same_sizes_with_other_weights_are_another_model(self, tmp_path):
        model = ModelConfig.from_hf(CONFIG)
        one, same = (Checkpoint.open(write_tiny(tmp_path / name)) for name in ("one", "same"))
        assert model_id(model, one) == model_id(model, same)
        changed = write_tiny(tmp_path / "changed")
        file = next(changed.glob("*.safetensors"))
        raw = np.fromfile(file, np.uint8)
        raw[-len(raw) // 3 :] ^= 1  # as another training run would, all over
        raw.tofile(file)
        assert model_id(model, Checkpoint.open(changed)) != model_id(model, one)

    def test_so_are_the_same_weights_under_another_config(self, tmp_path):
        checkpoint = Checkpoint.open(write_tiny(tmp_path / "one"))
        model = ModelConfig.from_hf(CONFIG)
        assert model_id(replace(model, rope_theta=5.0), checkpoint) != model_id(model, checkpoint)
