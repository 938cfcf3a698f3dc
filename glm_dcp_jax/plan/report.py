"""The planner's answer as one object: `python -m glm_dcp_jax.plan --json` prints it, and tables are made of it."""

import sys
from dataclasses import replace
from typing import Any

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.plan.capacity import Capacity
from glm_dcp_jax.plan.decode_report import Load, by_arithmetic, compiled, paths_of, prefill_temporaries
from glm_dcp_jax.plan.flags import CONTEXT, Options
from glm_dcp_jax.plan.planned_model import PlannedModel, planned_model
from glm_dcp_jax.plan.remedies import Case, remedies
from glm_dcp_jax.plan.sketch import check_weights, sketch
from glm_dcp_jax.plan.weights import Parameters, parameters

NOTE = (
    "Times are modelled, none was measured: bytes over the data sheet's bandwidth, XLA's own estimates, our kernels' "
    "declared costs, and the stated link. Memory is XLA's plan of the compiled programs, or arithmetic."
)

_TIMES = (
    "modelled_step_ms",
    "modelled_draft_ms",
    "modelled_tokens_per_s",
    "ms_by_part",
    "floor_ms_by_part",
)


def answer(options: Options) -> dict[str, Any]:
    """Plan what the command line asks for. Raises ConfigError for flags that do not fit the model."""
    planned = planned_model(options.config)
    case = Case(options.config, planned, options.target, options.requests, options.context)
    _check(case, options)
    check_weights(sketch(case.config, case.planned, case.target))
    found = case.capacity()
    load = Load(
        options.requests, _context(options, found), options.link, options.kernel_seconds, options.layers
    )
    decode, found = _decode(case, found, load, options.compile)
    if not (found.weights_fit and found.holds_step):
        decode = {path: _without_times(figures) for path, figures in decode.items()}
    layers = options.layers if found.workspace is not None else None
    model = case.planned
    itemsize = 4 if model.config.dtype == "float32" else 2
    counted = parameters(found.leaves, model.weights, itemsize)
    fits = found.fits
    return {
        "note": NOTE,
        "model": model.name,
        "weights_stored": model.note + _without_mtp(model, found),
        "gpus": str(options.target),
        "memory_per_gpu_bytes": options.target.memory_bytes,
        "tensor_parallel_size": options.config.parallel.tensor_parallel_size,
        "decode_context_parallel_size": options.config.parallel.decode_context_parallel_size,
        "num_speculative_tokens": found.blueprint.drafts_each,
        "link": options.link._asdict(),
        "fits": fits,
        "weights_fit": found.weights_fit,
        "why_not": None if fits else _why_not(found, counted),
        "what_would_fit": remedies(case, found),
        "parameters": {
            "total": counted.total,
            "trunk": counted.trunk,
            "tensors": counted.tensors,
            "checkpoint_bytes": counted.nbytes,
            "checkpoint_bytes_without_mtp": counted.trunk_nbytes,
        },
        "kv_cache": found.cache(load.context),
        "memory_per_gpu": found.memory(),
        "decode_step": {
            "requests": load.requests,
            "context": load.context,
            "shortened_from": None if load.context == _wanted_context(options, found) else CONTEXT,
            "layers_compiled": layers,
        },
        "decode": decode,
    }


def _decode(case: Case, found: Capacity, load: Load, compile_steps: bool) -> tuple[dict[str, Any], Capacity]:
    """Figures by path, and the capacity with what was learnt of temporaries."""
    paths = paths_of(case)
    lacking = "" if found.weights_fit and found.holds_step else "cache" if found.weights_fit else "weights"
    if compile_steps and lacking:
        what = "the weights do not fit" if lacking == "weights" else "the cache does not hold the step"
        _say(f"{what}, so nothing is compiled: what follows is arithmetic")
    if not compile_steps or lacking:
        return {path: by_arithmetic(found, path, load) for path in paths}, found
    decode = {}
    for path in paths:
        _say(f"compiling decode path {path} for {case.target} ...")
        decode[path] = compiled(case, found, path, load)
    _say(f"compiling a prefill chunk for {case.target} ...")
    largest = max(prefill_temporaries(case, found, load), *(each["temporaries"] for each in decode.values()))
    return decode, replace(found, workspace=largest)


def _check(case: Case, options: Options) -> None:
    """Raise ConfigError for flags that the model cannot have."""
    model, length = case.planned.config, options.config.scheduler.max_model_len
    if options.config.speculative is not None:
        options.config.speculative.check_model(model)
    for name, tokens in (("max_model_len", length), ("--context", options.context)):
        if tokens is not None and tokens > model.max_position_embeddings:
            raise ConfigError(
                f"{name} {tokens} exceeds the model's max_position_embeddings {model.max_position_embeddings}"
            )
    if length is not None and options.context is not None and options.context > length:
        raise ConfigError(
            f"--context {options.context} exceeds max_model_len {length}; lower it, or raise that"
        )


def _context(options: Options, found: Capacity) -> int:
    """As asked for; else what plans are compared by, or as much as a request can have, or of that a half, a quarter...,
    whichever the cache holds if it holds any."""
    if options.context is not None:
        return options.context
    context = _wanted_context(options, found)
    held = max(found.pages - 1, 0) // options.requests * found.blueprint.layout.virtual_block
    while held and context > held:
        context //= 2
    return max(context, 1 + found.blueprint.drafts_each)


def _wanted_context(options: Options, found: Capacity) -> int:
    """Whether or not the cache holds it."""
    if options.context is not None:
        return options.context
    return min(CONTEXT, options.config.scheduler.max_model_len or found.model.max_position_embeddings)


def _without_mtp(model: PlannedModel, found: Capacity) -> str:
    if not model.has_mtp or any(leaf.part == "mtp" for leaf in found.leaves):
        return ""
    return "; the MTP layer's are not all there, or cannot be read, and are not counted"


def _without_times(figures: dict[str, Any]) -> dict[str, Any]:
    """Of a step that cannot be run: what it would exchange and read, and null for how long that would take."""
    return {name: None if name in _TIMES else figure for name, figure in figures.items()}


def _why_not(found: Capacity, counted: Parameters) -> str:
    target = found.target
    tp = found.blueprint.config.parallel.tensor_parallel_size
    loaded = counted.nbytes if found.blueprint.drafts_each else counted.trunk_nbytes
    there = f"{tp} x {target.memory_bytes / 1e9:.1f} GB"
    if loaded > tp * target.memory_bytes:
        without = "" if loaded == counted.nbytes else " (the MTP layer, which nothing drafts with, left out)"
        return f"weights of {loaded / 1e9:.0f} GB do not fit in {there}{without}"
    weights, workspace = found.weight_bytes / 1e9, found.needed_workspace / 1e9
    needed = f"weights take {weights:.1f} GB of each GPU, and steps {workspace:.1f} GB"
    allowed = f"of {target.memory_bytes / 1e9:.1f} GB {found.limit_bytes / 1e9:.1f} GB may be used"
    if not found.weights_fit:
        return f"{needed}, which leaves too little for a cache: {allowed}"
    if found.cache_is_given and found.needed_bytes > found.limit_bytes:
        cache = found.needed_bytes - found.weight_bytes - found.needed_workspace
        return f"the cache would take {cache / 1e9:.1f} GB; {needed}, and {allowed}"
    if not found.pages:
        return f"the cache gets {found.cache_budget:,} bytes, fewer than two pages of {found.page_bytes:,}"
    if found.usable_tokens < found.asked_length:
        return (
            f"the cache holds {found.usable_tokens:,} tokens, fewer than one request of max_model_len "
            f"{found.asked_length:,} has; {needed}"
        )
    tokens = found.context or 1 + found.blueprint.drafts_each
    return (
        f"a decode step of {found.requests} x {tokens:,} tokens takes {found.step_pages:,} pages of "
        f"{found.blueprint.layout.virtual_block}, and the cache has {found.pages - 1:,}; {needed}"
    )


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
