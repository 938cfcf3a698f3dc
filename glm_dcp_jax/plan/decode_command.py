"""The command that prints `decode_schedule`'s figures as JSON."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glm_dcp_jax import environment
from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.config.engine import COMM_BACKENDS, RECORD_FORMATS, TRANSPORTS
from glm_dcp_jax.config.flags import in_flags
from glm_dcp_jax.kernels.sparse_attention import MOST_ROWS
from glm_dcp_jax.parallel.link import Link
from glm_dcp_jax.plan.decode_schedule import MOST_DRAFTS, NOTE, PATHS, DecodeStep, report
from glm_dcp_jax.plan.gpus import known_gpus, target
from glm_dcp_jax.plan.link import LINKS, default_link, parse_link
from glm_dcp_jax.plan.output import put_out
from glm_dcp_jax.plan.planned_step import LAYERS
from glm_dcp_jax.plan.shortened import said

MOST_KERNEL_US = 1e6
_SPELLED = {
    "tensor_parallel_size": "--tp",
    "decode_context_parallel_size": "--dcp",
    "dcp_comm_backend": "--dcp-comm-backend",
    "dcp_indexer_shards": "--dcp-indexer-shards",
    "dcp_transport": "--transport",
    "kv_cache_dtype": "--kv-cache-dtype",
    "cp_kv_cache_interleave_size": "--interleave",
    "step_segments": "--segments",
}
"""What this command calls the engine's settings."""


@dataclass(frozen=True)
class Command:
    """What was asked for. steps: one per path. least_seconds: of any kernel."""

    steps: tuple[DecodeStep, ...]
    link: Link
    least_seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Print the JSON. Returns the exit code: 2 for flags that cannot be, which stderr explains, else put_out's."""
    environment.prepare(1)
    try:
        command = parse(sys.argv[1:] if argv is None else argv)
        printed = figures(command)
    except ConfigError as error:
        print(f"error: {in_flags(str(error), _SPELLED)}", file=sys.stderr)
        return 2
    return put_out(json.dumps(printed, indent=1, allow_nan=False))


def parse(argv: Sequence[str]) -> Command:
    """Read the flags. Raises ConfigError for values that cannot be; argparse itself exits for what is no flag."""
    flags = _parser().parse_args(argv)
    where = target(flags.target)
    tp = where.count if flags.tp is None else flags.tp
    if not 0 <= flags.kernel_us <= MOST_KERNEL_US:
        raise ConfigError(f"--kernel-us must be from 0 to {MOST_KERNEL_US:g}, but is {flags.kernel_us}")
    steps = (
        DecodeStep(
            where,
            path,
            dcp=tp if flags.dcp is None else flags.dcp,
            tp=tp,
            requests=flags.concurrency,
            drafts=flags.mtp,
            context=flags.context,
            kv_cache_dtype=flags.kv_cache_dtype,
            interleave=flags.interleave,
            transport=flags.transport,
            comm_backend=flags.dcp_comm_backend,
            indexer_shards=flags.dcp_indexer_shards,
            layers=flags.layers,
            segments=flags.segments,
        )
        for path in _paths(flags.path)
    )
    link = default_link(where.gpu) if flags.link is None else parse_link(flags.link)
    return Command(tuple(steps), link, flags.kernel_us * 1e-6)


def figures(command: Command) -> dict[str, Any]:
    """Compile each step and say what it waits for."""
    step = command.steps[0]
    return {
        "note": NOTE,
        "target": str(step.target),
        "tp": step.tp,
        "dcp": step.dcp,
        "requests": step.requests,
        "rows_per_request": step.rows,
        "context": step.context,
        "kv_cache_dtype": step.kv_cache_dtype,
        "interleave": step.interleave,
        "transport": step.blueprint.transport._asdict(),
        "dcp_comm_backend": step.comm_backend,
        "dcp_indexer_shards": step.indexer_shards,
        "compiler_options": step.blueprint.steps.compiler_options,
        "layers": _layers(step),
        "link": command.link._asdict(),
        "kernel_us": command.least_seconds * 1e6,
        "paths": {each.path: _path(each, command) for each in command.steps},
    }


def _path(step: DecodeStep, command: Command) -> dict[str, Any]:
    print(f"compiling {step.path} for {step.target} ...", file=sys.stderr, flush=True)
    programs = step.compile()
    schedules = [program.schedule for program in programs]
    return report(step, programs, step.timeline(schedules, command.link, command.least_seconds))


def _layers(step: DecodeStep) -> str:
    if step.layers == "full":
        return f"all 78 were compiled, as {step.blueprint.segments} programs"
    return said(step.planned.part, step.model)


def _paths(words: Sequence[str]) -> tuple[str, ...]:
    """`all`, or the named ones, each once, in the order of PATHS."""
    allowed = f"use {', '.join(PATHS)}, several of them, or all"
    asked = {name for word in words for name in word.split(",") if name}
    if not asked:
        raise ConfigError(f"--path names none; {allowed}")
    for name in sorted(asked - {"all", *PATHS}):
        raise ConfigError(f"there is no --path {name!r}; {allowed}")
    return tuple(path for path in PATHS if path in asked or "all" in asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dcp_schedule",
        description="Compile a decode step of GLM-5.2 for GPUs that are not here, and print as JSON which collectives "
        f"block, which are hidden, what they move and what the step waits for. {NOTE}",
    )
    add = parser.add_argument
    add("--target", required=True, help=f"COUNTxGPU, as 8xH200; GPUs: {', '.join(known_gpus())}")
    add("--tp", type=int, help="tensor parallel size (default: the target's count)")
    add("--dcp", type=int, help="decode context parallel size (default: tp)")
    add("--path", nargs="+", default=["all"], help=f"{', '.join(PATHS)}, several of them, or all (default)")
    add(
        "--concurrency",
        type=int,
        default=1,
        help=f"requests of a step: at most {MOST_ROWS} rows, and what the GPUs' memory holds (default: 1)",
    )
    add(
        "--mtp",
        type=int,
        default=0,
        help=f"drafts beside each request's token, at most {MOST_DRAFTS} (default: 0)",
    )
    add("--context", type=int, default=131_072, help="tokens of each request (default: 131072)")
    add(
        "--kv-cache-dtype",
        default="nvfp4_ds_mla",
        help=f"{', '.join(RECORD_FORMATS)} (default: nvfp4_ds_mla)",
    )
    add(
        "--dcp-comm-backend",
        default="ag_rs",
        help=f"path queries: how partial outputs are merged, {' or '.join(COMM_BACKENDS)} (default: ag_rs)",
    )
    add("--dcp-indexer-shards", type=int, default=1, help="parts of the index keys; divides dcp (default: 1)")
    add("--interleave", type=int, default=1, help="consecutive tokens kept on one rank (default: 1)")
    add("--transport", default="auto", help=f"{', '.join(TRANSPORTS)} (default: auto, by the GPUs' link)")
    add("--link", help=f"{', '.join(LINKS)}, or BANDWIDTH,LATENCY in bytes/s and s (default: the GPU's)")
    add("--layers", default="short", help=f"what is compiled: {' or '.join(LAYERS)} (default: short)")
    add("--segments", type=int, help="with --layers full: programs of a step (default: the engine's)")
    add(
        "--kernel-us",
        type=float,
        default=0.0,
        help="what every kernel takes at least, in us; at most 1e6 (default: 0)",
    )
    return parser
