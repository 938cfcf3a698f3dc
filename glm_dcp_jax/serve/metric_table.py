"""Every metric that the server exposes: name, kind, labels and what it says. docs/metrics.md is written from this."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from glm_dcp_jax.config import ConfigError

DEFAULT_PREFIX = "vllm:"
OURS = "glm_dcp:"
"""Before the names of what vLLM does not have, whatever the prefix of the others is."""
LABELS = ("model_name", "engine")
"""Of every sample. An engine is one process with its mesh, so it is always number 0."""
Kind = Literal["counter", "gauge", "histogram", "info"]


@dataclass(frozen=True)
class Described:
    """One metric. name: without prefix and without the end that its kind adds. label: of its own, besides LABELS.

    bounds: upper bounds of a histogram's buckets; none for one of tokens, whose buckets end at the model's length.
    ours: whether vLLM has no such metric.
    """

    name: str
    kind: Kind
    text: str
    label: str | None = None
    bounds: tuple[float, ...] = ()
    ours: bool = False

    @property
    def ending(self) -> str:
        """What Prometheus' format adds to the name."""
        return {"counter": "_total", "info": "_info"}.get(self.kind, "")

    @property
    def labels(self) -> tuple[str, ...]:
        """All of its labels."""
        return LABELS if self.label is None else (*LABELS, self.label)

    def exported(self, prefix: str) -> str:
        """Its name as prometheus_client wants it: with the prefix, without the ending."""
        return (OURS if self.ours else prefix) + self.name


@dataclass(frozen=True)
class Section:
    """Metrics that belong together. when: on what they depend, if they are not always there."""

    title: str
    metrics: tuple[Described, ...]
    when: str = ""


def check_prefix(prefix: str) -> None:
    """Raise ConfigError unless names that begin with this are names in Prometheus' sense, and can be told apart."""
    if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*[_:]", prefix):
        raise ConfigError(
            f"metrics_prefix must be letters, digits, _ and :, not begin with a digit and end in : or _, such as "
            f"{DEFAULT_PREFIX} or {OURS}, but is {prefix!r}"
        )


def tokens_up_to(most: int) -> tuple[float, ...]:
    """Bounds for histograms of tokens: 1, 2, 5, 10, ... as long as they are at most `most`."""
    powers = range(len(str(most)))
    return tuple(float(m * 10**power) for power in powers for m in (1, 2, 5) if m * 10**power <= most)


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


_FIRST_TOKEN = _bounds(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
_TOKEN = _bounds("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
_REQUEST = _bounds("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_OUTPUTS = _bounds("1 2 5 10 20")


def _ours(name: str, kind: Kind, text: str, label: str | None = None) -> Described:
    return Described(name, kind, text, label, ours=True)


SECTIONS = (
    Section(
        "Load",
        (
            Described("num_requests_running", "gauge", "Outputs of requests in decode or prefill"),
            Described("num_requests_waiting", "gauge", "Outputs of requests that wait for a step"),
            Described(
                "num_requests_waiting_by_reason",
                "gauge",
                "The same by what they wait for: `capacity` (room), `deferred` (a prompt that another one computes, or "
                "a cache from another engine)",
                "reason",
            ),
            Described("num_preemptions", "counter", "How often a sequence lost its pages to another"),
            Described(
                "admission_rejections",
                "counter",
                "Requests that found the queue full, by the limit they met",
                "reason",
            ),
            Described("request_success", "counter", "Outputs that ended, by how", "finished_reason"),
        ),
    ),
    Section(
        "Latency",
        (
            Described(
                "time_to_first_token_seconds",
                "histogram",
                "From a request's arrival to its first token",
                bounds=_FIRST_TOKEN,
            ),
            Described(
                "inter_token_latency_seconds",
                "histogram",
                "From new tokens of a request to its next ones; with speculative decoding several come at once",
                bounds=_TOKEN,
            ),
            Described(
                "request_time_per_output_token_seconds",
                "histogram",
                "A request's mean time per token but the first",
                bounds=_TOKEN,
            ),
            Described(
                "e2e_request_latency_seconds",
                "histogram",
                "From a request's arrival to its end",
                bounds=_REQUEST,
            ),
            Described(
                "request_queue_time_seconds",
                "histogram",
                "From a request's arrival to the first step that works on it, its cache's way here included",
                bounds=_REQUEST,
            ),
            Described(
                "request_prefill_time_seconds",
                "histogram",
                "From that step to a request's first token",
                bounds=_REQUEST,
            ),
            Described(
                "request_decode_time_seconds",
                "histogram",
                "From a request's first token to its last",
                bounds=_REQUEST,
            ),
            Described(
                "request_inference_time_seconds",
                "histogram",
                "From the first step that works on a request to its last token",
                bounds=_REQUEST,
            ),
        ),
    ),
    Section(
        "Tokens",
        (
            Described("prompt_tokens", "counter", "Tokens of the prompts that were taken"),
            Described("prompt_tokens_cached", "counter", "Of these, tokens that the prefix cache had"),
            Described("generation_tokens", "counter", "Tokens generated"),
            Described(
                "iteration_tokens_total", "histogram", "Tokens of prompts and outputs that a step brought"
            ),
            Described("request_prompt_tokens", "histogram", "Tokens of a request's prompt"),
            Described("request_generation_tokens", "histogram", "Tokens generated for a request"),
            Described(
                "request_max_num_generation_tokens",
                "histogram",
                "Tokens of a request's longest output",
            ),
            Described("request_params_n", "histogram", "Outputs that a request asked for", bounds=_OUTPUTS),
            Described(
                "request_params_max_tokens", "histogram", "Tokens that an output of a request may have"
            ),
        ),
    ),
    Section(
        "Cache",
        (
            Described("kv_cache_usage_perc", "gauge", "Pages of the cache in use, 1 is all"),
            Described("prefix_cache_queries", "counter", "Tokens looked for in the prefix cache"),
            Described("prefix_cache_hits", "counter", "Tokens found in the prefix cache"),
            _ours(
                "prefix_cache_evictions",
                "counter",
                "Pages whose content was given up for another",
            ),
            Described("cache_config", "info", "Geometry of the cache, as labels; the value is 1"),
        ),
    ),
    Section(
        "Decoding over several devices",
        (
            _ours("dcp_decode_steps", "counter", "Decode steps by the path they took", "path"),
            _ours(
                "dcp_received_bytes",
                "counter",
                "Bytes each device is expected to get in decode, by the steps' shapes; overflows not counted",
            ),
            _ours(
                "dcp_selected_entries",
                "counter",
                "Selected positions, over rows and Full layers; paths records and bulk",
            ),
            _ours("dcp_records", "counter", "Records exchanged, each once per request and Full layer"),
            _ours(
                "dcp_records_unique_ratio",
                "gauge",
                "Records exchanged per selected entry; 0 before any were",
            ),
            _ours("dcp_overflows", "counter", "Share groups whose records did not fit the fast exchange"),
            _ours("dcp_selections_compared", "counter", "Decode steps compared across devices"),
            _ours(
                "dcp_selections_diverged",
                "counter",
                "Of these, steps whose devices disagreed: wrong tokens; must stay 0",
            ),
            _ours("compiles_after_warm_up", "counter", "Programs compiled while serving; must stay 0"),
        ),
    ),
    Section(
        "Speculative decoding",
        (
            Described("spec_decode_num_drafts", "counter", "Rounds in which drafts were verified"),
            Described("spec_decode_num_draft_tokens", "counter", "Draft tokens verified"),
            Described("spec_decode_num_accepted_tokens", "counter", "Draft tokens accepted"),
            Described(
                "spec_decode_num_accepted_tokens_per_pos",
                "counter",
                "Draft tokens accepted, by their place in the round, 0 first; over the rounds it is the acceptance",
                "position",
            ),
        ),
        "with `--speculative-config`",
    ),
    Section(
        "Caches that come from other engines",
        (
            Described(
                "nixl_xfer_time_seconds", "histogram", "Bringing a request's cache, over any transport"
            ),
            Described(
                "nixl_bytes_transferred", "histogram", "Bytes of a request's cache, over any transport"
            ),
            Described(
                "nixl_num_descriptors",
                "histogram",
                "Runs of slots, contiguous on both sides, that a request's cache came in",
            ),
            Described("nixl_num_failed_transfers", "counter", "Requests whose cache did not arrive"),
            Described(
                "nixl_num_failed_notifications",
                "counter",
                "Messages about the end of a transfer that no producer answered",
            ),
            _ours("kv_transfer_failures", "counter", "Caches that did not arrive, by the reason", "kind"),
            _ours(
                "kv_transfer_phase_seconds",
                "counter",
                "Seconds that arrived caches have spent waiting for pages, in the handshake, reading and confirming; "
                "`pack` and `fetch` are parts of `read`",
                "phase",
            ),
            _ours("kv_transfer_cancelled", "counter", "Transfers that had begun when their request ended"),
            _ours(
                "kv_transfer_wasted_bytes",
                "counter",
                "Bytes received for transfers that failed or were cancelled",
            ),
        ),
        "where caches are taken from other engines, with `--kv-transfer-config`",
    ),
    Section(
        "Caches that are held for other engines",
        (
            _ours(
                "kv_transfer_held_requests",
                "gauge",
                "Requests that have ended and whose cache is held for a consumer",
            ),
            _ours("kv_transfer_sent_bytes", "counter", "Bytes packed for consumers"),
            _ours(
                "kv_transfer_padding_bytes",
                "counter",
                "Bytes packed beside these to fill up shapes, which stay here",
            ),
            _ours(
                "kv_transfer_offers",
                "counter",
                "Caches that were held, by how that ended: `finished`, `failed`, `expired`, `dropped`",
                "outcome",
            ),
            _ours("kv_transfer_refusals", "counter", "Requests of consumers that were refused", "kind"),
            Described(
                "nixl_num_kv_expired_reqs",
                "counter",
                "Requests whose cache nobody came for within its lease",
            ),
            Described(
                "nixl_num_notifications_after_expiry",
                "counter",
                "Messages about the end of a transfer that came after its cache had been given up",
            ),
        ),
        "where caches are held for other engines, with `--kv-transfer-config`",
    ),
)


def _all() -> Iterator[Described]:
    for section in SECTIONS:
        yield from section.metrics


METRICS = {described.name: described for described in _all()}
"""By name."""
