"""Whatever requests come together, each gets what it gets alone, and nothing is held at the end."""

import os
import time

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from hypothesis.strategies import integers
from soak import NumpyReference, Soak
from tiny import CONFIG, drafting_tensors, tiny_llm

SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", "300"))
SMALL = {"num_gpu_blocks_override": 40, "max_num_seqs": 4}
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}


@pytest.fixture(scope="module")
def reference() -> NumpyReference:
    return NumpyReference(CONFIG, drafting_tensors(CONFIG))


@pytest.fixture(scope="module")
def alone(drafting):
    return tiny_llm(drafting, async_scheduling=False, enable_prefix_caching=False)


def test_any_order_of_events(drafting, alone, reference):
    loaded = tiny_llm(drafting, **SMALL | {"num_gpu_blocks_override": 26}, **DRAFTS)
    ended: list[int] = []

    class Events(RuleBasedStateMachine):
        @initialize(seed=integers(0, 10**6))
        def begin(self, seed):
            self.soak = Soak(loaded, alone, reference, seed)
            for _ in range(8):
                self.soak.arrive()

        @rule(count=integers(1, 3))
        def arrive(self, count):
            for _ in range(count):
                self.soak.arrive()

        @rule(count=integers(1, 6))
        def step(self, count):
            for _ in range(count):
                self.soak.step()

        @rule()
        def abort(self):
            self.soak.abort()

        @rule()
        def forget(self):
            self.soak.forget()

        @invariant()
        def the_books_agree(self):
            if hasattr(self, "soak"):
                self.soak.check()

        def teardown(self):
            if hasattr(self, "soak"):
                self.soak.drain()
                ended.append(self.soak.ended)
                assert self.soak.excused <= 0.02 * self.soak.ended + 1

    run_state_machine_as_test(
        Events,
        settings=settings(
            max_examples=4,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert sum(ended) > 15, f"outputs compared: {ended}"
    assert loaded.engine.stats().preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "dcp", "more"),
    [
        (1, 1, DRAFTS),
        (4, 4, DRAFTS | {"dcp_decode_path": "bulk", "scheduling_policy": "priority"}),
        (4, 2, {"dcp_decode_path": "records", "long_prefill_token_threshold": 16}),
    ],
    ids=["one device with drafts", "4 ranks with drafts and priorities", "2 replicas of 2 ranks"],
)
def test_minutes_of_load(drafting, alone, reference, devices, tp, dcp, more):
    """SOAK_SECONDS of it, in turns of arrivals and steps."""
    devices(tp)
    pages = 40 // dcp  # of dcp * 4 tokens: less than four of the longest requests take
    sizes = {
        "tensor_parallel_size": tp,
        "decode_context_parallel_size": dcp,
        "num_gpu_blocks_override": pages,
    }
    soak = Soak(tiny_llm(drafting, **SMALL | sizes | more), alone, reference, seed=tp + dcp)
    end = time.monotonic() + SOAK_SECONDS
    while time.monotonic() < end:
        event = soak.random.random()
        if event < 0.3 and len(soak.live) < 30:
            soak.arrive()
        elif event < 0.33:
            soak.abort()
        elif event < 0.335:
            soak.forget()
        else:
            soak.step()
        soak.check()
    soak.drain()
    print(soak.summary())
    assert soak.excused < 0.02 * soak.ended, soak.summary()
    stats = soak.engine.engine.stats()
    assert stats.preemptions and soak.hits and stats.prefix_cache.evictions and soak.aborted, soak.summary()
