"""Which layers are Full, which have experts, and how share groups line up into runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import GLM_5, GLM_5_2

from glm_dcp_jax.config import ConfigError, ModelConfig, Run
from glm_dcp_jax.config.schedule import (
    SHORTEST_SCAN,
    full_layers,
    runs_of,
    segments_of,
    sparse_layers,
    stages_of,
)


def letters(full: tuple[bool, ...]) -> str:
    return "".join("FS"[not is_full] for is_full in full)


def full(num_layers: int, **config) -> str:
    return letters(full_layers(config, num_layers))


class TestFullLayers:
    def test_glm_5_2_by_its_list_and_by_its_rule(self):
        by_rule = GLM_5_2 | {"indexer_types": None}
        for config in (GLM_5_2, by_rule):
            chosen = [layer for layer, is_full in enumerate(full_layers(config, 78)) if is_full]
            assert chosen == [0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74]

    @pytest.mark.parametrize(
        "config",
        [
            {},
            {"index_topk_freq": None, "index_skip_topk_offset": None},
            {"indexer_types": None, "index_topk_pattern": None},
            {"index_topk_freq": 1},
            {"index_topk_freq": 0},
            {"index_skip_topk_offset": 5},
        ],
        ids=str,
    )
    def test_without_a_schedule_every_layer_is_full(self, config):
        assert full(7, **config) == "FFFFFFF"

    def test_frequency_and_offset(self):
        # From offset - 1 on, every freq-th layer is full; all before it are.
        assert full(8, index_topk_freq=3, index_skip_topk_offset=2) == "FFSSFSSF"
        assert full(8, index_topk_freq=4, index_skip_topk_offset=1) == "FSSSFSSS"
        assert full(8, index_topk_freq=4, index_skip_topk_offset=7) == "FFFFFFFS"
        assert full(8, index_topk_freq=3) == "FFSSFSSF"  # the offset is 2 unless given
        assert full(8, index_topk_freq=3, index_skip_topk_offset=None) == "FFSSFSSF"

    @pytest.mark.parametrize(
        "pattern", ["FSSF", "fssf", ["F", "S", "S", "F"], ["full", "shared", "shared", "full"]]
    )
    def test_a_pattern_is_a_string_or_a_list(self, pattern):
        assert full(4, index_topk_pattern=pattern) == "FSSF"

    def test_the_list_wins_over_the_pattern_and_that_over_the_frequency(self):
        types = ["full", "shared", "full", "shared"]
        rule = {"index_topk_freq": 4, "index_skip_topk_offset": 1}
        assert full(4, **rule) == "FSSS"
        assert full(4, **rule, index_topk_pattern="FFSS") == "FFSS"
        assert full(4, **rule, index_topk_pattern="FFSS", indexer_types=types) == "FSFS"
        assert full(4, **rule, index_topk_pattern=None, indexer_types=types) == "FSFS"

    @pytest.mark.parametrize(
        "config",
        [
            {"indexer_types": ["shared", "full", "full"]},
            {"index_topk_pattern": "SFF"},
            {"index_topk_freq": 2, "index_skip_topk_offset": 0},
        ],
        ids=str,
    )
    def test_layer_0_cannot_share(self, config):
        with pytest.raises(ConfigError, match="layer 0 is marked shared"):
            full_layers(config, 3)

    @pytest.mark.parametrize("field", ["indexer_types", "index_topk_pattern"])
    @pytest.mark.parametrize("length", [0, 2, 4])
    def test_wrong_lengths_are_refused(self, field, length):
        with pytest.raises(ConfigError, match=f"{field} has {length} entries, but num_hidden_layers is 3"):
            full_layers({field: ["full"] * length}, 3)

    @pytest.mark.parametrize("field", ["indexer_types", "index_topk_pattern"])
    def test_unknown_words_are_listed(self, field):
        with pytest.raises(
            ConfigError, match=rf"{field} holds \['X', 'half'\]; allowed are full, shared, F and S"
        ):
            full_layers({field: ["full", "half", "X"]}, 3)


class TestSparseLayers:
    def test_glm_5_2_and_glm_5_have_three_dense_layers(self):
        for config in (GLM_5_2, GLM_5):
            assert sparse_layers(config, 78) == (False,) * 3 + (True,) * 75

    @pytest.mark.parametrize(
        ("config", "kinds"),
        [
            ({}, "DDDMMM"),
            ({"first_k_dense_replace": None, "moe_layer_freq": None}, "DDDMMM"),
            ({"first_k_dense_replace": 0}, "MMMMMM"),
            ({"first_k_dense_replace": 9}, "DDDDDD"),
            ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, "DDMDMD"),
            ({"mlp_layer_types": ["sparse", "dense"] * 3, "first_k_dense_replace": 2}, "MDMDMD"),
        ],
        ids=str,
    )
    def test_the_list_wins_over_the_count_of_dense_layers(self, config, kinds):
        assert "".join("DM"[sparse] for sparse in sparse_layers(config, 6)) == kinds

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"mlp_layer_types": ["dense"] * 5}, "mlp_layer_types has 5 entries, but num_hidden_layers is 6"),
            (
                {"mlp_layer_types": ["dense"] * 5 + ["moe"]},
                r"mlp_layer_types holds \['moe'\]; allowed are dense",
            ),
            (
                {"first_k_dense_replace": -1},
                "first_k_dense_replace must be an integer of at least 0, but is -1",
            ),
            ({"moe_layer_freq": 0}, "moe_layer_freq must be a positive integer, but is 0"),
        ],
        ids=str,
    )
    def test_what_cannot_be_is_refused(self, config, message):
        with pytest.raises(ConfigError, match=message):
            sparse_layers(config, 6)


class TestRuns:
    def test_glm_5_2_is_three_runs(self):
        dense, mixed, sparse = ModelConfig.from_hf(GLM_5_2).runs
        assert dense == Run(first_layer=0, first_full=0, num_groups=2, sparse=(False,))
        assert mixed == Run(first_layer=2, first_full=2, num_groups=1, sparse=(False, True, True, True))
        assert sparse == Run(first_layer=6, first_full=3, num_groups=18, sparse=(True, True, True, True))

    def test_glm_5_is_two_runs_of_lone_full_layers(self):
        assert ModelConfig.from_hf(GLM_5).runs == (Run(0, 0, 3, (False,)), Run(3, 3, 75, (True,)))

    def test_groups_of_one_length_but_other_feed_forwards_are_runs_of_their_own(self):
        full = [letter == "F" for letter in "FSFSFSF"]
        sparse = [kind == "M" for kind in "DMDMMMM"]
        assert runs_of(full, sparse) == (
            Run(0, 0, 2, (False, True)),
            Run(4, 2, 1, (True, True)),
            Run(6, 3, 1, (True,)),
        )

    def test_equal_groups_that_are_not_neighbours_stay_apart(self):
        assert [run.num_groups for run in runs_of([True, True, False, True], [True] * 4)] == [1, 1, 1]

    @given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
    def test_runs_hold_every_layer_once_in_order_and_are_as_long_as_can_be(self, layers):
        full = [True] + [is_full for is_full, _ in layers[1:]]
        sparse = [is_sparse for _, is_sparse in layers]
        runs = runs_of(full, sparse)
        laid_out, fulls = [], 0
        for run in runs:
            assert (run.first_layer, run.first_full) == (len(laid_out), fulls)
            for group in range(run.num_groups):
                for member in range(run.group_size):
                    layer = run.layer(group, member)
                    laid_out.append(layer)
                    assert (full[layer], sparse[layer]) == (member == 0, run.sparse[member])
                fulls += 1
        assert laid_out == list(range(len(layers))) and fulls == sum(full)
        assert all(before.sparse != after.sparse for before, after in zip(runs, runs[1:], strict=False))

    @given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=6))
    def test_stages_are_the_runs_with_short_ones_cut_into_groups(self, sizes):
        full = [member == 0 for size, groups in sizes for _ in range(groups) for member in range(size)]
        runs = runs_of(full, [True] * len(full))
        stages = stages_of(runs)
        scanned = [run for run in runs if run.num_groups >= SHORTEST_SCAN]
        assert [stage for stage in stages if stage.num_groups > 1] == scanned
        assert sum(stage.num_groups for stage in stages) == sum(full)
        layer = fulls = 0
        for stage in stages:
            assert (stage.first_layer, stage.first_full) == (layer, fulls)
            layer, fulls = stage.layer(stage.num_groups, 0), fulls + stage.num_groups
        assert layer == len(full)

    def test_stages_of_glm_5_2(self):
        assert [(stage.first_layer, stage.num_groups) for stage in ModelConfig.from_hf(GLM_5_2).stages] == [
            (0, 1),
            (1, 1),
            (2, 1),
            (6, 18),
        ]


class TestSegments:
    RUNS = ModelConfig.from_hf(GLM_5_2).runs

    @pytest.mark.parametrize("count", [1, 2, 3, 21])
    def test_they_are_all_groups_in_order(self, count):
        segments = segments_of(self.RUNS, count)
        assert len(segments) == count
        layers = [
            run.layer(group, member)
            for segment in segments
            for run in segment
            for group in range(run.num_groups)
            for member in range(run.group_size)
        ]
        assert layers == list(range(78))
        fulls = [
            run.first_full + group
            for segment in segments
            for run in segment
            for group in range(run.num_groups)
        ]
        assert fulls == list(range(21))

    def test_one_is_the_whole_network(self):
        assert segments_of(self.RUNS, 1) == (stages_of(self.RUNS),)

    def test_they_are_cut_where_layers_divide_most_evenly(self):
        """38 and 40 layers: a group of 4 is not cut."""
        first, second = segments_of(self.RUNS, 2)
        assert second[0].first_layer == 38 and [run.num_groups for run in second] == [10]
        assert [run.num_groups for run in first] == [1, 1, 1, 8]

    @pytest.mark.parametrize("count", [0, 22])
    def test_more_than_there_are_groups_is_refused(self, count):
        with pytest.raises(ConfigError, match=f"21 share groups do not make {count} segments; use 1 to 21"):
            segments_of(self.RUNS, count)
