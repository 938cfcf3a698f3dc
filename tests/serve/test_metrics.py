"""/metrics: what the server and the engine count, under vLLM's names."""

import re
from dataclasses import replace

import pytest
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families

from glm_dcp_jax.config import ConfigError, SpeculativeConfig
from glm_dcp_jax.engine.kv_connector import TransferStats
from glm_dcp_jax.engine.waiting import QueueFull
from glm_dcp_jax.serve.metric_table import METRICS
from glm_dcp_jax.serve.settings import ServerSettings
from glm_dcp_jax.transfer.loads import Load, LoadFailed
from glm_dcp_jax.transfer.offers import OfferStats
from glm_dcp_jax.transfer.producer import ProducerStats
from glm_dcp_jax.transfer.references import Reference
from glm_dcp_jax.transfer.transfer_stats import ConsumerStats

pytestmark = pytest.mark.anyio
OWN_LABELS = ("finished_reason", "kind", "le", "outcome", "path", "phase", "position", "reason")
OF_THE_PROCESS = ("process_", "python_")
COMPLETIONS = "/v1/completions"


SENT = ProducerStats(3, 4000, 96, OfferStats(1, 9, 4, 1, 2, 1, 5, {"used": 3, "unknown": 1}))


def load_of(*seconds: float, received: int, runs: int) -> Load:
    """A load that began, was opened, had all its pieces and their confirmation at these times."""
    load = Load("request", Reference("engine", "request", "127.0.0.1", 1, "0" * 32, 9, "tcp"), b"")
    load.times.begun, load.times.opened, load.times.fetched, load.times.confirmed = seconds
    load.received_bytes, load.runs = received, runs
    return load


async def scrape(client) -> dict[str, float]:
    """Samples by name and, where there is one, a label of their own; the labels all have in common are checked."""
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        if family.name.startswith(OF_THE_PROCESS):
            continue
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake" and sample.labels["engine"] == "0"
            own = next((sample.labels[name] for name in OWN_LABELS if name in sample.labels), None)
            found[sample.name.partition(":")[2] + (f"[{own}]" if own else "")] = sample.value
            if sample.name.endswith("cache_config_info"):
                assert sample.labels["block_size"] == "64" and sample.labels["num_gpu_blocks"] == "17"
    return found


async def test_metrics_count_requests_tokens_and_time(client):
    before = await scrape(client)
    assert before["request_success_total[stop]"] == 0 and before["cache_config_info"] == 1
    await client.post("/v1/completions", json={"prompt": [[5], [6, 7]], "n": 2, "max_tokens": 3})
    await client.post("/v1/completions", json={"prompt": [5, 1], "max_tokens": 9})
    await client.post("/v1/completions", json={"prompt": [129280]})  # refused: not counted
    after = await scrape(client)
    assert after["request_success_total[length]"] == 4 and after["request_success_total[stop]"] == 1
    assert after["request_success_total[abort]"] == after["request_success_total[error]"] == 0
    assert after["prompt_tokens_total"] == 5 and after["generation_tokens_total"] == 14
    assert after["time_to_first_token_seconds_count"] == after["e2e_request_latency_seconds_count"] == 3
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    assert after["kv_cache_usage_perc"] == 0.25
    assert after["request_prompt_tokens_sum"] == 5 and after["request_generation_tokens_sum"] == 14
    assert after["request_params_n_sum"] == 5 and after["request_params_max_tokens_sum"] == 15


async def test_metrics_say_what_decode_exchanged(client):
    found = await scrape(client)
    assert found["dcp_decode_steps_total[bulk]"] == 3 and found["dcp_decode_steps_total[queries]"] == 0
    assert found["dcp_received_bytes_total"] == 1000 and found["dcp_overflows_total"] == 1
    assert found["dcp_records_total"] == 60 and found["dcp_records_unique_ratio"] == 0.75


async def test_failures_are_counted(engine, client):
    engine.fails_after = 1
    await client.post("/v1/completions", json={"prompt": "a", "n": 2})
    assert (await scrape(client))["request_success_total[error]"] == 2


def exported(text: str) -> set[tuple[str, str]]:
    """(name, kind) of each metric, as Prometheus sees it."""
    families = [family for family in text_string_to_metric_families(text) if family.type != "unknown"]
    return {
        (family.name + ("_total" if family.type == "counter" else ""), family.type)
        for family in families
        if not family.name.startswith(OF_THE_PROCESS)
    }


@pytest.mark.parametrize("prefix", ["vllm:", "glm_dcp:", "my_"])
async def test_every_metric_is_in_the_table_and_no_other(engine, client_of, prefix):
    engine.config = replace(engine.config, speculative=SpeculativeConfig(2, "mtp"))
    engine.transfers = TransferStats(SENT, ConsumerStats().now())
    text = (await client_of(engine, metrics_prefix=prefix).get("/metrics")).text
    kinds = {"info": "gauge"}
    assert exported(text) == {
        (metric.exported(prefix) + metric.ending, kinds.get(metric.kind, metric.kind))
        for metric in METRICS.values()
    }


VLLM = """
    gauge num_requests_running, gauge num_requests_waiting, gauge num_requests_waiting_by_reason reason,
    gauge kv_cache_usage_perc, counter prefix_cache_queries_total, counter prefix_cache_hits_total,
    counter prompt_tokens_total, counter prompt_tokens_cached_total, counter generation_tokens_total,
    histogram iteration_tokens_total, counter num_preemptions_total, counter request_success_total finished_reason,
    histogram time_to_first_token_seconds, histogram inter_token_latency_seconds,
    histogram request_time_per_output_token_seconds, histogram e2e_request_latency_seconds,
    histogram request_queue_time_seconds, histogram request_prefill_time_seconds,
    histogram request_decode_time_seconds, histogram request_inference_time_seconds,
    histogram request_prompt_tokens, histogram request_generation_tokens,
    histogram request_max_num_generation_tokens, histogram request_params_n, histogram request_params_max_tokens,
    gauge cache_config_info, counter admission_rejections_total reason, counter spec_decode_num_drafts_total,
    counter spec_decode_num_draft_tokens_total, counter spec_decode_num_accepted_tokens_total,
    counter spec_decode_num_accepted_tokens_per_pos_total position, histogram nixl_xfer_time_seconds,
    histogram nixl_bytes_transferred, histogram nixl_num_descriptors, counter nixl_num_failed_transfers_total,
    counter nixl_num_failed_notifications_total, counter nixl_num_kv_expired_reqs_total,
    counter nixl_num_notifications_after_expiry_total
"""
"""What dashboards made for vLLM look at: kind, name, and the label that a metric has besides model_name and engine."""


async def test_dashboards_made_for_vllm_find_its_names_kinds_and_labels(engine, client):
    engine.config = replace(engine.config, speculative=SpeculativeConfig(2, "mtp"))
    engine.transfers = TransferStats(SENT, ConsumerStats().now())
    text = (await client.get("/metrics")).text
    assert {name for name, _ in exported(text)} >= {f"vllm:{entry.split()[1]}" for entry in VLLM.split(",")}
    kinds = dict(exported(text))
    labels = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = (
                re.sub("_(bucket|sum|count)$", "", sample.name) if family.type == "histogram" else sample.name
            )
            labels.setdefault(name, set()).update(sample.labels)
    for entry in VLLM.split(","):
        kind, name, *own = entry.split()
        assert kinds[f"vllm:{name}"] == kind
        if name != "cache_config_info":
            assert labels[f"vllm:{name}"] - {"le"} == {"model_name", "engine", *own}


async def test_the_process_has_its_metrics_too_and_nothing_says_when_it_was_created(client):
    text = (await client.get("/metrics")).text
    assert {"process_resident_memory_bytes", "python_info", "python_gc_collections_total"} <= {
        name for line in text.splitlines() if (name := re.split("[{ ]", line)[0])
    }
    assert "_created" not in text


async def test_buckets_are_vllms(client):
    text = (await client.get("/metrics")).text

    def bounds(name: str) -> list[float]:
        found = re.findall(rf'^vllm:{name}_bucket{{.*le="(.*?)".*}}', text, re.MULTILINE)
        return [float(bound) for bound in found[:-1]]

    assert bounds("time_to_first_token_seconds")[:5] == [0.001, 0.005, 0.01, 0.02, 0.04]
    assert bounds("time_to_first_token_seconds")[-3:] == [160, 640, 2560]
    assert bounds("inter_token_latency_seconds")[:4] == [0.01, 0.025, 0.05, 0.075]
    assert bounds("e2e_request_latency_seconds") == bounds("request_queue_time_seconds")
    assert bounds("request_queue_time_seconds")[:4] == [0.3, 0.5, 0.8, 1.0]
    assert bounds("iteration_tokens_total") == [1, *(2.0**power for power in range(3, 15))]
    assert bounds("request_prompt_tokens") == [1, 2, 5, 10, 20, 50]  # the fake model's length is 64


@pytest.mark.parametrize("prefix", ["", "vllm", "9:", "a b:", "vllm-", ":\n"])
def test_a_prefix_that_makes_no_names_is_refused(prefix):
    with pytest.raises(ConfigError, match="metrics_prefix must be letters"):
        ServerSettings(("m",), metrics_prefix=prefix)


async def test_a_requests_time_is_split_at_the_step_that_begins_it(client_of):
    client = client_of(FakeEngine(delay=0.02))
    await client.post(COMPLETIONS, json={"prompt": [5, 6], "n": 2, "max_tokens": 3})
    found = await scrape(client)
    queued, prefill, decode, inference = (
        found[f"request_{phase}_time_seconds_sum"] for phase in ("queue", "prefill", "decode", "inference")
    )
    assert 0 <= queued < 0.02 < prefill and decode > 0.03
    assert inference == pytest.approx(prefill + decode)
    assert found["time_to_first_token_seconds_sum"] == pytest.approx(queued + prefill)
    assert found["request_max_num_generation_tokens_sum"] == 3


async def test_steps_are_counted_by_their_tokens(client):
    await client.post(COMPLETIONS, json={"prompt": [5] * 9, "max_tokens": 3})
    found = await scrape(client)
    assert found["iteration_tokens_total_count"] == 3 and found["iteration_tokens_total_sum"] == 12
    assert found["iteration_tokens_total_bucket[1.0]"] == 2


async def test_requests_wait_for_room_or_for_something_else(engine, client):
    engine.waiting, engine.deferred = 5, 2
    found = await scrape(client)
    assert found["num_requests_waiting"] == 5
    assert found["num_requests_waiting_by_reason[capacity]"] == 3
    assert found["num_requests_waiting_by_reason[deferred]"] == 2


async def test_tokens_are_timed(client_of):
    client = client_of(FakeEngine(delay=0.02, burst=2))
    await client.post(COMPLETIONS, json={"prompt": [5, 6], "n": 2, "max_tokens": 6})
    found = await scrape(client)
    assert found["inter_token_latency_seconds_count"] == 2  # three steps
    decoding = found["request_decode_time_seconds_sum"]
    assert 0.03 < decoding == pytest.approx(found["inter_token_latency_seconds_sum"])
    assert found["request_time_per_output_token_seconds_sum"] == pytest.approx(decoding / 5)
    assert found["time_to_first_token_seconds_sum"] > 0.01


async def test_a_request_of_one_token_has_no_time_per_further_token(client):
    await client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1})
    found = await scrape(client)
    assert (
        found["request_time_per_output_token_seconds_count"]
        == found["inter_token_latency_seconds_count"]
        == 0
    )
    assert found["request_decode_time_seconds_count"] == 1


async def test_cached_prompt_tokens_and_the_prefix_cache_are_counted(engine, client):
    engine.cached_tokens = 2
    await client.post(COMPLETIONS, json={"prompt": [[5, 6, 7], [5, 6, 8]], "max_tokens": 4, "n": 2})
    found = await scrape(client)
    assert found["prompt_tokens_cached_total"] == 4
    assert found["prefix_cache_queries_total"] == 70 and found["prefix_cache_hits_total"] == 40
    assert found["prefix_cache_evictions_total"] == 2 and found["num_preemptions_total"] == 3


async def test_requests_that_find_the_queue_full_are_counted_as_nothing_else(engine, client):
    engine.full = QueueFull("max_num_queued_tokens", "full")
    await client.post(COMPLETIONS, json={"prompt": "a"})
    found = await scrape(client)
    assert found["admission_rejections_total[max_num_queued_tokens]"] == 1
    assert found["admission_rejections_total[max_num_queued_reqs]"] == 0
    assert found["e2e_request_latency_seconds_count"] == found["request_success_total[abort]"] == 0


async def test_drafts_are_counted_where_there_are_any(engine, client):
    assert not any(name.startswith("spec_decode") for name in await scrape(client))
    engine.config = replace(engine.config, speculative=SpeculativeConfig(2, "mtp"))
    found = await scrape(client)
    assert found["spec_decode_num_drafts_total"] == 6 and found["spec_decode_num_draft_tokens_total"] == 12
    assert found["spec_decode_num_accepted_tokens_total"] == 7
    positions = [found[f"spec_decode_num_accepted_tokens_per_pos_total[{place}]"] for place in (0, 1)]
    assert positions == [5, 2]


async def test_what_a_producer_hands_over_is_counted(engine, client):
    assert not any("kv_transfer" in name or "nixl" in name for name in await scrape(client))
    engine.transfers = TransferStats(SENT, None)
    found = await scrape(client)
    assert found["kv_transfer_held_requests"] == 1
    assert found["kv_transfer_sent_bytes_total"] == 4000 and found["kv_transfer_padding_bytes_total"] == 96
    outcomes = ("finished", "failed", "expired", "dropped")
    assert [found[f"kv_transfer_offers_total[{outcome}]"] for outcome in outcomes] == [4, 1, 2, 1]
    assert found["nixl_num_kv_expired_reqs_total"] == 2
    assert found["nixl_num_notifications_after_expiry_total"] == 5
    assert found["kv_transfer_refusals_total[used]"] == 3
    assert not any("xfer" in name for name in found)


async def test_what_a_consumer_takes_is_counted(engine, client):
    stats = ConsumerStats()
    stats.add(load_of(10.0, 10.1, 10.2, 10.3, received=100_000, runs=40), None)
    stats.add(load_of(20.0, 20.0, 20.0, 22.0, received=50_000, runs=2), None)
    stats.add(load_of(30.0, 0.0, 0.0, 0.0, received=700, runs=1), LoadFailed("expired", "late"))
    stats.add(load_of(30.0, 0.0, 0.0, 0.0, received=0, runs=0), LoadFailed("lost", "gone"))
    gone = load_of(40.0, 0.0, 0.0, 0.0, received=300, runs=1)
    gone.cancel()
    stats.add(gone, LoadFailed("cancelled", "gone"))
    stats.count_unheard()
    engine.transfers = TransferStats(None, stats.now())
    found = await scrape(client)
    assert found["nixl_xfer_time_seconds_count"] == 2
    assert found["nixl_xfer_time_seconds_sum"] == pytest.approx(2.3)
    buckets = [found[f"nixl_xfer_time_seconds_bucket[{bound}]"] for bound in ("0.2", "0.5", "5.0", "+Inf")]
    assert buckets == [0, 1, 2, 2]
    assert found["nixl_bytes_transferred_sum"] == 150_000 and found["nixl_num_descriptors_sum"] == 42
    assert found["nixl_num_failed_transfers_total"] == 2 and found["nixl_num_failed_notifications_total"] == 1
    assert found["kv_transfer_failures_total[expired]"] == found["kv_transfer_failures_total[lost]"] == 1
    assert found["kv_transfer_cancelled_total"] == 1 and found["kv_transfer_wasted_bytes_total"] == 1000
    assert found["kv_transfer_phase_seconds_total[confirm]"] == pytest.approx(2.1)
    assert "kv_transfer_held_requests" not in found
