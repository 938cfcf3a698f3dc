"""What decode steps moved is counted, whatever the path, and read back exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import generate, random_prompts, tiny_llm, write_tiny

from glm_dcp_jax.engine.exchange_stats import ExchangeStats, ExchangeTotals
from glm_dcp_jax.model import group
from glm_dcp_jax.parallel.mesh import DCP

PROMPTS = random_prompts(30)
TOPK, STEPS, FULL_LAYERS = 8, 7, 1
"""Of the tiny model; 8 tokens of output are one of prefill and 7 of decode."""


@pytest.mark.parametrize("path", ["queries", pytest.param("records", marks=pytest.mark.slow), "bulk"])
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


@pytest.mark.slow
def test_without_dcp_nothing_is_exchanged_and_nothing_counted(tmp_path, devices):
    devices(2)
    llm = tiny_llm(write_tiny(tmp_path), tensor_parallel_size=2)
    generate(llm, PROMPTS)
    assert llm.engine.stats().exchanges == ExchangeTotals()


def test_reading_in_between_loses_nothing():
    stats = ExchangeStats()
    for step in range(40):
        stats.add("bulk" if step % 2 else "records", 10, (step, 1, 0), np.zeros(2, np.uint32))
        if step == 20:
            assert stats.totals().entries == sum(range(21))
    totals = stats.totals()
    assert totals.steps == {"records": 20, "bulk": 20} and totals.received == 400
    assert (totals.entries, totals.records) == (sum(range(40)), 40)
    assert (totals.compared, totals.diverged) == (2, 0)


def test_devices_that_select_differently_raise_the_alarm(caplog):
    stats = ExchangeStats()
    for step in range(33):
        stats.add("records", 0, (0, 0, 0), np.array([7, 7, 7 + (step == 32)], np.uint32))
    totals = stats.totals()
    assert (totals.compared, totals.diverged) == (2, 1)
    assert "devices selected different positions (hashes [7, 7, 8])" in caplog.text


def test_a_rank_that_selects_otherwise_is_found_in_a_real_step(tmp_path, devices, monkeypatch):
    """One rank's index scores are off: its hash differs from the others'."""
    devices(2)

    def select(q, head_weights, *rest, real=group.select):
        wrong = jax.lax.axis_index(DCP) == 1
        return real(q, jnp.where(wrong, -head_weights, head_weights), *rest)

    monkeypatch.setattr(group, "select", select)
    llm = tiny_llm(write_tiny(tmp_path), tensor_parallel_size=2, decode_context_parallel_size=2)
    generate(llm, PROMPTS)
    totals = llm.engine.stats().exchanges
    assert totals.compared == totals.diverged == 1
