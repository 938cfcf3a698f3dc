"""What would fit where something does not: each change is tried, with the same arithmetic."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from glm_dcp_jax.config import ConfigError, EngineConfig, ProcessConfig
from glm_dcp_jax.plan.capacity import Capacity
from glm_dcp_jax.plan.gpus import MAX_COUNT, Target, known_gpus, target
from glm_dcp_jax.plan.planned_model import PlannedModel
from glm_dcp_jax.plan.presets import fp8_formats, nvfp4_formats, split_group
from glm_dcp_jax.plan.sketch import all_leaves, sketch

_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_EXPERTS_STEP = 8
_CACHE_TOKENS = 131_072
"""What a cache is to hold at least where experts are cut down for it."""
_SMALLER_RECORDS = ("fp8_ds_mla", "nvfp4_ds_mla")


@dataclass(frozen=True)
class Case:
    """A plan's question: which model, on what, with which flags. requests, context: of a decode step; see Capacity."""

    config: EngineConfig
    planned: PlannedModel
    target: Target
    requests: int = 1
    context: int | None = None

    def capacity(self, workspace: int | None = None) -> Capacity:
        """The answer by arithmetic. workspace: of the largest step, where it was compiled."""
        blueprint = sketch(self.config, self.planned, self.target)
        leaves = all_leaves(blueprint, self.planned.has_mtp)
        longest = self.config.scheduler.max_model_len
        most = self.planned.config.max_position_embeddings
        found = Capacity(
            blueprint, self.target, leaves, longest or most, workspace, self.requests, self.context
        )
        if longest is None and found.usable_tokens:
            return replace(found, longest=min(most, found.usable_tokens))
        return found

    def on(self, gpus: Target, dcp: int | None = None) -> "Case":
        """The same on all of these GPUs. dcp: None for as it was, or as large as it can be up to that."""
        parallel, count = self.config.parallel, gpus.count
        if dcp is None:
            whole = parallel.decode_context_parallel_size == parallel.tensor_parallel_size
            most = count if whole else parallel.decode_context_parallel_size
            dcp = max(size for size in range(1, most + 1) if count % size == 0)
        shards = parallel.dcp_indexer_shards
        fitting = replace(
            parallel,
            tensor_parallel_size=count,
            decode_context_parallel_size=dcp,
            dcp_indexer_shards=shards if dcp % shards == 0 else 1,
        )
        config = replace(self.config, parallel=fitting, processes=ProcessConfig())
        return replace(self, config=config, target=gpus)


def remedies(case: Case, found: Capacity) -> list[dict[str, Any]]:
    """Changes after which the plan fits, as {`change`, `weights_per_gpu`, `tokens`}; none where it fits as it is.

    found: what fits of the case as it is.
    """
    if found.fits:
        return []
    changes = _of_the_cache(case, found) if found.weights_fit else _of_the_weights(case, found)
    return list(changes)


def _of_the_cache(case: Case, found: Capacity) -> Iterator[dict[str, Any]]:
    """The weights fit, but not the cache that was asked for, or not a request of the length that was, or the step."""
    config, cache, parallel = case.config, case.config.cache, case.config.parallel
    free = found.limit_bytes - found.weight_bytes - found.needed_workspace
    least = found.least_cache
    if found.cache_is_given and found.needed_bytes > found.limit_bytes:
        yield _change(f"{_cache_flag(found, free)}, or less", found.weight_bytes, _tokens(found, free))
    elif found.cache_is_given and least <= free:
        yield _change(f"{_cache_flag(found, least)}, or more", found.weight_bytes, _tokens(found, least))
    if 1 < found.usable_tokens < found.asked_length:
        yield _change(f"--max-model-len {found.usable_tokens}", found.weight_bytes, found.usable_tokens)
    elif found.pages and not found.holds_step:
        yield from _smaller_steps(found)
    if parallel.decode_context_parallel_size < (tp := parallel.tensor_parallel_size):
        yield from _if_it_fits(f"-dcp {tp}", lambda: case.on(replace(case.target, count=tp), dcp=tp))
    for name in _SMALLER_RECORDS:
        smaller = replace(cache, kv_cache_dtype=name, nvfp4_rope_dtype="bfloat16", nvfp4_scales=None)
        answer = _answer(partial(replace, case, config=replace(config, cache=smaller)))
        if answer and answer.fits and answer.page_bytes < found.page_bytes:
            yield _change(f"--kv-cache-dtype {name}", answer.weight_bytes, answer.usable_tokens)
    if not found.cache_is_given:
        yield from _more_gpus(case, found, "")


def _smaller_steps(found: Capacity) -> Iterator[dict[str, Any]]:
    """The longest context of as many requests, and the most requests of the context."""
    layout, least, held = found.blueprint.layout, 1 + found.blueprint.drafts_each, found.pages - 1
    context, requests = (
        held // found.requests * layout.virtual_block,
        held // layout.pages_for(found.context or least),
    )
    if found.context is not None and context >= least:
        yield _change(f"--context {context}", found.weight_bytes, found.usable_tokens)
    if requests:
        yield _change(f"--concurrency {requests}", found.weight_bytes, found.usable_tokens)


def _cache_flag(found: Capacity, nbytes: int) -> str:
    """The flag that the cache's size was given by, with another size."""
    if found.blueprint.config.cache.num_gpu_blocks_override is not None:
        return f"--num-gpu-blocks-override {nbytes // found.page_bytes - 1}"
    return f"--kv-cache-memory-bytes {nbytes}"


def _of_the_weights(case: Case, found: Capacity) -> Iterator[dict[str, Any]]:
    config = case.config
    if config.speculative is not None:
        yield from _if_it_fits(
            "no drafts: leave --speculative-config out",
            lambda: replace(case, config=replace(config, speculative=None)),
        )
    yield from _more_gpus(case, found, "")
    yield from _other_gpus(case, found)
    for what, smaller in _smaller_forms(case.planned):
        tried = replace(case, planned=smaller)
        answer = tried.capacity()
        if answer.fits:
            yield _change(what, answer.weight_bytes, answer.usable_tokens)
        else:
            yield from _more_gpus(tried, answer, f"{what}, and ")
    yield from _fewer_experts(case, found)


def _more_gpus(case: Case, found: Capacity, also: str) -> Iterator[dict[str, Any]]:
    """The smallest number of GPUs of the kind that is enough. also: what else was changed."""
    now, gpu = case.config.parallel.tensor_parallel_size, case.target.gpu
    for count in _COUNTS:
        if count <= now or found.weight_bytes * now > count * found.usable_bytes:
            continue
        more = replace(case.target, count=count)
        answer = _answer(partial(case.on, more))
        if answer and answer.fits:
            dcp = answer.blueprint.layout.world
            hosts = (
                ""
                if count <= MAX_COUNT
                else f", on {-(-count // MAX_COUNT)} hosts (which plans are not made for)"
            )
            change = f"{also}{count}x{gpu}, with -tp {count} -dcp {dcp}{hosts}"
            yield _change(change, answer.weight_bytes, answer.usable_tokens)
            return


def _other_gpus(case: Case, found: Capacity) -> Iterator[dict[str, Any]]:
    """As many GPUs of another kind that have more memory."""
    count = case.config.parallel.tensor_parallel_size
    for gpu in known_gpus():
        other = target(f"{min(count, MAX_COUNT)}x{gpu}")
        if other.memory_bytes > max(case.target.memory_bytes, found.weight_bytes):
            more = replace(other, count=count)
            yield from _if_it_fits(f"{count}x{gpu}", partial(replace, case, target=more))


def _smaller_forms(planned: PlannedModel) -> Iterator[tuple[str, PlannedModel]]:
    """Other forms of the same weights that have fewer bytes."""
    model, kinds = planned.config, _kinds(planned)
    forms = []
    if not kinds:
        forms.append(("FP8 weights", "glm-5.2-fp8", fp8_formats(model)))
    if "nvfp4" not in kinds and any(model.sparse) and split_group(model) is None:
        forms.append(("experts in NVFP4", "glm-5.2-nvfp4", nvfp4_formats(model)))
    for what, name, weights in forms:
        called = f"{what} (--model {name})" if planned.form else what
        yield called, replace(planned, weights=weights, form=name if planned.form else None)


def _kinds(planned: PlannedModel) -> set[str]:
    """What the experts, or where there are none the feed-forward layers, are stored as, plain left out."""
    layer = planned.config.num_hidden_layers - 1
    middle = "experts.0.gate_proj" if planned.config.sparse[layer] else "gate_proj"
    kind: str = planned.weights.of(f"model.layers.{layer}.mlp.{middle}.weight").kind
    return {kind} - {"plain"}


def _fewer_experts(case: Case, found: Capacity) -> Iterator[dict[str, Any]]:
    """The most experts of each layer that fit, and bits of a routed weight at which all of them would."""
    model, parallel = case.planned.config, case.config.parallel
    loaded = [leaf for leaf in found.leaves if leaf.part != "mtp" or found.blueprint.drafts_each]
    routed = sum(leaf.nbytes for leaf in loaded if leaf.inner == "routed_experts")
    if not routed:
        return
    asked = max(found.asked_length, min(_CACHE_TOKENS, model.max_position_embeddings))
    least = max((1 + found.blueprint.layout.pages_for(asked)) * found.page_bytes, found.least_cache)
    room = found.limit_bytes - (found.weight_bytes - routed) - found.needed_workspace - least
    step = max(_EXPERTS_STEP, parallel.tensor_parallel_size if parallel.enable_expert_parallel else 1)
    most = room * model.n_routed_experts // routed // step * step
    if most >= model.num_experts_per_tok:
        left = found.weight_bytes - routed + routed * most // model.n_routed_experts
        tokens = _tokens(found, found.limit_bytes - left - found.needed_workspace)
        yield _change(f"{most} of the {model.n_routed_experts} experts of each layer kept", left, tokens)
    elements = sum(_elements(leaf) for leaf in loaded if leaf.inner == "routed_experts")
    if room > 0 and 8 * room / elements >= 1:
        bits = int(80 * room / elements) / 10
        yield _change(
            f"routed experts of {bits} bits a weight, instead of {8 * routed / elements:.1f}: no such format can be "
            "loaded yet",
            found.weight_bytes - routed + room,
            asked,
        )


def _elements(leaf: Any) -> int:
    """Weights of a quantised weight's codes, or of a plain one's values; none of scales."""
    if leaf.keys[-1] not in ("codes", "values"):
        return 0
    count = 1
    for size in leaf.shape:
        count *= size
    return 2 * count if leaf.source.stored.kind == "nvfp4" else count


def _if_it_fits(change: str, make: Callable[[], Case]) -> Iterator[dict[str, Any]]:
    answer = _answer(make)
    if answer and answer.fits:
        yield _change(change, answer.weight_bytes, answer.usable_tokens)


def _answer(make: Callable[[], Case]) -> Capacity | None:
    """What fits of a changed case; None for a change that the other flags do not allow."""
    try:
        return make().capacity()
    except ConfigError:
        return None


def _tokens(found: Capacity, cache_bytes: int) -> int:
    """Tokens that a cache of so many bytes on each GPU holds."""
    return max(cache_bytes // found.page_bytes - 1, 0) * found.blueprint.layout.virtual_block


def _change(change: str, weights: int, tokens: int) -> dict[str, Any]:
    return {"change": change, "weights_per_gpu": weights, "tokens": tokens}
