"""A model is a directory with config.json or a name in the local Hugging Face cache; all else is explained."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from glm_dcp_jax.model.locate import ModelNotFound, locate_model

NAME = "some-org/some-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_snapshot(hub_cache: Path, files: dict[str, str]) -> Path:
    """The cache layout of huggingface_hub: refs/main names a commit, snapshots/<commit> holds the files."""
    model = hub_cache / ("models--" + NAME.replace("/", "--"))
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    for name, text in files.items():
        (snapshot / name).write_text(text)
    return snapshot


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    """An empty Hugging Face cache. The library reads HF_HOME at its import, so its constant is set too."""
    cache = tmp_path / "hf-home" / "hub"
    cache.mkdir(parents=True)
    monkeypatch.setenv("HF_HOME", str(cache.parent))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    return cache


def test_a_directory_with_config_is_used_as_it_is(tmp_path, hub_cache):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    assert locate_model(str(checkpoint)) == checkpoint
    assert locate_model("checkpoint") == Path("checkpoint")
    assert locate_model("./checkpoint") == Path("checkpoint")


def test_the_home_directory_is_expanded(tmp_path, hub_cache, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert locate_model("~") == tmp_path


def test_a_directory_without_config_lists_what_it_holds(tmp_path, hub_cache):
    (tmp_path / "weights").mkdir()
    for number in range(12):
        (tmp_path / "weights" / f"part-{number:02}.bin").touch()
    with pytest.raises(ModelNotFound, match=r"no config\.json.*part-00\.bin, .*part-07\.bin and 4 more"):
        locate_model(str(tmp_path / "weights"))


def test_an_empty_directory_is_said_to_be_empty(tmp_path, hub_cache):
    (tmp_path / "void").mkdir()
    with pytest.raises(ModelNotFound, match=r"no config\.json.*nothing"):
        locate_model(str(tmp_path / "void"))


@pytest.mark.parametrize("path", ["/no/such", "./absent", "../absent", "~/absent", "~nobody-here/x", "a/b/c"])
def test_a_path_that_does_not_exist_is_not_taken_for_a_name(path, hub_cache):
    with pytest.raises(ModelNotFound, match="there is no directory"):
        locate_model(path)


def test_a_file_is_not_a_model(tmp_path, hub_cache):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelNotFound, match=r"model\.safetensors is a file; give the checkpoint directory"):
        locate_model("model.safetensors")


def test_a_cached_name_gives_its_snapshot(hub_cache):
    snapshot = make_snapshot(hub_cache, {"config.json": "{}"})
    assert locate_model(NAME) == snapshot


def test_a_local_directory_wins_over_a_cached_name(tmp_path, hub_cache):
    make_snapshot(hub_cache, {"config.json": "{}"})
    (tmp_path / NAME).mkdir(parents=True)
    (tmp_path / NAME / "config.json").write_text("{}")
    assert locate_model(NAME) == Path(NAME)


def test_a_snapshot_that_lacks_other_files_is_still_a_model(hub_cache):
    """huggingface_hub keeps the repository's file list and calls a snapshot without its README incomplete."""
    snapshot = make_snapshot(hub_cache, {"config.json": "{}"})
    listing = {name: {"size": 2, "blob_id": "0" * 40} for name in ("config.json", "README.md")}
    trees = snapshot.parents[1] / "trees"
    trees.mkdir()
    (trees / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": listing}))
    assert locate_model(NAME) == snapshot


def test_a_snapshot_without_config_is_refused(hub_cache):
    snapshot = make_snapshot(hub_cache, {"tokenizer.json": "{}"})
    with pytest.raises(ModelNotFound, match=rf"{snapshot} .*no config\.json.*tokenizer\.json"):
        locate_model(NAME)


def test_a_name_that_is_not_cached_says_where_it_looked_and_how_to_fetch_it(hub_cache):
    with pytest.raises(ModelNotFound) as caught:
        locate_model(NAME)
    message = str(caught.value)
    assert NAME in message
    assert str(hub_cache) in message
    assert "Nothing is downloaded" in message
    assert f"hf download {NAME}" in message


@pytest.mark.parametrize("name", ["some org/model", "double--dash", "x" * 200])
def test_an_impossible_name_is_refused(name, hub_cache):
    with pytest.raises(ModelNotFound, match="nor a possible Hugging Face name"):
        locate_model(name)


def test_an_empty_name_is_not_the_current_directory(tmp_path, hub_cache):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ModelNotFound, match='the model is ""; give a checkpoint directory or a Hugging Face name'
    ):
        locate_model("")


def test_a_directory_in_the_place_of_config_json(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelNotFound, match="config.json is a directory, but must be the model's"):
        locate_model(str(tmp_path))


def test_hf_home_decides_where_a_fresh_process_looks(tmp_path):
    """And a path needs no huggingface_hub: the library is imported for names only."""
    snapshot = make_snapshot(tmp_path / "hub", {"config.json": "{}"})
    program = (
        "import sys; from glm_dcp_jax.model.locate import locate_model\n"
        f"locate_model({str(snapshot)!r}); assert 'huggingface_hub' not in sys.modules\n"
        f"print(locate_model({NAME!r}))"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
    environment |= {"HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == str(snapshot)
