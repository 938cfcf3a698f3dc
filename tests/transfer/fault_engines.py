"""A producer and consumers in processes of their own, with short leases and deadlines, for tests of faults."""

import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from between import Between
from engine_process import EngineProcess

sys.path.append(str(Path(__file__).parents[1] / "engine"))

from tiny import SETTINGS, random_prompts

LEASE, HANDSHAKE, TRANSFER = 3.0, 4.0, 6.0
PROMPT, NEW_TOKENS = 70, 6
_seeds = itertools.count(1000)

Result = dict[str, Any]


def settings(role: str, policy: str = "fail", **changes: Any) -> dict[str, Any]:
    """Of an engine; pieces of a few tokens. changes: of its flags, `kv` of its kv_transfer_config."""
    kv = {
        "kv_connector": "tcp",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "piece_bytes": 4096,
            "lease_seconds": LEASE,
            "handshake_seconds": HANDSHAKE,
            "transfer_seconds": TRANSFER,
        },
    } | changes.pop("kv", {})
    layout = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2} if role == "kv_producer" else {}
    blocks = {"block_size": 4 if role == "kv_producer" else 8, "num_gpu_blocks_override": 60}
    return SETTINGS | layout | blocks | changes | {"kv_transfer_config": kv}


def new_prompt(length: int = PROMPT) -> list[int]:
    """One that nobody has seen."""
    return random_prompts(length, seed=next(_seeds))[0]


@dataclass
class Engines:
    """A producer, a consumer that fails requests whose cache does not arrive, and one that computes it then."""

    producer: EngineProcess
    failing: EngineProcess
    recomputing: EngineProcess
    between: Between = field(default_factory=Between)

    @staticmethod
    def start(model: Path, **failing: Any) -> "Engines":
        """All at once. failing: further settings of that consumer."""
        started = [
            EngineProcess(model, **settings("kv_producer")),
            EngineProcess(model, **settings("kv_consumer", **failing)),
            EngineProcess(model, **settings("kv_consumer", "recompute")),
        ]
        return Engines(*[each.wait_until_ready() for each in started])

    @property
    def consumers(self) -> tuple[EngineProcess, EngineProcess]:
        """Both."""
        return self.failing, self.recomputing

    def alone(self, prompt: list[int], tokens: int = NEW_TOKENS) -> list[int]:
        """What one engine alone says."""
        return self.producer.run(prompt, max_tokens=tokens)["token_ids"]

    def offered(self, prompt: list[int]) -> Result:
        """kv_transfer_params of a prompt that the producer has computed, by way of `between`."""
        params = self.producer.run(prompt, {"do_remote_decode": True}, max_tokens=1)["kv_transfer_params"]
        return self.between.through(params)

    def check(self) -> None:
        """Raise AssertionError unless all are idle, and a hand-over to each consumer is right."""
        self.producer.resume()
        for consumer in self.consumers:
            consumer.resume()
            prompt = new_prompt()
            failed = failures(consumer)
            result = consumer.run(prompt, self.offered(prompt), max_tokens=NEW_TOKENS)
            assert result["token_ids"] == self.alone(prompt)
            assert failures(consumer) == failed and result["cached"] == PROMPT - 1
        for each in (self.producer, *self.consumers):
            idle(each)

    def close(self) -> None:
        """Ends all."""
        for each in (self.producer, *self.consumers):
            each.close()
        self.between.close()


def failures(consumer: EngineProcess) -> dict[str, int]:
    """How many loads have failed, by kind."""
    return consumer.state()["transfers"]["received"]["failed"]


def idle(engine: EngineProcess, seconds: float = 20.0) -> dict[str, Any]:
    """Its state, when nothing is held, on its way or in use. Raises AssertionError if something still is then."""
    state = engine.wait_idle(seconds)
    usage = state["usage"]
    assert (state["used"], usage["held"], usage["loads"], usage["tickets"]) == (0, 0, 0, 0), state
    assert state["compiles_after_warm_up"] == 0
    return state


def expect(consumer: EngineProcess, engines: Engines, result: Result, right: list[int]) -> None:
    """Raise AssertionError unless this is how a request ends whose cache did not arrive, on that consumer."""
    if consumer is engines.recomputing:
        assert (result["token_ids"], result["finish_reason"]) == (right, "length")
    else:
        assert (result["token_ids"], result["finish_reason"]) == ([], "error")
