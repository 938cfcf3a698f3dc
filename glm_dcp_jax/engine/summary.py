"""What an engine serves and how, in one line for the log."""

from glm_dcp_jax.engine.blueprint import Blueprint


def summary_of(blueprint: Blueprint, max_model_len: int) -> str:
    """Layout, formats, length and drafts, as flags and config.json came to."""
    parallel, drafts = blueprint.config.parallel, blueprint.drafts_each
    quantisation = blueprint.model.quantisation
    weights = "not quantised"
    if blueprint.weights.quantised:
        weights = "quantised" if quantisation is None else f"quantised by {quantisation.method}"
    return ", ".join(
        (
            f"tensor parallel size {parallel.tensor_parallel_size}",
            f"decode context parallel size {parallel.decode_context_parallel_size}",
            f"dtype {blueprint.formats.compute}",
            f"weights {weights}",
            f"KV cache {blueprint.record.name}",
            f"max model len {max_model_len}",
            f"{drafts} drafts a step" if drafts else "no drafts",
        )
    )
