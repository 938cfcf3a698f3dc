"""What an engine counts."""

from dataclasses import dataclass

from glm_dcp_jax.cache.prefix_cache import PrefixCacheStats
from glm_dcp_jax.engine.draft_stats import DraftStats
from glm_dcp_jax.engine.exchange_stats import ExchangeTotals
from glm_dcp_jax.engine.kv_connector import TransferStats


@dataclass(frozen=True)
class EngineStats:
    """Counts at one moment. cache_usage: 0 to 1. prompt_tokens, generation_tokens: totals since the start.

    cache_dtype: the record format in use.

    preemptions: how often a sequence lost its pages. prefix_cache: tokens that were looked for, and found. drafts: of
    speculative decoding.

    compiles_after_warm_up: programs compiled while serving; anything but 0 is a defect. exchanges: between DCP ranks.
    transfers: with other engines, None without --kv-transfer-config.
    """

    running: int
    waiting: int
    cache_usage: float
    num_pages: int
    cache_dtype: str
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    prefix_cache: PrefixCacheStats
    drafts: DraftStats
    compiles_after_warm_up: int
    exchanges: ExchangeTotals
    transfers: TransferStats | None
