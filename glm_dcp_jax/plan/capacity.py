"""What fits into GPUs that are not here: weights by part, the cache's pools, what steps need beside them, the rest."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from glm_dcp_jax.cache.capacity import capacity_tokens, page_bytes
from glm_dcp_jax.config import ModelConfig
from glm_dcp_jax.engine.blueprint import Blueprint
from glm_dcp_jax.kernels.row_blocks import WORKSPACE_BYTES
from glm_dcp_jax.parallel.sharding import padded
from glm_dcp_jax.plan.gpus import Target
from glm_dcp_jax.plan.weights import Leaf, bytes_by_part

POOL_PARTS = ("ckv", "index_keys", "mtp_cache")
_FLOAT32 = 4
_MASK_BYTES = 2.25
"""For each row and position: fitted to compiled chunks of 512 and 2,048 rows at 131,072 and 1,048,576 positions."""
_LOGITS = 2
"""Copies of a step's logits: each rank's part, and all of them gathered."""


@dataclass(frozen=True)
class Capacity:
    """What an engine on a target has room for. leaves: of all parameters, on one GPU.

    workspace: temporaries of the largest step, in bytes, where it was compiled; None: estimated. longest: tokens of a
    request that steps are made for. requests, context: of the decode step that the cache must hold, and tokens of each;
    None: any.
    """

    blueprint: Blueprint
    target: Target
    leaves: tuple[Leaf, ...]
    longest: int
    workspace: int | None = None
    requests: int = 1
    context: int | None = None

    @property
    def model(self) -> ModelConfig:
        """The model's sizes."""
        return self.blueprint.model

    @cached_property
    def weights(self) -> dict[str, int]:
        """Bytes on each GPU by part."""
        return bytes_by_part(self.leaves, drafts=self.blueprint.drafts_each > 0)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on each GPU."""
        return sum(self.weights.values())

    @property
    def asked_length(self) -> int:
        """Tokens that a request must be able to have: as many as --max-model-len asks for, else any."""
        return self.blueprint.config.scheduler.max_model_len or 1

    @property
    def usable_bytes(self) -> int:
        """Of a GPU's memory what --gpu-memory-utilization allows."""
        return int(self.target.memory_bytes * self.blueprint.config.cache.gpu_memory_utilization)

    @property
    def page_bytes(self) -> int:
        """Of a page, on each GPU."""
        blueprint = self.blueprint
        return page_bytes(self.model, blueprint.layout, blueprint.record, blueprint.mtp_layers)

    @property
    def needed_workspace(self) -> int:
        """Temporaries, or the estimate of them."""
        return self.estimated_workspace if self.workspace is None else self.workspace

    @cached_property
    def estimated_workspace(self) -> int:
        """Of the largest prefill chunk or decode step, by arithmetic: masks of what a chunk's rows select of the whole
        context, gathered records, logits, activations, the experts' values or what works in blocks of rows."""
        blueprint, model = self.blueprint, self.model
        scheduler, parallel = blueprint.config.scheduler, blueprint.config.parallel
        tp, itemsize = parallel.tensor_parallel_size, blueprint.formats.compute.itemsize
        rows = min(scheduler.max_num_batched_tokens, self.longest)
        decode_rows = max(scheduler.max_num_seqs, self.requests) * (1 + blueprint.drafts_each)
        heads = padded(model.num_attention_heads, tp) // tp
        width = padded(model.moe_intermediate_size or model.intermediate_size, tp) // tp
        each = model.num_experts_per_tok or 1
        attended = rows * heads * model.kv_lora_rank * (itemsize + _FLOAT32)
        experts = min(rows * each * (width * itemsize + model.hidden_size * _FLOAT32), WORKSPACE_BYTES)
        hidden = 4 * rows * model.hidden_size * _FLOAT32
        logits = _LOGITS * decode_rows * model.vocab_size * _FLOAT32
        masks = int(_MASK_BYTES * rows * self.longest)
        blocks = max(experts, WORKSPACE_BYTES)
        return max(masks + attended + hidden + self._gathered + blocks, logits + WORKSPACE_BYTES)

    @property
    def _gathered(self) -> int:
        """Of path `context`: two layers' records of a whole prompt, unless that is more than it may take."""
        layout, parallel = self.blueprint.layout, self.blueprint.config.parallel
        if layout.world == 1:
            return 0
        tokens = layout.pages_for(self.longest) * layout.virtual_block
        needed = 2 * tokens * self.blueprint.record.record_bytes
        return needed if needed <= parallel.dcp_context_memory else 0

    @property
    def cache_budget(self) -> int:
        """Bytes per GPU that the cache gets; below 0 where there is nothing left for it."""
        cache = self.blueprint.config.cache
        if cache.num_gpu_blocks_override is not None:
            return (cache.num_gpu_blocks_override + 1) * self.page_bytes
        if cache.kv_cache_memory_bytes is not None:
            return cache.kv_cache_memory_bytes
        return self.usable_bytes - self.weight_bytes - self.needed_workspace

    @property
    def pages(self) -> int:
        """Pages of the cache, the null page included; 0 where not even two fit."""
        pages = self.cache_budget // self.page_bytes
        return pages if pages >= 2 else 0

    @property
    def usable_tokens(self) -> int:
        """Tokens that the cache holds; the null page's are not among them."""
        return capacity_tokens(self.pages, self.blueprint.layout) if self.pages else 0

    @property
    def step_pages(self) -> int:
        """Pages that the decode step takes which was asked for."""
        drafts = self.blueprint.drafts_each
        return self.requests * self.blueprint.layout.pages_for(self.context or 1 + drafts)

    @property
    def holds_step(self) -> bool:
        """Whether the cache has as many."""
        return self.pages > self.step_pages

    @property
    def least_cache(self) -> int:
        """Bytes of the smallest cache that holds a request of the length that was asked for, and the step."""
        pages = max(self.blueprint.layout.pages_for(self.asked_length), self.step_pages)
        return (1 + pages) * self.page_bytes

    def concurrency(self, context: int) -> float:
        """How many requests of so many tokens the cache holds, as vLLM counts it."""
        return max(self.pages - 1, 0) / self.blueprint.layout.pages_for(context)

    @cached_property
    def pools(self) -> dict[str, int]:
        """Bytes on each GPU of the cache's parts."""
        blueprint, layout, record = self.blueprint, self.blueprint.layout, self.blueprint.record
        each = {
            "ckv": self.model.num_hidden_layers * layout.block_size * record.record_bytes,
            "index_keys": self.model.num_full_layers
            * layout.index_layout.block_size
            * record.index.key_bytes,
        }
        each["mtp_cache"] = self.page_bytes - sum(each.values())
        assert set(each) == set(POOL_PARTS) and blueprint.mtp_layers >= 0
        return {part: self.pages * nbytes for part, nbytes in each.items()}

    @property
    def cache_is_given(self) -> bool:
        """Whether a flag says how large the cache is."""
        cache = self.blueprint.config.cache
        return cache.num_gpu_blocks_override is not None or cache.kv_cache_memory_bytes is not None

    @property
    def needed_bytes(self) -> int:
        """What must be there: weights, workspace, and a cache of the size that was asked for, else the least."""
        cache = self.cache_budget if self.cache_is_given else self.least_cache
        return self.weight_bytes + self.needed_workspace + cache

    @property
    def limit_bytes(self) -> int:
        """What may be there. A cache of a given size may take what --gpu-memory-utilization would leave."""
        return self.target.memory_bytes if self.cache_is_given else self.usable_bytes

    @property
    def weights_fit(self) -> bool:
        """Whether weights and workspace leave room for the smallest cache."""
        smallest = self.weight_bytes + self.needed_workspace + 2 * self.page_bytes
        return smallest <= self.limit_bytes

    @property
    def fits(self) -> bool:
        """Whether everything does, and the cache holds a request of the length that was asked for, and the step."""
        enough = self.usable_tokens >= self.asked_length and self.holds_step
        return enough and self.needed_bytes <= self.limit_bytes

    def memory(self) -> dict[str, Any]:
        """Bytes on each GPU by part. `workspace` is null where nothing was compiled, and then estimated."""
        parts: dict[str, Any] = self.weights | self.pools | {"workspace": self.workspace}
        if self.workspace is None:
            parts["workspace_estimate"] = self.estimated_workspace
        parts["free"] = self.target.memory_bytes - sum(nbytes or 0 for nbytes in parts.values())
        return parts

    def cache(self, context: int) -> dict[str, Any]:
        """What the cache comes to. context: tokens of a request."""
        layout, record = self.blueprint.layout, self.blueprint.record
        return {
            "record_format": record.name,
            "record_bytes": record.record_bytes,
            "index_key_bytes": record.index.key_bytes,
            "tokens_per_page": layout.virtual_block,
            "bytes_per_page": self.page_bytes,
            "bytes_per_token": self.page_bytes / layout.virtual_block,
            "budget_bytes": max(self.cache_budget, 0),
            "pages": self.pages,
            "tokens": self.pages * layout.virtual_block,
            "usable_tokens": self.usable_tokens,
            "max_concurrency": {
                "context": context,
                "requests": math.floor(100 * self.concurrency(context)) / 100,
            },
        }
