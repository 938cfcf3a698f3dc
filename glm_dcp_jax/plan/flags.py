"""The command line of `python -m glm_dcp_jax.plan`: the engine's flags as the server takes them, and the plan's own."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from glm_dcp_jax._version import __version__
from glm_dcp_jax.config import ConfigError, EngineConfig, flags_file
from glm_dcp_jax.config.engine import at_least
from glm_dcp_jax.kernels.sparse_attention import MOST_ROWS
from glm_dcp_jax.parallel.link import Link
from glm_dcp_jax.plan.gpus import Target, known_gpus, target
from glm_dcp_jax.plan.link import LINKS, default_link, parse_link
from glm_dcp_jax.plan.planned_step import LAYERS
from glm_dcp_jax.plan.presets import PRESETS
from glm_dcp_jax.serve import flags as server_flags

CONTEXT = 131_072
MOST_KERNEL_US = 1e6
_TP = ("-tp", "--tensor-parallel-size")


@dataclass(frozen=True)
class Options:
    """A command line, understood. context: None for one that suits what fits. kernel_seconds: that a kernel takes at
    least. floor: whether to print how far each part of a step is from the least it could be. png: where to draw."""

    config: EngineConfig
    target: Target
    requests: int
    context: int | None
    link: Link
    compile: bool
    layers: str
    kernel_seconds: float
    floor: bool
    json: bool
    png: Path | None


def parse(argv: Sequence[str]) -> Options:
    """Read a command line. Raises ConfigError for what cannot be; --help and --version exit."""
    words = [server_flags.with_dashes(word) for word in argv]
    parser = _parser()
    file, words = flags_file.split_off(words)
    if file is not None:
        words = [*words, *server_flags.words_of_file(file, words, [parser, server_flags.make_parser()])]
    given, engine = parser.parse_known_args(words)
    tp = _given_tp(engine)
    gpus = target(given.gpus, count=tp or 1)
    if tp is None:
        engine = [*engine, "-tp", str(gpus.count)]
    # With a GPU said to be there, the server's parser suggests nothing of its own.
    config = server_flags.parse(["--model", given.model, *engine], has_gpu=True).config
    if config.parallel.tensor_parallel_size > gpus.count:
        raise ConfigError(
            f"tensor_parallel_size {config.parallel.tensor_parallel_size} needs as many GPUs, but --gpus names "
            f"{gpus}; lower it, or name more GPUs"
        )
    drafts = config.speculative.num_speculative_tokens if config.speculative else 0
    at_least("--concurrency", given.concurrency, 1, MOST_ROWS // (1 + drafts))
    if given.context is not None:
        at_least("--context", given.context, 1 + drafts)
    if not 0 <= given.kernel_us <= MOST_KERNEL_US:
        raise ConfigError(f"--kernel-us must be from 0 to {MOST_KERNEL_US:g}, but is {given.kernel_us}")
    if given.no_compile and given.floor:
        raise ConfigError("--floor needs a compiled step; leave --no-compile out")
    return Options(
        config,
        gpus,
        given.concurrency,
        given.context,
        default_link(gpus.gpu) if given.link is None else parse_link(given.link),
        not given.no_compile,
        given.layers,
        given.kernel_us * 1e-6,
        given.floor,
        given.json,
        given.png,
    )


def explain(error: ConfigError) -> str:
    """What was wrong, in the words of the command line."""
    return server_flags.explain(error)


def _given_tp(words: Sequence[str]) -> int | None:
    """The tensor parallel size, if it is among the engine's flags."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(*_TP, type=int)
    known, _ = parser.parse_known_args(words)
    return known.tensor_parallel_size


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')} (--help lists the flags)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m glm_dcp_jax.plan",
        usage="%(prog)s --model MODEL --gpus COUNTxGPU [-tp N] [-dcp N] [--no-compile] [flags of the engine]",
        description="What a model needs on GPUs that are not here: the memory of each, tokens of the cache, and what a "
        "decode step waits for and takes, by a model. It needs no GPU, and of weights the files' headers alone. All "
        "flags that are not listed here are the engine's, as `python -m glm_dcp_jax.serve --help` lists them.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=__version__)
    add("--model", required=True, help=f"{', '.join(PRESETS)}, or a directory with config.json")
    add(
        "--gpus",
        required=True,
        metavar="COUNTxGPU",
        help=f"as 8xH200, of {', '.join(known_gpus())}; or a description's file, as 8xmy_gpu.txtpb (docs/planner.md)",
    )
    add(flags_file.OPTION, metavar="FILE", help=flags_file.HELP)
    add("--concurrency", type=int, default=1, help="requests of a decode step (default: 1)")
    add("--context", type=int, help=f"tokens of each request (default: {CONTEXT}, or less if less fits)")
    add("--no-compile", action="store_true", help="answer by arithmetic alone, in seconds")
    add("--layers", choices=LAYERS, default="short", help="layers that are compiled (default: short)")
    add(
        "--link",
        help=f"between GPUs: {', '.join(LINKS)}, or BANDWIDTH,LATENCY in bytes/s and s (default: the GPUs')",
    )
    add("--kernel-us", type=float, default=0.0, help="what every kernel takes at least, in us (default: 0)")
    add("--floor", action="store_true", help="print each part of a step next to the least it could take")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--png", type=Path, metavar="FILE", help="draw the memory of each GPU")
    return parser
