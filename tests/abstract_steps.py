"""Compiled steps of an engine that exists only as shapes: any model, pool and device, without memory for them."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.pools import POOL_SPECS, Pools, pool_shapes
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.config import ModelConfig, ParallelConfig
from glm_dcp_jax.engine.steps import CompiledSteps, Kind, StepShape
from glm_dcp_jax.model.network import abstract_network
from glm_dcp_jax.parallel.attention import AttentionSettings
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

    dtype: of weights and records. pool_tokens: tokens that the cache holds over all ranks.
    """

    model: ModelConfig
    parallel: ParallelConfig
    devices: list
    dtype: str
    pool_tokens: int

    @cached_property
    def layout(self) -> Layout:
        return Layout(BLOCK_SIZE, self.parallel.decode_context_parallel_size)

    @cached_property
    def record(self) -> RecordFormat:
        return RecordFormat.named(self.dtype, self.model)

    @cached_property
    def steps(self) -> CompiledSteps:
        model, parallel = self.model, self.parallel
        settings = AttentionSettings(
            layout=self.layout,
            record=self.record,
            comm_backend=parallel.dcp_comm_backend,
            scale=model.qk_head_dim**-0.5,
            latent_width=model.kv_lora_rank,
            index_topk=model.index_topk,
        )
        shape = abstract_network(model, jnp.dtype(self.dtype), parallel.tensor_parallel_size)
        return CompiledSteps(make_mesh(parallel, self.devices), shape, settings, parallel.dcp_prefill_path)

    @cached_property
    def parameters(self) -> Any:
        return self.steps.shape.on(self.steps.mesh)

    @cached_property
    def pools(self) -> Pools:
        shapes = pool_shapes(
            self.model, self.layout, self.record, self.layout.pages_for(self.pool_tokens) + 1
        )
        shardings = (NamedSharding(self.steps.mesh, spec) for spec in POOL_SPECS)
        return Pools(
            *(
                jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
                for shape, sharding in zip(shapes, shardings, strict=True)
            )
        )

    @property
    def layer_pool_bytes(self) -> int:
        """One layer's CKV pool on one device."""
        return bytes_on_a_device(self.pools.ckv) // self.model.num_hidden_layers

    @property
    def layer_expert_bytes(self) -> int:
        """The routed experts of one layer on one device."""
        model = self.model
        width = -(-model.moe_intermediate_size // self.parallel.tensor_parallel_size)
        return 3 * model.n_routed_experts * model.hidden_size * width * jnp.dtype(self.dtype).itemsize

    def compile(self, kind: Kind, requests: int, rows: int, context: int) -> "Program":
        """A step for `requests` of `rows` each, whose page tables span `context` tokens; logits of one row each."""
        shape = StepShape(kind, requests, rows, self.layout.pages_for(context), requests)
        memory = self.steps.lower(shape, self.parameters, self.pools).compile().memory_analysis()
        # Tokens, positions, page table and logit rows: int32, on every device.
        return Program(self, memory, 4 * (2 * requests * rows + requests * shape.pages + requests))


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
