"""The report of a run: lines for the terminal, a Markdown table, and JSON."""

from typing import Any

from kernel_check.measure import Device, Result

CAPTION = """\
Times are of one call: the median (and the fastest) of {repeats} runs of a loop in one program, divided by its calls,
after an empty loop's time was taken off. An iteration's calls follow each other in one CUDA graph; what remains of the
loop's own work is less than about 1 us a call. "XLA" is the op's plain-JAX reference, compiled by XLA and timed alike
with fewer calls. Calls take turns on arrays of which an L2 cache holds a small part; where they are smaller than that,
the line says "in L2", and the rate may exceed the copy's. Bytes and FLOPs are what the op declares. "Of copy or matmul"
is the time that a copy of as many bytes, or a matrix product of as many FLOPs, would take here, whichever is longer, as
a share of the op's time. Differences are the largest ones, with their limits."""

REHEARSAL_CAPTION = """\
Sizes are tiny, kernels are interpreted, and all of it ran on a CPU: times and rates say nothing about a GPU. Columns
are those of a real run. Differences are the largest ones, with their limits."""

_HEADS = "op | case | us (fastest) | XLA us | MB | GFLOP | reached | of copy or matmul | difference".split(
    " | "
)


def line(result: Result, device: Device) -> str:
    """One result for the terminal."""
    if result.error:
        return f"ERROR    {result.op} ({result.shape}): {result.error}"
    status = "ok      " if result.passed else "MISMATCH"
    _, _, time, reference, _, _, rate, share, difference = row(result, device)
    shown = difference if result.passed else "; ".join(result.failures)
    return f"{status} {result.op} ({result.shape}): {time} us, XLA {reference}; {rate}, {share}; {shown}"


def row(result: Result, device: Device) -> tuple[str, ...]:
    """One result for the table."""
    cost = (result.op, result.shape), (f"{result.bytes_moved / 1e6:.3g}", f"{result.flops / 1e9:.3g}")
    if result.kernel is None or result.reference is None:
        return (*cost[0], "", "", *cost[1], "", "", f"error: {result.error}")
    bound, floor = result.floor(device)
    kernel, reference = result.kernel, result.reference
    rate = (
        f"{result.bytes_moved / kernel.median / 1e9:.4g} GB/s"
        if bound == "copy"
        else f"{result.flops / kernel.median / 1e12:.4g} TFLOP/s"
    )
    cached = device.is_gpu and result.in_cache
    share = f"{floor / kernel.median:.1%} of {bound}" + (", in L2" if cached else "")
    apart = "; ".join(f"{name} {value:.2g} (<= {limit:g})" for name, (value, limit) in _shown(result))
    times = f"{kernel.median * 1e6:.2f} ({kernel.fastest * 1e6:.2f})", f"{reference.median * 1e6:.1f}"
    return (*cost[0], *times, *cost[1], rate, share, apart if result.passed else f"**MISMATCH**: {apart}")


def _shown(result: Result) -> list[tuple[str, tuple[float, float]]]:
    """Differences that are not 0; the first where all are."""
    found = list(result.differences.items())
    return [item for item in found if item[1][0] != 0] or found[:1]


def markdown(about: dict[str, Any], device: Device, results: list[Result]) -> str:
    """The whole page. about: what was run, where and when."""
    lines = [f"# GPU check: {about['device']}", ""]
    if about["rehearsal"]:
        lines += ["**A rehearsal at tiny sizes, not a measurement.**", ""]
    lines += [f"- {name}: {value}" for name, value in about.items() if name != "rehearsal"]
    lines += [
        f"- copy: {device.copy / 1e9:.4g} GB/s read and written together",
        f"- bfloat16 matrix product: {device.matmul / 1e12:.4g} TFLOP/s",
        f"- passed: {sum(result.passed for result in results)} of {len(results)} cases",
        "",
        REHEARSAL_CAPTION if about["rehearsal"] else CAPTION.format(repeats=about["repeats"]),
        "",
    ]
    rows = [tuple(_HEADS), ("---",) * len(_HEADS), *(row(result, device) for result in results)]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)]) + "\n"


def as_json(about: dict[str, Any], device: Device, results: list[Result]) -> dict[str, Any]:
    """The same with every number as measured: seconds, bytes, bytes/s and FLOP/s."""
    rates = {"copy_bytes_per_second": device.copy, "matmul_flops_per_second": device.matmul}
    return {"about": about, "device": rates, "results": [result.as_json() for result in results]}
