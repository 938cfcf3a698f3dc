"""A step that fails takes the pools with it: nobody is given what they held, not even by the same pages."""

import sys
from pathlib import Path

import pytest

from glm_dcp_jax import LLM, SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "engine"))

from tiny import GREEDY, PROMPT, generate, only, tiny_llm, write_tiny

KEEP = SamplingParams(
    temperature=0, max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}}
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def producer(directory):
    llm = tiny_llm(directory, kv_transfer_config={"kv_connector": "inproc", "kv_role": "kv_producer"})
    yield llm
    llm.engine.close()


def fail_a_step(llm: LLM) -> None:
    """As when memory runs out: the step has taken the pools by donation, and gives none back."""

    def fail(*_: object) -> None:
        for pool in llm.engine.runner.pools[0]:
            pool.delete()
        raise RuntimeError("out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.runner.steps, "get", lambda *_: fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            generate(llm, [[7, 8, 9]])


def test_what_was_held_for_others_is_held_no_more(producer):
    before = only(producer, PROMPT).token_ids
    (kept,) = generate(producer, [PROMPT], KEEP)
    assert producer.engine.connector.usage()["held"] == 1
    fail_a_step(producer)
    assert producer.engine.connector.usage()["held"] == 0
    assert not producer.engine.connector.release(kept.kv_transfer_params)
    producer.engine.step()
    assert producer.engine.scheduler.allocator.num_used == 0
    (again,) = generate(producer, [PROMPT], GREEDY)
    assert again.outputs[0].token_ids == before and again.num_cached_tokens == 0, (
        "zeros were found in the cache"
    )


def test_a_read_that_is_under_way_then_gets_no_zeros(directory, producer):
    (kept,) = generate(producer, [PROMPT], KEEP)
    packing = producer.engine.connector._producer
    pack = packing._pack

    def after_a_failure(*arguments):
        fail_a_step(producer)
        return pack(*arguments)

    packing._pack = after_a_failure
    consumer = tiny_llm(directory, kv_transfer_config={"kv_connector": "inproc", "kv_role": "kv_consumer"})
    params = SamplingParams(temperature=0, extra_args={"kv_transfer_params": kept.kv_transfer_params})
    (output,) = generate(consumer, [PROMPT], params)
    assert output.outputs[0].finish_reason == "error" and output.outputs[0].token_ids == []
    assert consumer.engine.stats().transfers.received.failed == {"dropped": 1}
    consumer.engine.close()
