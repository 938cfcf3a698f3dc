"""An engine before anything is on a device: what its flags, model and mesh come to, and the steps they compile to.

The running engine builds on it; so does whatever compiles its steps for devices that are not there.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jax.sharding import Mesh

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.pools import Pools, pool_shapes
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.config import ConfigError, EngineConfig, ModelConfig
from glm_dcp_jax.engine.draft_steps import DraftSteps
from glm_dcp_jax.engine.formats import Formats
from glm_dcp_jax.engine.steps import BlockShape, CompiledSteps
from glm_dcp_jax.kernels.row_blocks import WORKSPACE_BYTES
from glm_dcp_jax.model.network import NetworkShape, abstract_network
from glm_dcp_jax.model.stored_weights import ALL_PLAIN, StoredFormat, WeightFormats
from glm_dcp_jax.parallel.attention import AttentionSettings
from glm_dcp_jax.parallel.link import Link, assumed_link, memory_bandwidth
from glm_dcp_jax.parallel.policy import DecodePolicy, Estimate
from glm_dcp_jax.parallel.sharding import padded
from glm_dcp_jax.parallel.transport import Choice, choose_transport

_CPU_GATHER_BYTES = 2 * 2**20
"""Records that stay in a core's cache are attended 3 times faster than 64 MiB of them."""


_HISTORIES = 2
"""Layers whose gathered context is in memory: one that is attended over, and the next."""
_GPU_SEGMENTS = 2
"""XLA hides no exchange in a program whose arguments take 80 % of a GPU's memory, and weights and cache take more."""


@dataclass(frozen=True)
class Blueprint:
    """Raises ConfigError, when its parts are first asked for, for flags that do not fit the model or the platform.

    link: what was measured between the devices; None: what is assumed of their kind. weights: how the checkpoint stores
    them.
    """

    config: EngineConfig
    model: ModelConfig
    mesh: Mesh
    link: Link | None = None
    weights: WeightFormats = ALL_PLAIN

    @property
    def on_cpu(self) -> bool:
        """Whether the mesh is made of (virtual) CPU devices."""
        return self.mesh.devices.flat[0].platform == "cpu"

    @cached_property
    def formats(self) -> Formats:
        """Arithmetic and record format."""
        return Formats.of(self.config, self.model, self.on_cpu)

    @property
    def record(self) -> RecordFormat:
        """What the cache keeps of a token."""
        return self.formats.record

    @cached_property
    def layout(self) -> Layout:
        """Where the cache keeps it."""
        cache, parallel = self.config.cache, self.config.parallel
        return Layout(
            cache.block_size,
            parallel.decode_context_parallel_size,
            cache.cp_kv_cache_interleave_size,
            parallel.dcp_indexer_shards,
        )

    @cached_property
    def transport(self) -> Choice:
        """How records are exchanged within a DCP group, and why so."""
        return choose_transport(self.config.parallel.dcp_transport, list(self.mesh.devices.flat))

    @cached_property
    def shape(self) -> NetworkShape:
        """The network's parameters as shapes; with the MTP layer's where it drafts."""
        tp, group_values = self.config.parallel.tensor_parallel_size, self.settings.project_rows is not None
        speculative = self.config.speculative
        if speculative is not None:
            speculative.check_model(self.model)
        return abstract_network(
            self.model.stored_as(self.weights.layer_kinds(self.model.num_hidden_layers)),
            self.formats.compute,
            tp,
            self.segments,
            group_values,
            mtp=speculative is not None,
            formats=self.weights,
            expert_parallel=self.config.parallel.enable_expert_parallel,
        )

    @property
    def drafts_each(self) -> int:
        """Tokens that are guessed for each request and step; 0 without speculative decoding."""
        speculative = self.config.speculative
        return 0 if speculative is None else speculative.num_speculative_tokens

    @property
    def mtp_layers(self) -> int:
        """Layers with caches of their own that draft."""
        return int(self.drafts_each > 0)

    @property
    def segments(self) -> int:
        """Programs that a step is compiled as."""
        if self.config.parallel.step_segments:
            return self.config.parallel.step_segments
        return 1 if self.on_cpu else _GPU_SEGMENTS

    @cached_property
    def settings(self) -> AttentionSettings:
        """What all attention paths share."""
        parallel = self.config.parallel
        settings = AttentionSettings(
            layout=self.layout,
            record=self.record,
            comm_backend=parallel.dcp_comm_backend,
            scale=self.model.qk_head_dim**-0.5,
            latent_width=self.model.kv_lora_rank,
            index_topk=self.model.index_topk,
            gather_bytes=_CPU_GATHER_BYTES if self.on_cpu else WORKSPACE_BYTES,
            latent_scales=self.formats.latent_scales,
            kernels=self.formats.kernels,
            transport=self.transport.transport,
            exchange_bytes=parallel.dcp_exchange_memory,
        )

        return replace(settings, project_rows=self._project_rows(self._policy(settings)))

    @cached_property
    def policy(self) -> DecodePolicy:
        """What decides which path a decode step takes."""
        return self._policy(self.settings)

    def _project_rows(self, policy: DecodePolicy) -> int | None:
        """From how many rows on path `queries` projects before it merges; None if no step of it has as many."""
        parallel, scheduler = self.config.parallel, self.config.scheduler
        if parallel.dcp_project_first == "never" or self.layout.world == 1:
            return None
        if parallel.dcp_project_first == "always":
            return 1
        if (rows := policy.paying_rows) is None:
            return None
        longest = scheduler.max_model_len or self.model.max_position_embeddings
        local_tokens = self.layout.pages_for(longest) * self.layout.block_size
        fullest = policy.choose(parallel.dcp_decode_path, scheduler.max_num_seqs, 1, local_tokens)
        in_decode = fullest.path == "queries" and scheduler.max_num_seqs >= rows
        in_prefill = parallel.dcp_prefill_path == "queries" and scheduler.max_num_batched_tokens >= rows
        return rows if in_decode or in_prefill else None

    def _policy(self, settings: AttentionSettings) -> DecodePolicy:
        element = self.formats.compute.itemsize
        device, tp = self.mesh.devices.flat[0], self.config.parallel.tensor_parallel_size
        return DecodePolicy(
            model=self.model,
            settings=settings,
            heads=padded(self.model.num_attention_heads, tp) // tp,
            tp=tp,
            element_bytes=element,
            link=self.link or assumed_link(device.platform, device.device_kind),
            memory_bandwidth=memory_bandwidth(device.platform, device.device_kind),
            expert_bytes=self._stored(True, "mlp.experts.0.down_proj.weight").bytes_per_parameter(element),
            dense_bytes=self._stored(False, "mlp.down_proj.weight").bytes_per_parameter(element),
        )

    def _stored(self, sparse: bool, name: str) -> StoredFormat:
        """How the first layer that has experts, or has none, stores a weight."""
        layer = next((at for at, own in enumerate(self.model.sparse) if own == sparse), 0)
        return self.weights.of(f"model.layers.{layer}.{name}")

    def path(self, shape: BlockShape) -> str:
        """The attention path that a block of this shape takes.

        Raises ConfigError where path `context` was asked for and does not fit the memory it may take.
        """
        if shape.kind == "decode":
            return self.decode_estimate(shape).path
        wanted = self.config.parallel.dcp_prefill_path
        if wanted == "queries" or self.layout.world == 1:
            return "context" if self.layout.world == 1 else wanted
        context = shape.requests * self.layout.virtual_block * shape.pages
        needed = _HISTORIES * context * self.record.record_bytes
        allowed = self.config.parallel.dcp_context_memory
        if needed <= allowed:
            return "context"
        if wanted == "auto":
            return "queries"
        raise ConfigError(
            f"--dcp-prefill-path context needs {needed:,} bytes a device for prompts of {context:,} tokens, and "
            f"--dcp-context-memory allows {allowed:,}; raise that, lower --max-model-len, or use auto"
        )

    def decode_estimate(self, shape: BlockShape) -> Estimate:
        """The path that a decode block of this shape takes, and what it is expected to wait for. Every step asks."""
        if shape not in self._estimates:
            self._estimates[shape] = self._estimate(shape)
        return self._estimates[shape]

    @cached_property
    def _estimates(self) -> dict[BlockShape, Estimate]:
        return {}

    def _estimate(self, shape: BlockShape) -> Estimate:
        wanted = self.config.parallel.dcp_decode_path if self.layout.world > 1 else "queries"
        local_tokens = shape.pages * self.layout.block_size
        return self.policy.choose(wanted, shape.requests, shape.rows, local_tokens)

    @cached_property
    def steps(self) -> CompiledSteps:
        """The steps, none of them compiled yet."""
        return CompiledSteps(self.mesh, self.shape, self.settings, self.path)

    @cached_property
    def drafts(self) -> DraftSteps:
        """The programs that draft, none of them compiled yet; for engines with a speculative config."""
        share = self.model.index_share_for_mtp_iteration
        return DraftSteps(self.mesh, self.shape, self.settings, self.path, share)

    def parameters(self) -> Any:
        """The parameters as ShapeDtypeStructs on the mesh."""
        return self.shape.on(self.mesh)

    def pools(self, pages: int) -> tuple[Pools, ...]:
        """Each segment's pools of so many pages, the null page included, as ShapeDtypeStructs on the mesh."""
        return tuple(
            pool_shapes(
                self.mesh,
                sum(run.num_groups * run.group_size for run in segment),
                sum(run.num_groups for run in segment),
                self.layout,
                self.record,
                pages,
            )
            for segment in self.shape.segments
        )

    def mtp_pools(self, pages: int) -> Pools:
        """The MTP layer's pools, whose pages have the same ids, as ShapeDtypeStructs on the mesh."""
        return pool_shapes(self.mesh, 1, 1, self.layout.mtp_layout, self.record, pages)
