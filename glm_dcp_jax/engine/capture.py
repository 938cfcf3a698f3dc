"""Looking inside: logits of every prompt token, and on request hidden states, selections and router choices."""

from dataclasses import dataclass

import numpy as np

from glm_dcp_jax.cache.allocator import PageTable
from glm_dcp_jax.engine.batch import Line
from glm_dcp_jax.engine.engine import Engine
from glm_dcp_jax.engine.steps import StepOutput


@dataclass(frozen=True)
class Capture:
    """One sequence of T tokens through the network.

    logits: [T, V] float32. hidden: [layers + 1, T, H] float32, the embedding, then each layer's output.
    selections: {Full layer: [T, K] int32}, positions ascending, -1 behind. router_ids, router_weights: {layer with
    experts: [T, experts per token]}, ids ascending.
    """

    logits: np.ndarray
    hidden: np.ndarray
    selections: dict[int, np.ndarray]
    router_ids: dict[int, np.ndarray]
    router_weights: dict[int, np.ndarray]


def compute_logits(engine: Engine, token_ids: list[int], capture: bool) -> np.ndarray | Capture:
    """Prefill token_ids through the paged cache in chunks, as serving does. The engine must be idle.

    Raises ValueError for prompts that cannot run and RuntimeError while requests are running.
    """
    if engine.has_unfinished:
        raise RuntimeError("compute_logits needs an idle engine; finish or abort the running requests first")
    if not token_ids:
        raise ValueError("the prompt is empty; it needs at least one token")
    engine.check_tokens(token_ids)
    if len(token_ids) > engine.max_model_len:
        raise ValueError(f"{len(token_ids)} tokens exceed max_model_len {engine.max_model_len}")
    table = PageTable(engine.scheduler.allocator, engine.runner.layout)
    table.grow(len(token_ids))
    chunks: list[Capture] = []
    try:
        chunk = engine.runner.buckets.largest_chunk
        for start in range(0, len(token_ids), chunk):
            line = Line(token_ids[start : start + chunk], start, table.pages)
            _, out = engine.runner.prefill([line], all_logits=True, capture=capture)
            chunks.append(_unpack(engine, out, len(line.tokens)))
    except BaseException:  # an interrupt too
        table.release()
        engine.reset_prefix_cache()  # a step that fails takes the cache with it
        raise
    table.release()
    return _join(chunks) if capture else np.concatenate([part.logits for part in chunks])


def _unpack(engine: Engine, out: StepOutput, rows: int) -> Capture:
    """One chunk's logits and traces by layer. Traces are stacked by stage: [groups, members of a group, rows, ...]."""
    model, logits = engine.model_config, np.asarray(out.logits)[:rows]
    stages = engine.runner.blueprint.shape.stages
    if out.traces is None:
        return Capture(logits, np.empty(0), {}, {}, {})
    hidden = [np.asarray(out.embedded, np.float32)[:rows]]
    selections, router_ids, router_weights = {}, {}, {}
    for run, trace in zip(stages, out.traces, strict=True):
        for group in range(run.num_groups):
            selection = trace.selections[0]
            chosen = selection.positions if selection.mask is None else selection.mask
            one = np.asarray(chosen[group])[0][:rows]
            selections[run.layer(group, 0)] = _ascending(one, selection.mask is not None, model.index_topk)
            experts = iter(range(sum(run.sparse)))
            for member, sparse in enumerate(run.sparse):
                hidden.append(np.asarray(trace.hidden[group][member], np.float32)[:rows])
                if sparse:
                    layer, at = run.layer(group, member), next(experts)
                    ids = np.asarray(trace.experts[group][at])[:rows]
                    order = np.argsort(ids, axis=1)
                    router_ids[layer] = np.take_along_axis(ids, order, axis=1)
                    weights = np.asarray(trace.weights[group][at])[:rows]
                    router_weights[layer] = np.take_along_axis(weights, order, axis=1)
    return Capture(logits, np.stack(hidden), selections, router_ids, router_weights)


def _ascending(chosen: np.ndarray, is_mask: bool, k: int) -> np.ndarray:
    """Positions or a mask as positions ascending, -1 behind, [rows, k]."""
    found = np.full((len(chosen), k), -1, np.int32)
    for row, entry in enumerate(chosen):
        positions = np.flatnonzero(entry) if is_mask else np.sort(entry[entry >= 0])
        found[row, : len(positions)] = positions
    return found


def _join(parts: list[Capture]) -> Capture:
    along = lambda name: {  # noqa: E731
        layer: np.concatenate([getattr(part, name)[layer] for part in parts])
        for layer in getattr(parts[0], name)
    }
    return Capture(
        np.concatenate([part.logits for part in parts]),
        np.concatenate([part.hidden for part in parts], axis=1),
        along("selections"),
        along("router_ids"),
        along("router_weights"),
    )
