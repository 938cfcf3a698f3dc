"""What each path is modelled to wait for, against sums done by hand for GLM-5.2."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.config import ModelConfig
from glm_dcp_jax.parallel.attention import AttentionSettings
from glm_dcp_jax.parallel.link import NVLINK, PCIE5, Link, assumed_link, memory_bandwidth
from glm_dcp_jax.parallel.policy import DecodePolicy, as_table

sys.path.append(str(Path(__file__).parents[1] / "config"))

from published import GLM_5_2

MODEL = ModelConfig.from_hf(GLM_5_2)
LAYERS, FULL, LONG = 78, 21, 32_768


def policy(link: Link = PCIE5, world: int = 4, memory: float = 1.5e12, **changes) -> DecodePolicy:
    settings = AttentionSettings(
        layout=Layout(64, world),
        record=RecordFormat.sized("nvfp4_ds_mla", 512, 64, 128),
        comm_backend="a2a",
        scale=1 / 16,
        latent_width=512,
        index_topk=2048,
    )
    return DecodePolicy(MODEL, replace(settings, **changes), 64 // world, world, 2, link, memory)


class TestQueries:
    def test_bytes_of_a_row_and_layer(self):
        """3 other ranks, 16 heads: queries of 576, partial outputs of 512, bfloat16; an LSE of 4 bytes."""
        found = policy().estimates(1, 1, LONG)[0]
        assert found.received == LAYERS * (3 * 16 * 576 * 2 + 3 * 16 * 512 * 2 + 3 * 16 * 4)
        assert found.blocking == 2 * LAYERS and found.hidden == 0

    def test_ag_rs_gathers_all_lses_and_sums_in_float32(self):
        found = policy(comm_backend="ag_rs").estimates(1, 1, LONG)[0]
        assert found.received == LAYERS * (3 * 16 * 576 * 2 + 3 * 16 * 512 * 4 + 3 * 16 * 4 * 4)
        assert found.blocking == 3 * LAYERS

    def test_projected_outputs_are_half_as_wide(self):
        plain, projected = (policy(project_rows=rows).estimates(8, 1, LONG)[0] for rows in (9, 8))
        assert plain.received - projected.received == LAYERS * 8 * 3 * 16 * 256 * 2

    def test_the_wait_is_latencies_and_bytes(self):
        found = policy(Link(1e-3, 1e9, "test")).estimates(1, 1, LONG)[0]
        assert found.waited == pytest.approx(2 * LAYERS * 1e-3 + found.received / 1e9)

    @pytest.mark.parametrize(
        ("link", "memory", "rows"), [(PCIE5, 0.85 * 1.79e12, 17), (NVLINK, 0.85 * 4.8e12, 51)]
    )
    def test_from_how_many_rows_projecting_first_pays(self, link, memory, rows):
        """512 * 256 * 2 bytes of weights a head, read at the memory's speed, for 256 * 2 bytes a head and row."""
        assert policy(link, memory=memory).paying_rows == rows


class TestRecords:
    def test_bytes_of_a_request_and_layer(self):
        """640 records of each of 3 other ranks: 512 on average, and room for skew."""
        _, records, bulk = policy().estimates(1, 1, LONG)
        assert records.received == bulk.received == LAYERS * 3 * 640 * 432
        assert (records.blocking, records.hidden) == (LAYERS, 0)

    def test_bulk_blocks_in_full_layers_alone(self):
        bulk = policy().estimates(1, 1, LONG)[2]
        assert (bulk.blocking, bulk.hidden) == (FULL, LAYERS - FULL)

    def test_what_does_not_fit_a_window_is_waited_for(self):
        """No window: every exchange waits as in `records`. Endless windows: those of Full layers alone."""
        _, records, bulk = policy(memory=float("inf")).estimates(2, 4, LONG)
        assert bulk.waited == pytest.approx(records.waited) and bulk.hidden == 0
        _, records, bulk = policy(memory=1.0).estimates(2, 4, LONG)
        assert bulk.waited == pytest.approx(records.waited * FULL / LAYERS)

    def test_experts_in_fewer_bytes_are_read_sooner(self):
        """A window is as long as the reading of a feed-forward: 8 of 256 experts and a shared one, or a dense one."""
        narrow = replace(policy(), expert_bytes=0.5625, dense_bytes=1.0)
        width = 3 * 6144 / 4 / 1.5e12
        assert narrow._window(True, 1) == pytest.approx(9 * 2048 * 0.5625 * width)
        assert narrow._window(False, 1) == pytest.approx(12_288 * width)

    def test_a_small_exchange_memory_does_not_make_a_path_look_cheap(self):
        """What goes in rounds still travels."""
        small = policy(exchange_bytes=10_000).estimates(8, 4, LONG)[1]
        assert small.received > 0.9 * LAYERS * 3 * 8 * 2048 * 1.75 / 4 * 432

    def test_each_round_waits_for_a_latency(self):
        """40 records at once, a third of them in the fast exchange: ceil((512 - 13) / 40) rounds of the rest."""
        small = policy(exchange_bytes=40 * 4 * 432)
        assert policy().rounds(1, 1, LONG) == 0 and small.rounds(1, 1, LONG) == 13
        for fine, coarse in zip(
            small.estimates(1, 1, LONG)[1:], policy().estimates(1, 1, LONG)[1:], strict=True
        ):
            assert fine.waited > coarse.waited


class TestChoice:
    def test_what_is_asked_for_is_taken(self):
        for path in ("queries", "records", "bulk"):
            assert policy().choose(path, 1, 1, LONG).path == path

    def test_auto_takes_the_shortest_wait(self):
        for requests in (1, 4, 64):
            for link in (PCIE5, NVLINK):
                found = policy(link)
                least = min(estimate.waited for estimate in found.estimates(requests, 1, LONG))
                assert found.choose("auto", requests, 1, LONG).waited == least

    def test_latency_speaks_for_bulk_and_bytes_for_queries(self):
        assert policy(Link(1e-3, 1e12, "test")).choose("auto", 1, 1, LONG).path == "bulk"
        assert policy(Link(1e-9, 1e9, "test")).choose("auto", 1, 1, LONG).path == "queries"

    def test_the_table_says_what_was_asked_for(self):
        assert as_table(policy(), "queries", [(4, 1, LONG)]).endswith("queries (asked for)")

    def test_the_table_says_all_of_it(self):
        found = policy()
        header, line = as_table(found, "auto", [(4, 1, LONG)]).splitlines()
        assert header.split() == ["requests", "rows", "context", "queries", "records", "bulk", "taken"]
        requests, rows, context, *waits, taken = line.replace(" ms", "").split()
        assert (requests, rows, context) == ("4", "1", str(4 * LONG))
        assert [float(wait) for wait in waits] == [
            pytest.approx(1e3 * estimate.waited, abs=0.005) for estimate in found.estimates(4, 1, LONG)
        ]
        assert taken == found.choose("auto", 4, 1, LONG).path


def test_links_and_memories_of_devices():
    assert assumed_link("gpu", "NVIDIA H200") is NVLINK
    assert assumed_link("gpu", "NVIDIA RTX PRO 6000 Blackwell Server Edition") is PCIE5
    assert memory_bandwidth("gpu", "NVIDIA H200") == pytest.approx(0.85 * 4.8e12)
    assert memory_bandwidth("gpu", "NVIDIA L4") == memory_bandwidth("gpu", "NVIDIA RTX PRO 6000")
    assert memory_bandwidth("cpu", "cpu") == float("inf")
