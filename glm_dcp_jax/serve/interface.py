"""What the server needs of an engine, so that it can be tested without one. AsyncEngine provides it."""

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from glm_dcp_jax.cache.prefix_cache import PrefixCacheStats
from glm_dcp_jax.config import EngineConfig, SamplingDefaults
from glm_dcp_jax.engine.draft_stats import DraftStats
from glm_dcp_jax.engine.exchange_stats import ExchangeTotals
from glm_dcp_jax.engine.outputs import RequestOutput
from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    # They load jax.
    from glm_dcp_jax.engine.kv_connector import TransferStats
    from glm_dcp_jax.transfer.transfer_stats import Distribution

DAEMONS = ("compile", "engine", "kv-close")
"""Names of the threads in which an engine compiles its steps, runs them, and takes leave of other engines, and which
nobody waits for at the end."""


class EngineStats(Protocol):
    """Counts at one moment."""

    @property
    def running(self) -> int:
        """Requests being computed."""

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""

    @property
    def deferred(self) -> int:
        """Of those that wait, how many wait for something other than room."""

    @property
    def step_tokens(self) -> "Distribution":
        """Tokens of prompts and outputs that steps brought."""

    @property
    def device_kind(self) -> str:
        """What the engine's devices are."""

    @property
    def cache_usage(self) -> float:
        """Share of the cache's pages in use, 0 to 1."""

    @property
    def num_pages(self) -> int:
        """Pages of the cache."""

    @property
    def cache_dtype(self) -> str:
        """The record format in use."""

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens taken since the start."""

    @property
    def generation_tokens(self) -> int:
        """Tokens generated since the start."""

    @property
    def preemptions(self) -> int:
        """How often a sequence lost its pages, since the start."""

    @property
    def prefix_cache(self) -> PrefixCacheStats:
        """Prompt tokens that were looked for in the prefix cache, and found, since the start."""

    @property
    def drafts(self) -> DraftStats:
        """Speculative decoding since the start; all 0 without it."""

    @property
    def compiles_after_warm_up(self) -> int:
        """Programs compiled while serving; anything but 0 is a defect."""

    @property
    def exchanges(self) -> ExchangeTotals:
        """What decode steps exchanged between the ranks of a DCP group."""

    @property
    def transfers(self) -> "TransferStats | None":
        """Caches handed to other engines and taken from them; None for an engine that has no part in that."""


class Engine(Protocol):
    """An engine that runs requests concurrently on the server's event loop."""

    config: EngineConfig
    max_model_len: int
    tokenizer: Tokenizer | None
    sampling_defaults: SamplingDefaults

    def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Cumulative outputs, the last one finished. Closing it early aborts the request.

        From its first step on, a cache that the request's kv_transfer_params name is the engine's concern.

        Raises, before the first output, ValueError for a request it cannot run and QueueFull if too much waits;
        RuntimeError when it has died.
        """

    def drop_remote(self, params: Mapping[str, Any]) -> None:
        """A request with these kv_transfer_params will not come: another engine need not hold its cache.

        Nothing is waited for, and params that name no such cache do nothing.
        """

    def release_remote(self, params: Mapping[str, Any]) -> bool:
        """Nobody will come for a cache that this engine holds. Returns whether it was held. Nothing is waited for.

        Raises ValueError for params that no engine gave out.
        """

    async def reset_prefix_cache(self) -> bool:
        """Forget what earlier requests computed. False if requests that run still hold some of it."""

    def stats(self) -> EngineStats:
        """Counts for the metrics."""

    @property
    def is_ready(self) -> bool:
        """Warmed up, and able to serve."""

    @property
    def is_dead(self) -> bool:
        """Failed for good."""

    def shutdown(self, drain_seconds: float) -> None:
        """Stop; running requests are aborted. Caches that are held for others may still be read for so long."""
