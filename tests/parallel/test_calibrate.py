"""The measured link: plausible, kept, and measured anew where what was kept is of no use."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from glm_dcp_jax.parallel import calibrate
from glm_dcp_jax.parallel.calibrate import measured_link
from glm_dcp_jax.parallel.mesh import DCP, TENSOR_AXES


@pytest.fixture
def mesh(devices) -> Mesh:
    return Mesh(np.array(devices(4)).reshape(2, 2), TENSOR_AXES)


def test_a_link_is_measured_once_and_kept(mesh, tmp_path, monkeypatch):
    first = measured_link(mesh, "direct", tmp_path)
    assert first.source == "measured" and 0 < first.latency < 1 and 1e6 < first.bandwidth < 1e13
    monkeypatch.setattr(calibrate, "_seconds", lambda *_: pytest.fail("measured again"))
    again = measured_link(mesh, "direct", tmp_path)
    assert again[:2] == first[:2]
    (file,) = tmp_path.glob("*.json")
    assert str(file) in again.source and "2x2-direct" in file.name and jax.__version__ in file.name


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"latency": 1}',
        '{"latency": -1, "bandwidth": 1}',
        '{"latency": Infinity, "bandwidth": Infinity}',
        '{"latency": 1e-9, "bandwidth": 5e-324}',
        '{"latency": 1' + 400 * "0" + ', "bandwidth": 1}',
        200_000 * "[",
    ],
    ids=range(10),
)
def test_a_useless_file_is_made_anew(mesh, tmp_path, monkeypatch, content):
    monkeypatch.setattr(calibrate, "_seconds", lambda mesh, transport, size: 1e-4 + size / 1e9)
    measured_link(mesh, "direct", tmp_path)
    (file,) = tmp_path.glob("*.json")
    file.write_text(content)
    link = measured_link(mesh, "direct", tmp_path)
    assert link.source == "measured"
    # One other rank hands out `size` bytes: 1 GB/s, and 100 us before the first.
    assert link.bandwidth == pytest.approx(1e9) and link.latency == pytest.approx(1e-4)
    assert json.loads(file.read_text())["bandwidth"] == link.bandwidth


def test_what_a_rank_gets_is_bounded_however_many_there_are(monkeypatch):
    """Virtual devices share one machine's memory: an exchange of 1 MiB from each of 64 to each would take 4 GiB."""
    handed_out = []
    monkeypatch.setattr(
        calibrate, "_seconds", lambda mesh, transport, size: handed_out.append(size) or size / 1e9
    )
    for world in (2, 8, 64):
        wide = SimpleNamespace(shape={DCP: world})
        assert measured_link(wide, "direct").bandwidth == pytest.approx((world - 1) * 1e9)
        assert world * handed_out[-1] <= 8 * 2**20
    assert handed_out[1::2] == [2**20, 2**20, 2**17]


def test_a_file_that_cannot_be_put_in_place_leaves_nothing_behind(mesh, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(calibrate, "_seconds", lambda mesh, transport, size: 1e-4 + size / 1e9)
    measured_link(mesh, "direct", tmp_path)
    (file,) = tmp_path.glob("*.json")
    file.unlink()
    file.mkdir()
    measured_link(mesh, "direct", tmp_path)
    assert list(tmp_path.iterdir()) == [file] and "the measured link is not kept" in caplog.text


def test_a_folder_that_cannot_be_written_costs_nothing_else(mesh, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(calibrate, "_seconds", lambda mesh, transport, size: 1e-4 + size / 1e9)
    (tmp_path / "file").write_text("")
    assert measured_link(mesh, "direct", tmp_path / "file" / "links").bandwidth > 0
    assert "the measured link is not kept" in caplog.text
    assert measured_link(mesh, "direct").source == "measured"
