"""The command line of scripts/bench_transfer.py, checked before anything is measured."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.config import ConfigError, ParallelConfig
from glm_dcp_jax.config.engine import MAX_BLOCK_SIZE, MAX_VIRTUAL_DEVICES
from glm_dcp_jax.config.transfer import CONNECTORS, TransferConfig

MEASURES = ("throughput", "handover")
RECORDS = ("bfloat16", "fp8_ds_mla", "nvfp4_ds_mla", "float32")
_SIZES = {"tp": MAX_VIRTUAL_DEVICES, "dcp": MAX_VIRTUAL_DEVICES, "block": MAX_BLOCK_SIZE}
_SIZES |= {"interleave": MAX_BLOCK_SIZE, "shards": MAX_VIRTUAL_DEVICES}
_MOST_TOKENS, _MOST_LAYERS, _MOST_REPEATS = 2**20, 1024, 10_000
_SLAB_BYTES, _PIECES_IN_SLAB = 256 * 2**20, 4


@dataclass(frozen=True)
class EngineLayout:
    """How one engine lays out its caches: tp ranks, and the layout. Its text is what the flag takes."""

    tp: int
    layout: Layout

    @staticmethod
    def of(text: str) -> "EngineLayout":
        """Such as "tp4 dcp2 block64 interleave1 shards1". Raises ConfigError for what cannot be."""
        sizes = {"tp": 1, "dcp": 1, "block": 64, "interleave": 1, "shards": 1}
        for word in text.split():
            found = re.fullmatch(r"([a-z]+)(\d{1,9})", word)
            if found is None or found[1] not in sizes:
                raise ConfigError(
                    f"{word!r} is no size of a layout; these are {', '.join(sizes)}, such as tp4 dcp2"
                )
            most = _SIZES[found[1]]
            if not 1 <= int(found[2]) <= most:
                raise ConfigError(f"{found[1]} must be from 1 to {most}, but is {found[2]}")
            sizes[found[1]] = int(found[2])
        ParallelConfig(sizes["tp"], sizes["dcp"], dcp_indexer_shards=sizes["shards"])
        layout = Layout(sizes["block"], sizes["dcp"], sizes["interleave"], sizes["shards"])
        return EngineLayout(sizes["tp"], layout)

    def __str__(self) -> str:
        layout = self.layout
        words = [f"tp{self.tp}", f"dcp{layout.world}", f"block{layout.block_size}"]
        return " ".join([*words, f"interleave{layout.interleave}", f"shards{layout.index_shards}"])


def transfer_settings(connector: str, piece_bytes: int, role: str = "kv_both") -> dict[str, Any]:
    """--kv-transfer-config of one side, with deadlines that a slow machine keeps."""
    extra: dict[str, Any] = {"piece_bytes": piece_bytes, "handshake_seconds": 60.0, "lease_seconds": 300.0}
    if connector == "nixl":
        extra["slab_bytes"] = max(_SLAB_BYTES, _PIECES_IN_SLAB * piece_bytes)
    return {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra}


def parse(arguments: list[str], description: str | None = None) -> argparse.Namespace:
    """The flags; producer and consumer as EngineLayouts. Exits with 2 for what cannot work."""
    parser = argparse.ArgumentParser(
        prog="bench_transfer.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_pair(parser.add_argument_group("the pair of engines"))
    _add_throughput(parser.add_argument_group("throughput"))
    _add_handover(parser.add_argument_group("handover"))
    _add_results(parser.add_argument_group("results"))
    given = parser.parse_args(arguments)
    given.command = arguments
    wrong = _wrong_together(given)
    if wrong:
        parser.error(wrong)
    return given


def _add_pair(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--measure", nargs="+", choices=MEASURES, default=list(MEASURES), help="what (default: both)"
    )
    for side, sizes in (("producer", "tp4 dcp4"), ("consumer", "tp2 dcp2")):
        group.add_argument(
            f"--{side}",
            type=_layout,
            default=EngineLayout.of(sizes),
            metavar="SIZES",
            help=f"its layout, tp, dcp, block, interleave and shards in one text (default: '{sizes} block64')",
        )
    group.add_argument(
        "--transport",
        nargs="+",
        choices=CONNECTORS,
        default=list(CONNECTORS),
        help="default: all four; a hand-over is between two processes, which inproc cannot do",
    )
    group.add_argument(
        "--piece-bytes",
        type=_whole(1, 2**40),
        default=64 * 2**20,
        metavar="N",
        help="what travels at once (default: 64 MiB)",
    )
    group.add_argument(
        "--repeat",
        type=_whole(1, _MOST_REPEATS),
        default=5,
        metavar="N",
        help="of every measurement, behind one that is not counted (default: 5)",
    )


def _add_throughput(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tokens",
        type=_whole(1, _MOST_TOKENS),
        nargs="+",
        default=[1024, 4096],
        metavar="N",
        help="of a request (default: 1024 4096)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        nargs="+",
        choices=RECORDS,
        default=["fp8_ds_mla", "nvfp4_ds_mla"],
        help="records (default: fp8_ds_mla nvfp4_ds_mla; on a CPU XLA converts all of a bfloat16 pool for each piece)",
    )
    group.add_argument("--layers", type=_whole(1, _MOST_LAYERS), default=78, metavar="N", help="default: 78")
    group.add_argument(
        "--full-layers",
        type=_whole(1, _MOST_LAYERS),
        default=21,
        metavar="N",
        help="those with an index key (default: 21)",
    )


def _add_handover(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompt-tokens",
        type=_whole(2, _MOST_TOKENS),
        nargs="+",
        default=[32, 512, 2048],
        metavar="N",
        help="default: 32 512 2048",
    )
    group.add_argument("--model", help="default: the built-in small one")


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--save-result", action="store_true", help="write JSON, Markdown and a plot")
    group.add_argument("--result-dir", type=Path, help="default: the current directory")


def _wrong_together(given: argparse.Namespace) -> str | None:
    if given.full_layers > given.layers:
        return f"--full-layers {given.full_layers} are among the --layers {given.layers}; lower them"
    if given.result_dir is not None and not given.save_result:
        return "--result-dir does nothing without --save-result"
    if given.measure == ["handover"] and set(given.transport) == {"inproc"}:
        return "--transport inproc hands nothing over between two processes; add another"
    try:
        TransferConfig.from_object(transfer_settings("nixl", given.piece_bytes))
    except ConfigError as error:
        return f"--piece-bytes: {error}"
    return None


def _layout(text: str) -> EngineLayout:
    try:
        return EngineLayout.of(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _whole(least: int, most: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {least} to {most}, but is {text!r}"
            )
        return int(text)

    return convert
