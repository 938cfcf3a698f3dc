"""What a run's timings amount to, under the names and definitions of `vllm bench serve`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
"""Name -> how it is written, and its heading."""


@dataclass
class Timing:
    """One request, by time.perf_counter(). sent: when it left. tokens_at: when each event with new tokens came.

    output_tokens: generated, as the server counts them. error: why it failed, None if it did not.
    """

    prompt_tokens: int
    sent: float = 0.0
    tokens_at: list[float] = field(default_factory=list)
    output_tokens: int = 0
    error: str | None = None


def percentile_name(percentile: float) -> str:
    """p99, p99.9."""
    return f"p{percentile:g}"


def summarize(timings: Sequence[Timing], seconds: float, percentiles: Sequence[float]) -> dict[str, Any]:
    """The figures of one run as `vllm bench serve` saves them: counts, rates per second, latencies in milliseconds.

    TTFT is from sending a request to its first token, E2EL to its last. TPOT is what lies between the two over the
    tokens behind the first; ITL each gap between two events, of all requests together (an event may bring several
    tokens). Figures of nothing are None.
    """
    done = [timing for timing in timings if timing.error is None]
    generated = sum(timing.output_tokens for timing in done)
    asked = sum(timing.prompt_tokens for timing in done)
    row: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(timings) - len(done),
        "total_input_tokens": asked,
        "total_output_tokens": generated,
        "request_throughput": len(done) / seconds,
        "output_throughput": generated / seconds,
        "total_token_throughput": (asked + generated) / seconds,
    }
    for name, values in latencies(done).items():
        row |= _statistics(name, [1000 * value for value in values], percentiles)
    row["first_error"] = next((timing.error for timing in timings if timing.error is not None), None)
    return row


def latencies(done: Sequence[Timing]) -> dict[str, list[float]]:
    """Seconds by metric, of requests that succeeded."""
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    for timing in done:
        first, last = timing.tokens_at[0], timing.tokens_at[-1]
        found["ttft"].append(first - timing.sent)
        found["e2el"].append(last - timing.sent)
        found["itl"] += np.diff(timing.tokens_at).tolist()
        if timing.output_tokens > 1:
            found["tpot"].append((last - first) / (timing.output_tokens - 1))
    return found


def _statistics(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """mean_ttft_ms, median_ttft_ms, std_ttft_ms, p99_ttft_ms and so on."""
    names = [f"{kind}_{name}_ms" for kind in ("mean", "median", "std", *map(percentile_name, percentiles))]
    if not values:
        return dict.fromkeys(names)
    found = [np.mean(values), np.median(values), np.std(values), *np.percentile(values, list(percentiles))]
    return dict(zip(names, map(float, found), strict=True))
