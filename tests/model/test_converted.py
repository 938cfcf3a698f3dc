"""Converted checkpoints: the same parameters bit for bit, on any mesh, and what is wrong with one by name."""

import functools
import json
import logging
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_dcp_jax.config import ModelConfig, engine_config
from glm_dcp_jax.convert.command import main
from glm_dcp_jax.engine.blueprint import Blueprint
from glm_dcp_jax.model.converted import ConvertedCheckpoint, open_checkpoint
from glm_dcp_jax.model.load import _write, load_parameters
from glm_dcp_jax.model.manifest import MANIFEST, seal_of
from glm_dcp_jax.model.restore import restore_parameters
from glm_dcp_jax.model.safetensors_reader import Checkpoint, CheckpointError
from glm_dcp_jax.model.stored_weights import NVFP4, PLAIN, StoredWeights
from glm_dcp_jax.parallel.mesh import make_mesh
from glm_dcp_jax.transfer.fingerprint import model_id

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "oracle")]

from manifest_edits import EDITS, FORMAT, KV_A
from quantised_models import CONFIG, MODELS, config_of, make_quantised, modelopt, quantise
from random_models import CONFIGS, make_model, make_tensors, write_checkpoint

DRAFTS = {"speculative_config": {"num_speculative_tokens": 2}}
MESHES = {"same": (4, 4, False), "fewer": (2, 1, False), "more": (8, 2, False), "experts": (3, 3, True)}
"""(tp, dcp, expert parallel) that checkpoints converted for four devices are loaded on."""


@pytest.fixture(scope="module")
def converted(tmp_path_factory, devices):
    """`converted(name, *flags)`: (source, converted for four devices) of a quantised or plain model, made once."""
    devices(8)

    @functools.cache
    def make(name: str, *flags: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(name)
        if name in MODELS:
            config, tensors, _ = make_quantised(name, mtp=True)
        else:
            config, tensors = make_model(name, mtp=True)
        source = write_checkpoint(folder / "source", config, tensors)
        return source, convert(source, folder / "converted", "-tp", "4", "--dtype", "float32", *flags)

    return make


def convert(source: Path, target: Path, *flags: str) -> Path:
    assert main([str(source), str(target), *flags]) == 0
    return target


@pytest.fixture
def damaged(converted, tmp_path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(converted("mixed")[1], tmp_path / "damaged")


def load(directory: Path, mesh=MESHES["same"], **settings) -> dict[str, jax.Array]:
    """All parameters by path, however the directory holds them."""
    tp, dcp, split = mesh
    settings = {"dtype": "float32"} | settings
    config = engine_config(
        str(directory),
        tensor_parallel_size=tp,
        decode_context_parallel_size=dcp,
        enable_expert_parallel=split,
        dcp_project_first="always",  # keeps copies of value expansions, which are not saved
        **settings,
    )
    model = ModelConfig.load(directory, dict(config.hf_overrides))
    checkpoint = open_checkpoint(directory)
    stored = StoredWeights(checkpoint) if isinstance(checkpoint, Checkpoint) else checkpoint
    blueprint = Blueprint(config, model, make_mesh(config.parallel), weights=stored)
    if isinstance(stored, ConvertedCheckpoint):
        state = restore_parameters(stored, blueprint.shape, blueprint.mesh)
    else:
        state = load_parameters(stored, model, blueprint.shape, blueprint.mesh)
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def assert_same(one: dict[str, jax.Array], other: dict[str, jax.Array]) -> None:
    assert one.keys() == other.keys()
    for path, array in one.items():
        same = other[path]
        assert (array.dtype, array.shape, array.sharding) == (same.dtype, same.shape, same.sharding), path
        left, right = (np.ascontiguousarray(each).tobytes() for each in (array, same))
        assert left == right, path


QUICK = {("mixed", mesh) for mesh in MESHES} | {("odd_sizes", "more")}
CASES = [
    pytest.param(name, mesh, marks=[] if (name, mesh) in QUICK else pytest.mark.slow, id=f"{name}-{mesh}")
    for name in (*MODELS, "odd_sizes", "equal_groups", "explicit_lists")
    for mesh in MESHES
]


class TestParameters:
    @pytest.mark.parametrize(("name", "mesh"), CASES)
    def test_they_are_the_originals_bit_for_bit_on_any_mesh(self, name, mesh, converted):
        source, target = converted(name)
        assert_same(load(source, MESHES[mesh], **DRAFTS), load(target, MESHES[mesh], **DRAFTS))

    @pytest.mark.parametrize("mesh", ["same", pytest.param("experts", marks=pytest.mark.slow)])
    def test_so_they_are_when_converted_for_whole_experts(self, mesh, converted):
        source, target = converted("mixed", "-ep")
        assert_same(load(source, MESHES[mesh]), load(target, MESHES[mesh]))

    @pytest.mark.slow
    @pytest.mark.parametrize("tp", [1, 3])
    def test_so_they_are_when_converted_for_other_numbers_of_devices(self, tp, converted, tmp_path):
        source, _ = converted("mixed")
        target = convert(source, tmp_path / "converted", "-tp", str(tp), "--dtype", "float32")
        for mesh in MESHES.values():
            assert_same(load(source, mesh), load(target, mesh))

    def test_stacks_are_made_of_layers_that_are_stored_alike(self, converted):
        """As from the original, whose attention is stored in FP8, and experts in three ways."""
        source, target = converted("mixed")
        stored, same = StoredWeights(Checkpoint.open(source)), ConvertedCheckpoint.open(target)
        kinds = same.layer_kinds(CONFIG["num_hidden_layers"])
        of_source = stored.layer_kinds(CONFIG["num_hidden_layers"])
        assert [one == kinds[0] for one in kinds] == [one == of_source[0] for one in of_source]
        assert same.quantised
        # Gate and up of the last group are stored differently, so both became plain.
        assert same.of("model.layers.12.mlp.experts.3.up_proj.weight") == PLAIN
        assert same.of("model.layers.12.mlp.experts.3.down_proj.weight") != PLAIN
        assert same.of("model.layers.5.mlp.experts.3.up_proj.weight") == NVFP4

    def test_what_needs_no_draft_loads_without_the_mtp_layer(self, converted):
        _, target = converted("mixed")
        assert not any("mtp" in path for path in load(target))
        assert any("mtp" in path for path in load(target, **DRAFTS))

    def test_fewer_layers_than_were_converted(self, converted):
        source, target = converted("mixed")
        overrides = {"hf_overrides": {"num_hidden_layers": 4}}
        assert_same(load(source, **overrides), load(target, **overrides))

    def test_a_model_is_the_same_model_for_other_engines(self, converted):
        source, target = converted("mixed")
        model = ModelConfig.load(source)
        assert ModelConfig.load(target) == model
        assert model_id(model, open_checkpoint(target)) == model_id(model, open_checkpoint(source))


def modelopt_outputs(name: str):
    return modelopt if "o_proj" in name or "mlp" in name else None


@pytest.fixture
def heads_of_24(tmp_path) -> Path:
    """Two devices have 48 inputs of the output projection each, in whole groups of 16; four have 24."""
    config = config_of(MODELS["modelopt"][0], num_attention_heads=4, num_key_value_heads=4, v_head_dim=24)
    small = config | {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "dense"]}
    tensors, _ = quantise(make_tensors(small), modelopt_outputs)
    return write_checkpoint(tmp_path / "heads", small, tensors)


class TestOutputsThatFourDevicesWouldCutInAGroup:
    def test_codes_become_values_where_they_would_be_cut(self, heads_of_24, tmp_path):
        target = convert(heads_of_24, tmp_path / "converted", "-tp", "2", "--dtype", "float32")
        assert_same(load(heads_of_24), load(target))
        assert_same(load(heads_of_24, (2, 1, False)), load(target, (2, 1, False)))

    def test_and_stay_values_where_they_would_not(self, heads_of_24, tmp_path):
        target = convert(heads_of_24, tmp_path / "converted", "-tp", "4", "--dtype", "float32")
        assert_same(load(heads_of_24), load(target))
        found = load(target, (2, 1, False))
        path = next(path for path in found if "['stages'][0]" in path and "'output'" in path)
        assert "values" in path
        values = StoredWeights(Checkpoint.open(heads_of_24)).read(
            "model.layers.0.self_attn.o_proj.weight", "values", (1, 1)
        )
        np.testing.assert_array_equal(found[path].reshape(-1, *values.shape)[0], values)


class TestDtypes:
    def test_auto_is_the_checkpoints(self, converted, tmp_path):
        source, _ = converted("odd_sizes")
        target = convert(source, tmp_path / "converted", "-tp", "2")
        assert open_checkpoint(target).manifest.dtype == "bfloat16"
        assert_same(load(source, dtype="bfloat16"), load(target, dtype="bfloat16"))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_what_is_dequantised_is_exact_in_whatever_it_is_served(self, converted, tmp_path, dtype):
        """With no --dtype. kv_b of a quantised checkpoint is no bfloat16 number, though its plain weights are."""
        source, _ = converted("mixed")
        target = convert(source, tmp_path / "converted", "-tp", "4")
        assert_same(load(source, dtype=dtype), load(target, dtype=dtype))

    def test_plain_weights_are_cast_which_the_log_says(self, converted, caplog):
        source, target = converted("odd_sizes")
        with caplog.at_level(logging.INFO):
            assert_same(load(source, dtype="bfloat16"), load(target, dtype="bfloat16"))
        assert "were converted as float32, and are cast to bfloat16" in caplog.text

    def test_what_float16_cannot_hold_is_not_made_infinite(self, tmp_path, devices):
        devices(1)
        config, tensors = make_model("odd_sizes")
        tensors["model.norm.weight"][3] = 7e4
        target = convert(write_checkpoint(tmp_path / "source", config, tensors), tmp_path / "converted")
        with pytest.raises(CheckpointError, match="norm holds values beyond 65504, where float16 ends"):
            load(target, (1, 1, False), dtype="float16")

    def test_the_routers_stay_float32(self, converted, tmp_path):
        source, _ = converted("odd_sizes")
        target = convert(source, tmp_path / "converted", "--dtype", "bfloat16")
        loaded = load(target, (1, 1, False), dtype="bfloat16")
        routers = {array.dtype for path, array in loaded.items() if "router" in path or "'bias'" in path}
        assert routers == {jnp.dtype("float32")}


class TestDamage:
    def fails(self, directory: Path, *patterns: str, **settings) -> None:
        with pytest.raises(CheckpointError) as caught:
            load(directory, **settings)
        for pattern in (*patterns, "convert the checkpoint again"):
            assert pattern in str(caught.value)

    def file_of(self, directory: Path, part: str) -> Path:
        """The largest: the one with the arrays."""
        files = (path for path in (directory / "weights" / part).rglob("*") if path.is_file())
        return max(files, key=lambda path: path.stat().st_size)

    def test_a_missing_layer(self, damaged):
        shutil.rmtree(damaged / "weights" / "layer_003")
        self.fails(damaged, "weights/layer_003/", "No such file", "and ")

    def test_a_truncated_file(self, damaged):
        file = self.file_of(damaged, "layer_005")
        content = file.read_bytes()
        file.write_bytes(content[:-7])
        self.fails(damaged, f"has {len(content) - 7:,} bytes instead of {len(content):,}", file.name)

    def test_other_bytes_are_found_by_their_checksum(self, damaged):
        open_checkpoint(damaged).verify_checksums()
        file = self.file_of(damaged, "outside")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{file.name} has other bytes .* \(SHA-256\)"):
            open_checkpoint(damaged).verify_checksums()

    def test_a_layer_that_orbax_cannot_read_is_named(self, damaged):
        for file in (damaged / "weights" / "layer_002").rglob("*"):
            if file.is_file():
                file.write_bytes(bytes(file.stat().st_size))
        self.fails(damaged, "weights/layer_002 cannot be read", "--verify-checksums")

    def test_a_manifest_of_a_later_version(self, damaged):
        self.rewrite(damaged, lambda manifest: manifest.update(version=2))
        self.fails(damaged, "has version 2", "reads up to 1", "update it")

    @pytest.mark.parametrize(("field", "value", "allowed"), EDITS, ids=lambda each: str(each)[:40])
    def test_a_field_that_cannot_be(self, damaged, field, value, allowed):
        """The field, what it may be, and what it is."""
        *path, last = field
        self.rewrite(
            damaged,
            lambda manifest: functools.reduce(lambda at, key: at[key], path, manifest).update({last: value}),
        )
        name = ".".join(map(str, field)).replace(".0.", "[0].")
        found = "..." if isinstance(value, dict) else repr(value)
        self.fails(damaged, f"{MANIFEST} is not as it was written: {name} must be {allowed}, but is {found}")

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda manifest: manifest.pop("parts"), "parts is missing; it must be an object"),
            (lambda manifest: manifest.update(more=1), "more is unknown; known are made_by, "),
            (lambda manifest: manifest["parts"]["outside"].pop("arrays"), "parts.outside.arrays is missing"),
            (
                lambda manifest: manifest["parts"]["outside"]["arrays"]["norm"].pop("grain"),
                "parts.outside.arrays.norm.grain is missing; it must be a list of two whole numbers",
            ),
        ],
        ids=["parts", "more", "arrays", "grain"],
    )
    def test_fields_that_are_missing_or_unknown(self, damaged, change, said):
        self.rewrite(damaged, change)
        self.fails(damaged, f"{MANIFEST} is not as it was written: {said}")

    @pytest.mark.parametrize("grain", [[32, 16], [8, 16], [144, 160], [1, 1]])
    def test_a_grain_that_is_not_that_of_the_codes(self, damaged, grain):
        self.array(damaged, "attention.kv_a.scales", grain=grain)
        said = f"{KV_A}.scales: scales [9, 5] of grain {grain} are those of [{9 * grain[0]}, {5 * grain[1]}] weights"
        self.fails(damaged, f"{said}, but there are codes of [144, 160]")

    def test_a_grain_of_nvfp4(self, damaged):
        self.array(damaged, "feed_forward.down.scales", grain=[1, 32])
        self.fails(damaged, "scales [6, 160, 4] of grain [1, 32] are those of [6, 160, 128] weights")

    def test_a_grain_of_what_is_no_scales(self, damaged):
        self.array(damaged, "attention.kv_a.codes", grain=[2, 2])
        self.fails(damaged, f"{KV_A}.codes.grain must be [1, 1], as it is no scales, but is [2, 2]")

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"shape": [18, 10], "grain": [8, 16]}, "float32 [9, 5] instead of float32 [18, 10]"),
            ({"dtype": "bfloat16"}, "float32 [9, 5] instead of bfloat16 [9, 5]"),
        ],
        ids=["shape", "dtype"],
    )
    def test_a_shape_that_is_not_the_arrays(self, damaged, fields, said):
        """Though all of the manifest agrees with itself."""
        self.array(damaged, "attention.kv_a.scales", **fields)
        self.fails(damaged, f"contradicts {damaged}/weights/layer_003: attention.kv_a.scales is {said}")

    def test_files_that_the_manifest_does_not_know(self, damaged):
        file = self.file_of(damaged, "layer_004").relative_to(damaged).as_posix()

        def forget(manifest: dict) -> None:
            files = manifest["parts"]["layer_004"]["files"]
            files[:] = [each for each in files if each["path"] != file]

        self.rewrite(damaged, forget)
        with pytest.raises(CheckpointError, match=f"{file} is there, but {MANIFEST} knows no such file"):
            open_checkpoint(damaged).verify_checksums()

    def test_a_manifest_that_is_no_json(self, damaged):
        (damaged / MANIFEST).write_text("{")
        self.fails(damaged, MANIFEST, "JSON")

    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            ({"hidden_size": 192}, "embedding is of [256, 160] instead of [256, 192]"),
            ({"num_hidden_layers": 15}, "layer_014 is missing"),
            ({"num_hidden_layers": 14, "first_k_dense_replace": 14}, "layer_001: feed_forward."),
        ],
        ids=["width", "layers", "kinds"],
    )
    def test_another_models_config(self, damaged, overrides, said):
        self.fails(damaged, said, "config.json", hf_overrides=overrides)

    def test_drafts_without_an_mtp_layer(self, converted):
        _, target = converted("odd_sizes", "--no-mtp")
        self.fails(target, "without the MTP layer 4", "without --no-mtp", **DRAFTS)
        assert len(load(target)) > 0

    def test_an_edit_that_makes_sense(self, damaged):
        """Other blocks would be cut elsewhere for another number of devices, and nothing else would show it."""

        def edit(manifest: dict) -> None:
            manifest["parts"]["layer_003"]["formats"][FORMAT[-1]]["block"] = [64, 64]

        self.rewrite(damaged, lambda manifest: None, seal=False)
        assert open_checkpoint(damaged)
        self.rewrite(damaged, edit, seal=False)
        self.fails(damaged, MANIFEST, "some were edited", "convert the checkpoint again")

    def array(self, directory: Path, name: str, **fields) -> None:
        """Edits what the manifest says of one of layer 3's."""
        self.rewrite(
            directory, lambda manifest: manifest["parts"]["layer_003"]["arrays"][name].update(fields)
        )

    def rewrite(self, directory: Path, change, seal: bool = True) -> None:
        manifest = json.loads((directory / MANIFEST).read_text())
        before = manifest.pop("sha256")
        change(manifest)
        manifest["sha256"] = seal_of(manifest) if seal else before
        (directory / MANIFEST).write_text(json.dumps(manifest))


def test_plain_models_have_no_formats(converted):
    _, target = converted("odd_sizes")
    checkpoint = open_checkpoint(target)
    assert not checkpoint.quantised
    assert set(checkpoint.layer_kinds(CONFIGS["odd_sizes"]["num_hidden_layers"])) == {frozenset()}


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8", "float32"])
def test_a_part_is_written_without_converting_the_whole(dtype, devices):
    """XLA for CPUs knows no float8: what is not moved as bytes is converted in full, there and back, for every part."""
    mesh = make_mesh(engine_config("", tensor_parallel_size=2).parallel)
    spec = jax.sharding.PartitionSpec(None, "replica")
    place = jax.sharding.NamedSharding(mesh, spec)
    whole, part = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape in ((64, 32, 16), (8, 32, 16))
    )
    program = _write.lower(whole, part, (8,), place, spec).compile()
    assert " convert(" not in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 8 * 16 * 16 * 4
