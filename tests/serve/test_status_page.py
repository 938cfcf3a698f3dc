"""The status page: what its JSON says, and what it looks like in a browser while the server works."""

import os
import re
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from browser import Browser, Tab, find
from fake_engine import FakeEngine
from live import live_server
from test_metrics import SENT, load_of

from glm_dcp_jax._version import __version__
from glm_dcp_jax.config import ParallelConfig, SpeculativeConfig
from glm_dcp_jax.engine.kv_connector import TransferStats
from glm_dcp_jax.transfer.transfer_stats import ConsumerStats

COMPLETIONS = "/v1/completions"
LATENCIES = ("time_to_first_token_seconds", "inter_token_latency_seconds")


class TestJson:
    pytestmark = pytest.mark.anyio

    async def test_it_says_what_is_served_on_what_and_how_it_goes(self, engine, client):
        engine.config = replace(engine.config, parallel=ParallelConfig(8, 4))
        engine.waiting, engine.deferred = 5, 2
        await client.post(COMPLETIONS, json={"prompt": [5, 6], "max_tokens": 3, "n": 2})
        found = (await client.get("/status.json")).json()
        assert (found["state"], found["model"], found["version"]) == ("ready", "fake", __version__)
        assert found["uptime_seconds"] >= 0
        layout = found["layout"]
        assert (layout["devices"], layout["device_kind"]) == (8, "cpu")
        assert (layout["tensor_parallel_size"], layout["decode_context_parallel_size"]) == (8, 4)
        assert (layout["cache_dtype"], layout["max_model_len"]) == ("bfloat16", 64)
        assert found["requests"] == {
            "running": 0,
            "waiting": 5,
            "deferred": 2,
            "finished": {"stop": 0, "length": 2, "abort": 0, "error": 0},
            "preemptions": 3,
        }
        assert found["tokens"] == {"prompt": 2, "generation": 6}
        assert found["cache"] == {
            "usage": 0.25,
            "tokens": 17 * 64 * 4,
            "prefix_queries": 70,
            "prefix_hits": 40,
        }
        assert found["decode"]["path"] == "auto" and found["decode"]["steps"] == {"bulk": 3}
        assert found["decode"]["unique_ratio"] == 0.75 and found["decode"]["overflows"] == 1
        assert found["drafts"] is found["transfers"] is None and found["compiles_after_warm_up"] == 0

    async def test_latencies_are_those_of_the_last_requests(self, client_of):
        client = client_of(FakeEngine(delay=0.01))
        empty = {"count": 0, "p50": None, "p99": None}
        assert (await client.get("/status.json")).json()["latency"] == dict.fromkeys(LATENCIES, empty)
        await client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 4})
        latency = (await client.get("/status.json")).json()["latency"]
        assert [latency[name]["count"] for name in LATENCIES] == [1, 3]
        for found in latency.values():
            assert 0.009 < found["p50"] <= found["p99"]

    async def test_drafts_and_transfers_where_there_are_any(self, engine, client):
        engine.config = replace(engine.config, speculative=SpeculativeConfig(2, "mtp"))
        received = ConsumerStats()
        received.add(load_of(10.0, 10.1, 10.2, 10.3, received=9, runs=4), None)
        engine.transfers = TransferStats(SENT, received.now())
        found = (await client.get("/status.json")).json()
        assert found["drafts"] == {"rounds": 6, "proposed": 12, "accepted": 7, "accepted_at": [5, 2]}
        assert found["transfers"] == {"arrived": 1, "failed": 0, "held": 1, "expired": 2}

    async def test_its_state_is_the_servers(self, engine, client):
        async def state() -> str:
            return (await client.get("/status.json")).json()["state"]

        engine.is_ready = False
        assert await state() == "warming_up"
        engine.is_ready = True
        assert await state() == "ready"
        engine.is_dead = True
        assert await state() == "dead"
        engine.is_dead = False
        client._transport.app.state.context.stopping.set()
        assert await state() == "draining"

    async def test_it_is_open_and_has_no_text_of_requests(self, engine, client_of):
        client = client_of(engine, api_keys=("key",))
        headers = {"Authorization": "Bearer key"}
        asked = {"prompt": "a secret", "max_tokens": 2, "user": "somebody"}
        await client.post(COMPLETIONS, json=asked, headers=headers)
        for path in ("/", "/status.json"):
            answer = await client.get(path)
            assert answer.status_code == 200
            assert "secret" not in answer.text and "somebody" not in answer.text
            assert "somewhere/fake" not in answer.text, (
                "where the model lies is the API's to tell, behind its key"
            )

    @pytest.mark.parametrize("path", ["/", "/docs"])
    async def test_pages_may_load_nothing_from_elsewhere(self, client, path):
        answer = await client.get(path)
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
        addresses = re.findall(r"(?:https?:)?//[\w.]+", answer.text)
        assert set(addresses) <= {"http://www.w3.org"}, "the name of SVG, which nobody asks for"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    command = find()
    if command is None:
        if os.environ.get("CHROMIUM_REQUIRED") == "1":
            pytest.fail("CHROMIUM_REQUIRED is 1, and no Chromium is installed")
        pytest.skip("needs Chromium (apt-get install chromium); CHROMIUM_REQUIRED=1 makes this a failure")
    running = Browser(command, tmp_path_factory.mktemp("profile"))
    yield running
    running.close()


def about(text: str) -> float:
    """A number of the page, without its unit."""
    return float(re.search(r"[\d,.]+", text)[0].replace(",", ""))


class TestPage:
    def test_values_appear_and_follow_the_server(self, browser):
        engine = FakeEngine()
        engine.config = replace(engine.config, speculative=SpeculativeConfig(2, "mtp"))
        engine.is_ready = False
        with live_server(engine) as url:
            tab = browser.open(url + "/", haste=4)
            tab.wait_for("state", "warming up")
            assert "503" in tab.text("notice") and tab.text("model") == "fake"
            assert [tab.text(name) for name in ("running", "waiting", "ttft")] == ["0", "0", "–"]
            assert (tab.text("usage"), tab.text("hits"), tab.text("path")) == ("25.0 %", "57.1 %", "bulk")
            assert tab.text("drafts").split("\n") == ["1", "83.3 %", "2", "33.3 %"]
            assert "nothing to exchange" in tab.text("path-asked") and "1 × cpu" in tab.text("layout")

            engine.is_ready = True
            engine.waiting, engine.deferred = 5, 2
            for _ in range(3):
                httpx.post(url + COMPLETIONS, json={"prompt": [5] * 20, "max_tokens": 40})
            tab.wait_for("counts", lambda text: "Ended: length\n3\n" in text)
            assert (tab.text("state"), tab.text("notice")) == ("ready", "")
            tab.wait_for("waiting", "5")
            assert tab.text("waiting-for") == "3 for room, 2 for a prompt or cache"
            assert re.fullmatch(r"[\d.]+\sms", tab.text("ttft")) and re.fullmatch(
                r"[\d.]+\sms", tab.text("itl")
            )
            tab.wait_for("totals", lambda text: text.startswith("120 generated and 60 "))
            peak = about(tab.text("peak"))
            assert peak > 60, "the chart saw 120 tokens in about a second"
            tab.wait_for("generation-rate", "0")
            assert "L" in tab.value("document.getElementById('generation-line').getAttribute('d')")

            engine.is_dead = True
            tab.wait_for("state", "dead")
            assert "must be restarted" in tab.text("notice")
            assert tab.complaints == []
            assert set(tab.requested) == {url + "/", url + "/status.json"}
        tab.wait_for("state", "no answer")
        assert "has not answered since" in tab.text("notice")

    def test_the_api_is_shown_without_anything_from_elsewhere(self, browser):
        with live_server(FakeEngine()) as url:
            tab = browser.open(url + "/docs")
            tab.wait_for("title", lambda text: text.startswith("glm_dcp_jax"))
            described = httpx.get(url + "/openapi.json").json()["paths"]
            text = tab.value("document.getElementById('operations').textContent")
            assert all(path in text for path in described) and "max_completion_tokens" in text
            assert tab.complaints == []
            assert set(tab.requested) == {url + "/docs", url + "/openapi.json"}

    def test_names_are_text_and_not_markup(self, browser):
        name = '<img src=x onerror="document.title = 1"><b>m</b>'
        with live_server(FakeEngine(), served_model_names=(name,)) as url:
            tab = browser.open(url + "/")
            tab.wait_for("model", name)
            assert tab.value("document.querySelectorAll('img, h1 *').length") == 0
            assert tab.value("document.title") == f"ready · {name}" and tab.complaints == []

    def test_it_fits_a_phone_in_both_colour_schemes(self, browser):
        def looks(tab: Tab, scheme: str) -> tuple[str, str]:
            tab.call(
                "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
            )
            return tuple(
                tab.value(f"getComputedStyle(document.body).{part}") for part in ("backgroundColor", "color")
            )

        with live_server(FakeEngine(), served_model_names=("organisation/" + "long" * 30,)) as url:
            tab = browser.open(url + "/", width=320, height=640, deviceScaleFactor=2, mobile=True)
            tab.wait_for("state", "ready")
            assert tab.value("document.documentElement.scrollWidth") == 320
            light, dark = looks(tab, "light"), looks(tab, "dark")
            assert light[0] != dark[0] and light[1] != dark[1]
