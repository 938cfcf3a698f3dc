"""Compiled steps of an engine that exists only as shapes: any model, pool and device, without memory for them."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.pools import Pools
from glm_dcp_jax.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from glm_dcp_jax.engine.blueprint import Blueprint
from glm_dcp_jax.engine.steps import BlockShape, Kind, StepShape
from glm_dcp_jax.parallel.mesh import make_mesh

BLOCK_SIZE = 64


def bytes_on_a_device(tree: Any) -> int:
    """What one device holds of a tree of arrays or ShapeDtypeStructs with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


@dataclass(frozen=True)
class AbstractEngine:
    """Parameters and pools as ShapeDtypeStructs on `devices`, which may be those of a machine that is not here.

    dtype: of weights, and of records unless `record` names their format. pool_tokens: of the cache, over all ranks.
    """

    model: ModelConfig
    parallel: ParallelConfig
    devices: list
    dtype: str
    pool_tokens: int
    record: str | None = None

    @cached_property
    def blueprint(self) -> Blueprint:
        cache = CacheConfig(block_size=BLOCK_SIZE, kv_cache_dtype=self.record or self.dtype)
        parallel = replace(self.parallel, step_segments=1, dcp_project_first="never")
        config = EngineConfig("shapes only", parallel, cache, dtype=self.dtype)
        return Blueprint(config, self.model, make_mesh(self.parallel, self.devices))

    @property
    def layout(self) -> Layout:
        return self.blueprint.layout

    @cached_property
    def parameters(self) -> Any:
        return self.blueprint.parameters()

    @cached_property
    def pools(self) -> tuple[Pools, ...]:
        return self.blueprint.pools(self.layout.pages_for(self.pool_tokens) + 1)

    @property
    def layer_pool_bytes(self) -> int:
        """One layer's CKV pool on one device."""
        return bytes_on_a_device([part.ckv for part in self.pools]) // self.model.num_hidden_layers

    @property
    def layer_expert_bytes(self) -> int:
        """The routed experts of one layer on one device."""
        model = self.model
        width = -(-model.moe_intermediate_size // self.parallel.tensor_parallel_size)
        return 3 * model.n_routed_experts * model.hidden_size * width * jnp.dtype(self.dtype).itemsize

    def compile(self, kind: Kind, requests: int, rows: int, context: int) -> "Program":
        """A step for `requests` of `rows` each, whose page tables span `context` tokens; logits of one row each."""
        block = BlockShape(kind, requests, rows, self.layout.pages_for(context))
        shape = StepShape((block,), requests)
        (program,) = self.blueprint.steps.compile(shape, self.parameters, self.pools).programs
        memory = program.memory_analysis()
        # Tokens, positions, page table and logit rows: int32, on every device.
        return Program(self, memory, 4 * (2 * requests * rows + requests * block.pages + requests))


@dataclass(frozen=True)
class Program:
    """What the compiler says of one step's memory on one device, beside what its arguments take."""

    engine: AbstractEngine
    memory: Any
    batch_bytes: int

    def check_that_no_pool_is_copied(self) -> None:
        """All pool bytes are updated in place, and no workspace is large enough for even one layer of a pool."""
        engine, memory = self.engine, self.memory
        assert memory.alias_size_in_bytes == bytes_on_a_device(engine.pools)
        assert memory.temp_size_in_bytes < engine.layer_pool_bytes, (
            f"temporaries of {memory.temp_size_in_bytes:,} bytes; one layer's pool has {engine.layer_pool_bytes:,}"
        )

    def check_that_arguments_exist_once(self) -> None:
        """A device is handed its shards of weights and pools, and the batch; nothing else."""
        engine, total = self.engine, self.memory.argument_size_in_bytes
        assert total - bytes_on_a_device(engine.pools) - self.batch_bytes == bytes_on_a_device(
            engine.parameters
        )
