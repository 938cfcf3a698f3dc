"""What an engine counts."""

from dataclasses import dataclass

from glm_dcp_jax.cache.prefix_cache import PrefixCacheStats
from glm_dcp_jax.engine.draft_stats import DraftStats
from glm_dcp_jax.engine.exchange_stats import ExchangeTotals
from glm_dcp_jax.engine.kv_connector import TransferStats
from glm_dcp_jax.transfer.transfer_stats import Distribution

STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))


@dataclass(frozen=True)
class EngineStats:
    """Counts at one moment. cache_usage: 0 to 1. prompt_tokens, generation_tokens: totals since the start.

    deferred: of those that wait, how many wait for something other than room: a prompt that another one computes, or
    a cache that comes from elsewhere. step_tokens: tokens of prompts that a step computed, and that it drew.

    device_kind: what the devices are. cache_dtype: the record format in use.

    preemptions: how often a sequence lost its pages. prefix_cache: tokens that were looked for, and found. drafts: of
    speculative decoding.

    compiles_after_warm_up: programs compiled while serving; anything but 0 is a defect. exchanges: between DCP ranks.
    transfers: with other engines, None without --kv-transfer-config.
    """

    running: int
    waiting: int
    deferred: int
    cache_usage: float
    num_pages: int
    device_kind: str
    cache_dtype: str
    prompt_tokens: int
    generation_tokens: int
    step_tokens: Distribution
    preemptions: int
    prefix_cache: PrefixCacheStats
    drafts: DraftStats
    compiles_after_warm_up: int
    exchanges: ExchangeTotals
    transfers: TransferStats | None
