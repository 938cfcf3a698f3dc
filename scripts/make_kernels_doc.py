"""Write the table of docs/kernels.md from the ops' declared costs: `.venv/bin/python scripts/make_kernels_doc.py`.

A test keeps it current.
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kernel_check.case import Case, Sizes, record_formats
from kernel_check.cases import all_cases

from glm_dcp_jax import plan
from glm_dcp_jax.kernels.cost import Cost

DOCUMENT = Path(__file__).parents[1] / "docs" / "kernels.md"
BEGIN, END = "<!-- table: written by scripts/make_kernels_doc.py -->\n", "<!-- end of table -->\n"

GPUS = ("H200", "B200", "RTX-PRO-6000")
HEADS = (8, 64)
LAUNCH = 2e-6
"""Seconds that the launch of a kernel takes at least."""


class Line(NamedTuple):
    """A case, and the GPUs that it costs the same on."""

    op: str
    shape: str
    cost: Cost
    gpus: tuple[str, ...]


def cases(shared_memory: int) -> list[Case]:
    """One format and kind of weight at all sizes, the others at one: bytes are in proportion. Each op's together."""
    formats = record_formats()
    one = next(record for record in formats if record.name == "nvfp4_ds_mla")
    sizes = (
        Sizes(records=formats, rows=(4,), heads=HEADS),
        Sizes(records=(one,), heads=HEADS, weights=("fp8",)),
    )
    found = {
        case.name: case for each in sizes for case in all_cases(replace(each, shared_memory=shared_memory))
    }
    order = list(dict.fromkeys(case.op for case in found.values()))
    return sorted(found.values(), key=lambda case: order.index(case.op))


def lines() -> list[Line]:
    """A line for each case; one for each cost where GPUs' shared memory lets kernels be cut up differently."""
    on_each = [cases(plan.target(f"1x{gpu}").shared_memory_per_block) for gpu in GPUS]
    found = []
    for case in zip(*on_each, strict=True):
        costs = dict(zip(GPUS, (each.cost for each in case), strict=True))
        for cost in dict.fromkeys(costs.values()):
            alike = tuple(gpu for gpu in GPUS if costs[gpu] == cost)
            where = "" if alike == GPUS else f", on {' and '.join(alike)}"
            found.append(Line(case[0].op, case[0].shape + where, cost, alike))
    return found


def microseconds(cost: Cost, gpu: str) -> str:
    """What the bytes take at the bandwidth of the GPU's data sheet."""
    seconds = cost.bytes_moved / plan.target(f"1x{gpu}").memory_bandwidth
    return f"{seconds * 1e6:.3g}" if seconds >= LAUNCH else f"< {LAUNCH * 1e6:g}"


def table() -> str:
    """Markdown."""
    heads = ("op", "case", "bytes read", "written", "FLOPs", *GPUS)
    rows = []
    for line in lines():
        modelled = (microseconds(line.cost, gpu) if gpu in line.gpus else "" for gpu in GPUS)
        numbers = (f"{number:,}" for number in line.cost)
        rows.append((f"`{line.op}`", line.shape, *numbers, *modelled))
    written = [heads, ("---", "---", *["---:"] * (len(heads) - 2)), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in written)


def document(written: str) -> str:
    """docs/kernels.md with the table as it should be."""
    before, rest = written.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
    print(f"wrote {DOCUMENT}")
