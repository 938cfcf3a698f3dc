"""The picture of scripts/bench_transfer.py: GB/s by transport, and hand-overs in their parts."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

Row = dict[str, Any]


def draw(rows: dict[str, list[Row]], parts: tuple[str, ...], file: Path) -> None:
    """rows: by measurement. parts: of a hand-over, one after the other."""
    drawn = {name: found for name, found in rows.items() if found}
    figure, axes = pyplot.subplots(1, len(drawn), figsize=(7 * len(drawn), 4.5), squeeze=False)
    for axis, (name, found) in zip(axes[0], drawn.items(), strict=True):
        if name == "throughput":
            _throughput(axis, found)
        else:
            _handover(axis, found, parts)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _throughput(axis: Any, rows: list[Row]) -> None:
    names = [f"{row['transport']}, {row['kv_cache_dtype']}, {row['tokens']:,} tokens" for row in rows]
    axis.barh(names, [row["gb_per_second"] for row in rows])
    axis.invert_yaxis()
    axis.set(title="pack, move and unpack", xlabel="GB/s")


def _handover(axis: Any, rows: list[Row], parts: tuple[str, ...]) -> None:
    names = [f"{row['transport']}, {row['prompt_tokens']:,} tokens" for row in rows]
    done = [0.0] * len(rows)
    for part in parts:
        each = [1e3 * row[part] for row in rows]
        axis.barh(names, each, left=done, label=part)
        done = [before + now for before, now in zip(done, each, strict=True)]
    axis.invert_yaxis()
    axis.set(title="from P's last token to D's first", xlabel="ms")
    axis.legend()
