"""docs/grafana/glm_dcp_jax.json asks for metrics that the server has, by labels that they have."""

import json
import re
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_metrics import SENT

from glm_dcp_jax.config import SpeculativeConfig
from glm_dcp_jax.engine.kv_connector import TransferStats
from glm_dcp_jax.transfer.transfer_stats import ConsumerStats

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "docs" / "grafana" / "glm_dcp_jax.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
WORDS = set(
    "sum max by le rate histogram_quantile ignoring group_left model_name label_values instance".split()
)


def queries() -> Iterator[tuple[str, str]]:
    """(PromQL, legend), with the variables as they are at first."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield (
                target["expr"].replace("${prefix:raw}", VARIABLES["prefix"]["query"]),
                target["legendFormat"],
            )


@pytest.fixture
async def labels(engine, client) -> dict[str, set[str]]:
    """Sample -> its labels, of a server that has everything."""
    engine.config = replace(engine.config, speculative=SpeculativeConfig(2, "mtp"))
    engine.transfers = TransferStats(SENT, ConsumerStats().now())
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


async def test_every_metric_of_every_query_is_exposed(labels):
    for query, _ in queries():
        names = re.findall(r"\b(\w+:\w+)\{", query)
        assert names and set(names) <= set(labels), query
        assert set(re.findall(r"[a-z_]\w+", re.sub(r'\w+:\w+|"[^"]*"|\[[^]]*\]', "", query))) <= WORDS | {
            *re.findall(r"by \((\w+)\)", query),
            *re.findall(r"ignoring\((\w+)\)", query),
        }


async def test_queries_group_by_labels_that_are_there_and_legends_name_them(labels):
    for query, legend in queries():
        for by, name in re.findall(r"by \((\w+)\) \(?(?:rate\()?(\w+:\w+)", query):
            assert by in labels[name], query
        shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
        assert shown <= {"instance", *re.findall(r"by \((\w+)\)", query)}, query


async def test_queries_and_variables_ask_the_chosen_source_for_the_chosen_model(labels):
    assert (
        VARIABLES["datasource"]["type"] == "datasource" and VARIABLES["datasource"]["query"] == "prometheus"
    )
    asked = VARIABLES["model_name"]["definition"].replace("${prefix:raw}", VARIABLES["prefix"]["query"])
    (name,) = re.findall(r"label_values\(([\w:]+), model_name\)", asked)
    assert "model_name" in labels[name]
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert target["expr"].count("{") - target["expr"].count("${") == target["expr"].count(
                '=~"$model_name"'
            )


def test_panels_lie_side_by_side_and_are_told_apart():
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_it_is_what_its_script_writes():
    script = runpy.run_path(str(ROOT / "scripts" / "make_dashboard.py"))
    written = (ROOT / "docs" / "grafana" / "glm_dcp_jax.json").read_text()
    assert written == script["document"](), "run .venv/bin/python scripts/make_dashboard.py"
