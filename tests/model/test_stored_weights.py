"""How weights are stored is read off the tensors, and any part of one is what an independent program says."""

import logging
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from glm_dcp_jax import LLM
from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.kernels import weights
from glm_dcp_jax.model.safetensors_reader import Checkpoint, CheckpointError
from glm_dcp_jax.model.stored_weights import NVFP4, PLAIN, StoredFormat, StoredWeights

sys.path.append(str(Path(__file__).parents[1] / "oracle"))

import quantised_models
from random_models import make_model, write_checkpoint

NAME = "model.layers.3.self_attn.kv_a_proj_with_mqa.weight"
QUANTISERS = {
    "fp8": quantised_models.fp8,
    "fp8_per_row": quantised_models.fp8_per_row,
    "fp8_one_scale": quantised_models.fp8_one_scale,
    "modelopt": quantised_models.modelopt,
    "compressed": quantised_models.compressed,
}
SHAPES = [(576, 256), (128, 160), (7, 16), (300, 400)]


def stored_in(directory: Path, tensors: dict, **settings) -> StoredWeights:
    save_file(
        {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, directory / "a.safetensors"
    )
    return StoredWeights(Checkpoint.open(directory), **settings)


def random_weight(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """With rows and columns of very different sizes, so that a scale in the wrong place shows."""
    rng = np.random.default_rng([seed, *shape])
    rows, columns = (10.0 ** rng.uniform(-3, 1, size) for size in shape)
    return (rng.standard_normal(shape) * rows[:, None] * columns).astype(np.float32)


@pytest.mark.parametrize("how", QUANTISERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_exactly_what_is_stored(how, shape, tmp_path):
    tensors, plain = QUANTISERS[how](NAME, random_weight(shape))
    stored = stored_in(tmp_path, tensors)
    assert stored.names() == [NAME] and stored.shape(NAME) == shape and stored.quantised
    np.testing.assert_array_equal(stored.read(NAME, "values", (1, 1)), plain)
    nothing = stored.read(NAME, "values", (1, 1), (slice(shape[0], shape[0] + 4), slice(0, 16)))
    assert nothing.shape == (0, 16)
    some = (slice(5, 6 + shape[0] // 2), slice(3, shape[1] - 5))
    np.testing.assert_array_equal(stored.read(NAME, "values", (1, 1), some), plain[some])


@pytest.mark.parametrize("how", QUANTISERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_a_device_holds_is_exactly_what_is_stored(how, shape, tmp_path):
    """In grains as fine as the network may ask for."""
    tensors, plain = QUANTISERS[how](NAME, random_weight(shape))
    stored = stored_in(tmp_path, tensors)
    if stored.of(NAME) == NVFP4:
        parts = [stored.read(NAME, part, (1, 16)) for part in ("codes", "scales", "outer")]
        found = weights.dequantised(weights.Nvfp4Weight(*map(jnp.asarray, parts)))
        # (code * scale) is exact, so only its product with the outer scale is rounded: once, on both sides.
        np.testing.assert_array_equal(found, plain)
        return
    for rows, columns in ((1, 1), (np.gcd(shape[0], 128), np.gcd(shape[1], 128))):
        if stored.of(NAME).block[0] % rows:
            continue
        parts = [stored.read(NAME, part, (int(rows), int(columns))) for part in ("codes", "scales")]
        found = weights.dequantised(weights.Fp8Weight(*map(jnp.asarray, parts)))
        np.testing.assert_array_equal(found, plain)


def test_both_forms_of_nvfp4_are_the_same_weight(tmp_path):
    """Outer scales that are powers of two have exact reciprocals: one file multiplies, the other divides."""
    weight = random_weight((64, 128))
    weight *= 6 * 448 * 2.0**-9 / np.abs(weight).max()
    values = []
    for how in ("modelopt", "compressed"):
        (tmp_path / how).mkdir()
        tensors, _ = QUANTISERS[how](NAME, weight)
        stored = stored_in(tmp_path / how, tensors)
        values.append((stored.read(NAME, "outer", (1, 16)), stored.read(NAME, "values", (1, 1))))
    assert values[0][0] == values[1][0] == np.float32(2.0**-9)
    np.testing.assert_array_equal(values[0][1], values[1][1])


def test_a_scale_that_looks_like_its_reciprocal_is_warned_of(tmp_path, caplog):
    tensors, _ = quantised_models.modelopt(NAME, random_weight((8, 32)))
    tensors[f"{NAME}_scale_2"] = np.float32(1) / tensors[f"{NAME}_scale_2"]
    with caplog.at_level(logging.WARNING, logger="glm_dcp_jax"):
        stored_in(tmp_path, tensors).read(NAME, "values", (1, 1))
    assert f"{NAME}_scale_2" in caplog.text and "reciprocal" in caplog.text


def test_formats_are_decided_by_what_is_there_and_by_nothing_else(tmp_path):
    """GLM-5.2-FP8's config lists a module indexers_proj, which does not exist, as not converted."""
    names = {
        "model.layers.0.self_attn.indexer.weights_proj.weight": None,
        "model.layers.0.self_attn.indexer.wk.weight": quantised_models.fp8,
        "model.layers.0.mlp.gate_proj.weight": quantised_models.modelopt,
        "model.layers.1.mlp.gate_proj.weight": quantised_models.compressed,
        "model.norm.weight": None,
    }
    tensors = {}
    for name, how in names.items():
        weight = random_weight((32, 64))
        tensors |= {name: weight} if how is None else how(name, weight)[0]
    stored = stored_in(tmp_path, tensors)
    assert stored.names() == sorted(names)
    found = {name: stored.of(name) for name in names}
    assert list(found.values()) == [PLAIN, StoredFormat("fp8", (32, 64)), NVFP4, NVFP4, PLAIN]
    kinds = stored.layer_kinds(3)
    assert kinds[0] != kinds[1] and kinds[2] == frozenset()


@pytest.mark.parametrize("how", QUANTISERS)
def test_kinds_are_what_the_tensors_are(how, tmp_path):
    tensors, _ = QUANTISERS[how](NAME, random_weight((32, 64)))
    kind = "fp8" if how.startswith("fp8") else "nvfp4"
    (tmp_path / "whole").mkdir()
    assert stored_in(tmp_path / "whole", tensors | {"norm.weight": np.ones(3, np.float32)}).kinds == {
        "plain",
        kind,
    }
    unreadable = {name: tensor for name, tensor in tensors.items() if "scale" not in name}
    assert stored_in(tmp_path, unreadable).kinds == {kind}, "what is wrong with it is said when it is loaded"


def test_blocks_of_another_size_are_as_the_config_says(tmp_path):
    tensors, plain = quantised_models.fp8(NAME, random_weight((100, 90)), (48, 32))
    stored = stored_in(tmp_path, tensors, block=(48, 32))
    assert stored.of(NAME) == StoredFormat("fp8", (48, 32))
    np.testing.assert_array_equal(stored.read(NAME, "values", (1, 1)), plain)


class TestErrors:
    @staticmethod
    def message(directory: Path, tensors: dict) -> str:
        stored = stored_in(directory, tensors)
        assert stored.of(NAME) == PLAIN
        with pytest.raises(CheckpointError) as raised:
            stored.check([NAME])
        stored.check(["another"])
        return str(raised.value)

    def test_a_lost_last_row_of_scales(self, tmp_path):
        """576 rows are 4.5 blocks: whoever floors loses the scales of the last 64."""
        tensors, _ = quantised_models.fp8(NAME, random_weight((576, 256)))
        tensors[f"{NAME}_scale_inv"] = tensors[f"{NAME}_scale_inv"][:4]
        message = self.message(tmp_path, tensors)
        assert f"{NAME}_scale_inv is [4, 2]" in message and "has [5, 2] scales" in message

    @pytest.mark.parametrize(("block", "rows"), [((64, 64), "[9, 4]"), ((1, 128), "[576, 2]")])
    def test_scales_of_blocks_of_another_size(self, block, rows, tmp_path):
        """Of compressed-tensors, whose block_structure says what their shape leaves open."""
        tensors, _ = quantised_models.fp8(NAME, random_weight((576, 256)))
        stored = stored_in(
            tmp_path, {NAME: tensors[NAME], f"{NAME}_scale": tensors[f"{NAME}_scale_inv"]}, block=block
        )
        with pytest.raises(CheckpointError) as raised:
            stored.check([NAME])
        assert f"{NAME}_scale is [5, 2]" in str(raised.value)
        assert f"in blocks of {list(block)} has {rows} scales" in str(raised.value)

    def test_one_block_of_many(self, tmp_path):
        tensors, _ = quantised_models.fp8(NAME, random_weight((576, 256)))
        tensors[f"{NAME}_scale_inv"] = tensors[f"{NAME}_scale_inv"][:1, :1]
        assert "is [1, 1], but" in self.message(tmp_path, tensors)

    @pytest.mark.parametrize("how", ["fp8", "modelopt", "compressed"])
    def test_codes_without_scales(self, how, tmp_path):
        tensors, _ = QUANTISERS[how](NAME, random_weight((32, 64)))
        tensors = {name: tensor for name, tensor in tensors.items() if "scale" not in name}
        assert "with no scales, which cannot be loaded" in self.message(tmp_path, tensors)

    @pytest.mark.parametrize("left_out", ["_scale", "_scale_2"])
    def test_one_of_two_scales(self, left_out, tmp_path):
        tensors, _ = quantised_models.modelopt(NAME, random_weight((32, 64)))
        del tensors[NAME + left_out]
        assert "which cannot be loaded" in self.message(tmp_path, tensors)

    def test_the_other_forms_outer_scale(self, tmp_path):
        """A packed weight with weight_scale_2 could be meant either way."""
        tensors, _ = quantised_models.compressed(NAME, random_weight((32, 64)))
        tensors[f"{NAME}_scale_2"] = tensors.pop(f"{NAME}_global_scale")
        assert "which cannot be loaded" in self.message(tmp_path, tensors)

    def test_scales_of_another_weight(self, tmp_path):
        tensors, _ = quantised_models.modelopt(NAME, random_weight((32, 64)))
        tensors[f"{NAME}_scale"] = tensors[f"{NAME}_scale"][:, :3]
        assert "NVFP4 weights of 64 inputs have F8_E4M3 scales [32, 4]" in self.message(tmp_path, tensors)

    def test_scales_beside_floats(self, tmp_path):
        tensors, plain = quantised_models.fp8(NAME, random_weight((32, 64)))
        tensors[NAME] = plain.astype(ml_dtypes.bfloat16)
        assert "is stored as BF16, but has scales as well (weight_scale_inv)" in self.message(
            tmp_path, tensors
        )

    @pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
    def test_an_outer_scale_that_is_none(self, scale, tmp_path):
        tensors, _ = quantised_models.compressed(NAME, random_weight((32, 64)))
        tensors[f"{NAME}_global_scale"][:] = scale
        with pytest.raises(CheckpointError, match="must be a positive number"):
            stored_in(tmp_path, tensors).read(NAME, "outer", (1, 16))

    @pytest.mark.parametrize("scale", [1e-40, 1e-37])
    def test_an_outer_scale_whose_reciprocal_leaves_nothing_finite(self, scale, tmp_path):
        tensors, _ = quantised_models.compressed(NAME, random_weight((32, 64)))
        tensors[f"{NAME}_global_scale"][:] = scale
        with pytest.raises(CheckpointError, match="leave them finite"):
            stored_in(tmp_path, tensors).read(NAME, "values", (1, 1))

    @pytest.mark.parametrize(
        ("how", "scale"),
        [
            (how, scale)
            for how in ("fp8", "fp8_per_row", "modelopt")
            for scale in (-1.0, np.nan, np.inf)
            if how != "modelopt" or not np.isinf(scale)  # E4M3 has no infinity
        ],
    )
    def test_scales_that_make_no_weight(self, how, scale, tmp_path):
        tensors, _ = QUANTISERS[how](NAME, random_weight((32, 64)))
        name = f"{NAME}_scale_inv" if how == "fp8" else f"{NAME}_scale"
        tensors[name][0, 0] = scale
        stored = stored_in(tmp_path, tensors)
        for part in ("values", "scales"):
            with pytest.raises(
                CheckpointError, match=f"{name} holds .*; scales must be finite and not negative"
            ):
                stored.read(NAME, part, (1, 16) if how == "modelopt" else (1, 1))

    @pytest.mark.parametrize("code", [0x7F, 0xFF])
    @pytest.mark.parametrize("part", ["codes", "values"])
    @pytest.mark.parametrize("place", [(0, 0), (7, 399), (299, 5)])
    def test_codes_that_are_no_number(self, code, part, place, tmp_path, monkeypatch):
        """Named with the first place, counted in the tensor, by whoever reads it, and by nobody else."""
        monkeypatch.setattr("glm_dcp_jax.model.stored_weights._LOOKED_AT", 1000)  # two rows and a half
        tensors, plain = quantised_models.fp8(NAME, random_weight((300, 400)))
        codes = tensors[NAME].view(np.uint8)
        codes[place] = codes[299, 399] = code
        stored = stored_in(tmp_path, tensors)
        with pytest.raises(CheckpointError) as raised:
            stored.read(NAME, part, (1, 1))
        assert f"{NAME} holds the code 0x{code:02X} at [{place[0]}, {place[1]}]" in str(raised.value)
        with pytest.raises(CheckpointError, match=r"at \[299, 399\], which is not a number"):
            stored.read(NAME, part, (1, 1), (slice(20, 300), slice(6, 400)))
        clean = (slice(1, 7), slice(1, 399))
        np.testing.assert_array_equal(stored.read(NAME, "values", (1, 1), clean), plain[clean])

    @pytest.mark.parametrize("dtype", [np.uint8, np.int32, ml_dtypes.float8_e4m3fn])
    def test_integers_for_scales(self, dtype, tmp_path):
        """Exponents, perhaps; taken as numbers they would make other weights."""
        tensors, _ = quantised_models.fp8(NAME, random_weight((32, 64)))
        tensors[f"{NAME}_scale_inv"] = np.full((1, 1), 120, dtype)
        assert "scales are F32, BF16, F16, F8_E8M0" in self.message(tmp_path, tensors)

    def test_a_weight_that_is_there_twice(self, tmp_path):
        tensors, plain = quantised_models.compressed(NAME, random_weight((32, 64)))
        tensors[NAME] = plain.astype(ml_dtypes.bfloat16)
        stored = stored_in(tmp_path, tensors)
        with pytest.raises(CheckpointError, match="there are both"):
            stored.check([NAME])

    def test_a_scalar_with_scales(self, tmp_path):
        tensors, _ = quantised_models.modelopt(NAME, random_weight((32, 64)))
        tensors[NAME] = np.zeros((), np.uint8)
        assert "only matrices can be stored as NVFP4" in self.message(tmp_path, tensors)

    def test_many_are_cut_and_counted(self, tmp_path):
        tensors = {f"w{number}.weight": np.ones((4, 4), np.int8) for number in range(7)}
        with pytest.raises(CheckpointError, match="and 2 more$") as raised:
            stored_in(tmp_path, tensors).check(tensors)
        assert str(raised.value).count("is stored as I8 with no scales") == 5


@pytest.mark.parametrize(
    ("section", "how", "said"),
    [
        (quantised_models.FP8_SECTION, None, "not quantised, though config.json says fp8"),
        (quantised_models.FP8_SECTION, quantised_models.modelopt, "stored as NVFP4 and BF16"),
        ({}, None, "the checkpoint is not quantised"),
    ],
    ids=["plain", "nvfp4", "no section"],
)
def test_an_engine_compares_what_is_asked_for_with_the_tensors(section, how, said, tmp_path):
    config, tensors = make_model("single_layer")
    written, _ = quantised_models.quantise(tensors, lambda name: how if "down_proj" in name else None)
    directory = write_checkpoint(tmp_path, config | {"quantization_config": section}, written)
    with pytest.raises(ConfigError, match=f"quantization fp8 was asked for, but .*{said}"):
        LLM(str(directory), quantization="fp8")
