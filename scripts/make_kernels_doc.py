"""Write the table of docs/kernels.md from the ops' declared costs: `python scripts/make_kernels_doc.py`.

A test keeps it current.
"""

from pathlib import Path

from kernel_check.case import Case, Sizes, record_formats
from kernel_check.cases import all_cases

from glm_dcp_jax import plan

DOCUMENT = Path(__file__).parents[1] / "docs" / "kernels.md"
BEGIN, END = "<!-- table: written by scripts/make_kernels_doc.py -->\n", "<!-- end of table -->\n"

H200_COPY, H200_MATMUL = 4.3e12, 790e12
"""bytes/s and FLOP/s that others measured: a copy, and a bfloat16 matrix product."""
DATA_SHEETS = ("B200", "RTX-PRO-6000")
HEADS = (8, 64)


def cases() -> list[Case]:
    """One format at all sizes, the others at one: bytes are in proportion. Each op's together."""
    formats = record_formats()
    one = next(record for record in formats if record.name == "nvfp4_ds_mla")
    sizes = Sizes(records=formats, rows=(4,), heads=HEADS), Sizes(records=(one,), heads=HEADS)
    found = {case.name: case for each in sizes for case in all_cases(each)}
    order = list(dict.fromkeys(case.op for case in found.values()))
    return sorted(found.values(), key=lambda case: order.index(case.op))


def h200(case: Case) -> str:
    """The floor in microseconds, and what it is if not bytes."""
    floors = {"": case.cost.bytes_moved / H200_COPY, " (FLOPs)": case.cost.flops / H200_MATMUL}
    bound, seconds = max(floors.items(), key=lambda item: item[1])
    return f"{seconds * 1e6:.3g}{bound}"


def table() -> str:
    """A line for each case."""
    bandwidths = [plan.target(f"1x{gpu}").memory_bandwidth for gpu in DATA_SHEETS]
    heads = ("op", "case", "bytes read", "written", "FLOPs", "H200", *DATA_SHEETS)
    rows = [
        (
            f"`{case.op}`",
            case.shape,
            f"{case.cost.bytes_read:,}",
            f"{case.cost.bytes_written:,}",
            f"{case.cost.flops:,}",
            h200(case),
            *(f"{case.cost.bytes_moved / bandwidth * 1e6:.3g}" for bandwidth in bandwidths),
        )
        for case in cases()
    ]
    lines = [heads, ("---", "---", *["---:"] * (len(heads) - 2)), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def document(written: str) -> str:
    """docs/kernels.md with the table as it should be."""
    before, rest = written.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
    print(f"wrote {DOCUMENT}")
