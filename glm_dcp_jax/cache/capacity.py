"""How many pages fit into how many bytes, and the two lines people plan capacity by."""

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.config import ConfigError, ModelConfig

GIB = 2**30


def page_bytes(model: ModelConfig, layout: Layout, record: RecordFormat, mtp_layers: int = 0) -> int:
    """Bytes of one page on each device: B own records a layer, and B * W / S index keys a Full layer.

    mtp_layers: those that draft; each has B own records and B own index keys (`mtp_layout`).
    """
    records = model.num_hidden_layers * layout.block_size * record.record_bytes
    index_keys = model.num_full_layers * layout.index_layout.block_size * record.index.key_bytes
    drafting = mtp_layers * layout.block_size * (record.record_bytes + record.index.key_bytes)
    return records + index_keys + drafting


def pages_in(
    memory_bytes: int, model: ModelConfig, layout: Layout, record: RecordFormat, mtp_layers: int = 0
) -> int:
    """Pages (null page included) that memory_bytes per device hold. Raises ConfigError if not even two fit."""
    each = page_bytes(model, layout, record, mtp_layers)
    pages = memory_bytes // each
    if pages < 2:
        raise ConfigError(
            f"the cache gets {memory_bytes:,} bytes per device, but one page of {layout.virtual_block} tokens takes "
            f"{each:,} and the smallest cache has 2 (one is reserved); raise --kv-cache-memory-bytes, or lower "
            "--block-size"
        )
    return pages


def capacity_tokens(num_pages: int, layout: Layout) -> int:
    """Tokens the cache holds: every page but the reserved null page, over all ranks."""
    return (num_pages - 1) * layout.virtual_block


def check_max_model_len(wanted: int | None, model: ModelConfig) -> None:
    """Raise ConfigError for a length beyond the model's positions, which needs no weights to be known."""
    if wanted is not None and wanted > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {wanted} exceeds the model's max_position_embeddings {model.max_position_embeddings}"
        )


def resolve_max_model_len(wanted: int | None, model: ModelConfig, num_pages: int, layout: Layout) -> int:
    """The longest sequence to serve: `wanted`, or as long as both the model and the cache allow.

    Raises ConfigError when `wanted` exceeds either.
    """
    tokens = capacity_tokens(num_pages, layout)
    if wanted is None:
        return min(model.max_position_embeddings, tokens)
    check_max_model_len(wanted, model)
    if wanted > tokens:
        raise ConfigError(
            f"one request of max_model_len {wanted} does not fit the cache, which holds {tokens} tokens; lower "
            "--max-model-len, give the cache more memory, or raise --decode-context-parallel-size"
        )
    return wanted


def capacity_lines(num_pages: int, layout: Layout, max_model_len: int) -> tuple[str, str]:
    """vLLM's two start-up lines about the cache."""
    tokens = capacity_tokens(num_pages, layout)
    longest = layout.pages_for(max_model_len)
    return (
        f"GPU KV cache size: {tokens:,} tokens",
        f"Maximum concurrency for {max_model_len:,} tokens per request: {(num_pages - 1) / longest:.2f}x",
    )
