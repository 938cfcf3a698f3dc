"""What decode steps moved is counted, whatever the path, and read back exactly."""

import pytest
from tiny import generate, random_prompts, tiny_llm, write_tiny

from glm_dcp_jax.engine.exchange_stats import ExchangeStats

PROMPTS = random_prompts(30)
TOPK, STEPS, FULL_LAYERS = 8, 7, 1
"""Of the tiny model; 8 tokens of output are one of prefill and 7 of decode."""


@pytest.mark.parametrize("path", ["queries", "records", "bulk"])
def test_steps_and_records_of_a_run(path, tmp_path, devices):
    devices(2)
    llm = tiny_llm(
        write_tiny(tmp_path), tensor_parallel_size=2, decode_context_parallel_size=2, dcp_decode_path=path
    )
    generate(llm, PROMPTS)
    totals = llm.engine.stats().exchanges
    assert totals.steps == {path: STEPS}
    if path == "queries":
        assert (totals.entries, totals.records, totals.overflows) == (0, 0, 0)
    else:
        # There are always more than TOPK tokens to select from; at most one of a selection is the row itself.
        most = STEPS * FULL_LAYERS * TOPK
        assert most - STEPS * FULL_LAYERS <= totals.entries <= most
        assert totals.records == totals.entries and totals.unique_ratio == 1.0
    assert totals.received % STEPS == 0 and totals.received > 0


def test_reading_in_between_loses_nothing():
    stats = ExchangeStats()
    for step in range(40):
        stats.add("bulk" if step % 2 else "records", 10, (step, 1, 0))
        if step == 20:
            assert stats.totals().entries == sum(range(21))
    totals = stats.totals()
    assert totals.steps == {"records": 20, "bulk": 20} and totals.received == 400
    assert (totals.entries, totals.records) == (sum(range(40)), 40)
