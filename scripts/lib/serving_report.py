"""A serving benchmark's results: vLLM's table of a run, and of all runs JSON, a Markdown table and a plot."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.serving_metrics import METRICS, percentile_name

_WIDTH = 50
_COUNTS = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "max_concurrency": "Maximum request concurrency:",
    "request_rate": "Request rate configured (RPS):",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "total_token_throughput": "Total Token throughput (tok/s):",
}

Row = dict[str, Any]


def run_table(row: Row, metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """One run as `vllm bench serve` prints it."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += [_line(label, row[name]) for name, label in _COUNTS.items() if row[name] is not None]
    for metric in metrics:
        short, heading = METRICS[metric]
        lines.append(heading.center(_WIDTH, "-"))
        for kind in ("mean", "median", *map(percentile_name, percentiles)):
            lines.append(_line(f"{kind.capitalize()} {short} (ms):", row[f"{kind}_{metric}_ms"]))
    return "\n".join([*lines, "=" * _WIDTH])


def _line(label: str, value: float | None) -> str:
    return f"{label:<40} {_number(value):<9}".rstrip()


def _number(value: float | None) -> str:
    if value is None:
        return "n/a"
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def markdown(rows: Sequence[Row], percentiles: Sequence[float]) -> str:
    """One line for each run: throughput, then median and percentiles of each latency in milliseconds."""
    kinds = ["median", *map(percentile_name, percentiles)]
    shown = "/".join(kind.capitalize() for kind in kinds)
    heads = ["concurrency", "successful", "failed", "req/s", "output tok/s", "total tok/s"]
    heads += [f"{short} ms, {shown}" for short, _ in METRICS.values()]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---:|" * len(heads)]
    for row in rows:
        cells = [str(row[name]) for name in ("max_concurrency", "completed", "failed")]
        cells += [_number(row[f"{name}_throughput"]) for name in ("request", "output", "total_token")]
        cells += [" / ".join(_short(row[f"{kind}_{metric}_ms"]) for kind in kinds) for metric in METRICS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _short(milliseconds: float | None) -> str:
    """Three digits or more."""
    if milliseconds is None:
        return "n/a"
    decimals = max(0, 2 - math.floor(math.log10(max(milliseconds, 0.01))))
    return f"{milliseconds:,.{min(decimals, 2)}f}"


class Results:
    """Files that grow by a row for each run, stem.json and stem.md; and stem.png, which is drawn in the end.

    written: those that there is something in.
    """

    def __init__(self, directory: Path, stem: str) -> None:
        self.json, self.markdown, self.plot = (directory / f"{stem}.{kind}" for kind in ("json", "md", "png"))
        self.written: list[Path] = []

    def check(self) -> None:
        """Raise OSError unless all of them can be written; those that are there stay as they are."""
        self.json.parent.mkdir(parents=True, exist_ok=True)
        for file in (self.json, self.markdown, self.plot):
            is_new = not file.exists()
            file.open("ab").close()
            if is_new:
                file.unlink()

    def write(self, about: dict[str, Any], rows: Sequence[Row], table: str) -> None:
        """All rows so far, in place of what was there."""
        _replace(self.json, json.dumps({"about": about, "results": list(rows)}, indent=1) + "\n")
        title = f"{about['model']} on {about['machine']}, one run of"
        _replace(self.markdown, f"{title}\n\n    {about['command']}\n\n{table}\n")
        self.written = [self.json, self.markdown]

    def draw(self, rows: Sequence[Row], percentiles: Sequence[float]) -> None:
        """The plot. Raises ImportError without matplotlib."""
        _draw(rows, percentiles, self.plot)
        self.written.append(self.plot)


def _replace(file: Path, text: str) -> None:
    """An interrupt leaves the old content or the new."""
    written = file.with_name(file.name + ".new")
    written.write_text(text)
    os.replace(written, file)


def _draw(rows: Sequence[Row], percentiles: Sequence[float], file: Path) -> None:
    """Throughput, TTFT and TPOT against concurrency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (throughput, *others) = pyplot.subplots(1, 3, figsize=(13, 4))
    concurrency = [row["max_concurrency"] for row in rows]
    for name, label in (("output", "output tokens"), ("total_token", "all tokens")):
        throughput.plot(concurrency, [row[f"{name}_throughput"] for row in rows], "o-", label=label)
    throughput.set(title="Throughput", ylabel="tokens/s", ylim=(0, None))
    for axis, metric in zip(others, ("ttft", "tpot"), strict=True):
        for kind in ("median", *map(percentile_name, percentiles)):
            values = [row[f"{kind}_{metric}_ms"] for row in rows]
            axis.plot(concurrency, [math.nan if each is None else each for each in values], "o-", label=kind)
        axis.set(title=METRICS[metric][1], ylabel="ms", ylim=(0, None))
    for axis in (throughput, *others):
        axis.set_xscale("log", base=2)
        axis.set_xticks(concurrency, [str(each) for each in concurrency])
        axis.set(xlabel="requests at a time")
        axis.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
