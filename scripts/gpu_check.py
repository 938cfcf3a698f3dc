#!/usr/bin/env python
"""Checks and times every Pallas-Triton op on this machine's NVIDIA GPU, at GLM-5.2's full sizes, in a few minutes.

    .venv/bin/python scripts/gpu_check.py [--output-directory docs/results] [--only OP] [--quick] [--seed N]

Needs one NVIDIA GPU with about 14 GB free and this project with jax for CUDA, as `scripts/test` installs it on a GPU
machine (by hand: `.venv/bin/python -m pip install -e '.[cuda13]'`, or cuda12). Of several GPUs it takes the first;
CUDA_VISIBLE_DEVICES=3 shows it another one only. Prints a line for each case, then writes gpu-check-DEVICE.json and
gpu-check-DEVICE.md.

Compared are the kernel and the op's plain-JAX reference, both on the GPU, on random inputs of the printed seed:

- moves (pack, unpack) and selections by given scores: every bit;
- encoded records and index keys: each code, against the same reference on the CPU, since XLA's divisions on GPUs are
  not exact. At most 1 code in 10,000 may be off, by one step, and a float32 scale by one ulp. No other byte of the
  pool may change;
- attention: bfloat16 kernels against the reference in float32 over the records' decoded values, 2e-3 of the largest
  output and 1e-5 of the largest LSE;
- index scores: 1e-5 of a row's largest score. Selections by them may swap positions that are as close as that.

Timed are loops inside one program, as a call's dispatch would cost more than most ops: each iteration has other slots,
and calls the op once on each of up to 16 places of pools that no cache holds. A loop of the same length that calls
nothing is timed too and taken off. A copy and a matrix product are measured in the same run, and each op is held
against the one that bounds it by its declared bytes and FLOPs.

Exit code: 0 if all agree; 1 if a case does not, or fails; 2 where nothing can run, as without a GPU. --rehearse runs
all of it at tiny sizes on the CPU, kernels interpreted, to see that this script works.
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from glm_dcp_jax import environment
from glm_dcp_jax.config import ConfigError

CANNOT_RUN = 2
RESULTS = Path(__file__).parents[1] / "docs" / "results"
COMPILING_THREADS = 12
WIDE_SHARED_MEMORY = 227 * 1024  # of compute capability 9 and 10


def parse(arguments: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--output-directory",
        type=Path,
        metavar="DIRECTORY",
        help="default docs/results for a whole run; parts of one and rehearsals are written only where told to",
    )
    parser.add_argument("--only", metavar="OP", help="cases whose op or shape contains this")
    parser.add_argument("--quick", action="store_true", help="4 rows and 16 heads only")
    parser.add_argument("--seed", type=seed_of, help="of the random inputs (default: the clock)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    return parser.parse_args(arguments)


def seed_of(text: str) -> int:
    """A number that jax takes for a seed."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"must be a number of 0 to 2**63 - 1, but is {text!r}")
    return int(text)


def output_folder(arguments: argparse.Namespace) -> Path | None:
    """Where results go, made before anything is measured; None: nowhere. Raises ConfigError if it cannot be written."""
    partial = arguments.rehearse or arguments.quick or arguments.only
    folder = arguments.output_directory or (None if partial else RESULTS)
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(
            f"--output-directory {folder} cannot be written: {error.strerror}; name another"
        ) from None


def prepare(rehearse: bool) -> str | None:
    """Start jax on the GPU, or on the CPU to rehearse. Returns why it cannot be done."""
    if rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
    elif not environment.has_nvidia_gpu():
        return "no NVIDIA GPU is visible to jax here; --rehearse tries the script without one"
    try:
        environment.prepare(1)
    except ConfigError as error:
        return str(error)
    import jax

    try:
        platforms = jax.default_backend(), jax.local_devices(backend="cpu")[0].platform
    except RuntimeError as error:
        return f"{error}; jax needs the GPU and the CPU here: unset JAX_PLATFORMS, or set it to cuda,cpu"
    if platforms[0] != "gpu" and not rehearse:
        return (
            f"jax chose {platforms[0]} although there is a GPU; unset JAX_PLATFORMS, and see jax's warnings"
        )
    # References multiply float32 weights, which GPUs would otherwise round to TF32.
    jax.config.update("jax_default_matmul_precision", "highest")
    return None


def sizes_for(arguments: argparse.Namespace) -> Any:
    """What is checked: full sizes as far as the device's memory allows, or tiny ones."""
    import jax
    from kernel_check.case import LARGEST_L2, Sizes, record_formats, tiny_sizes

    if arguments.rehearse:
        return tiny_sizes()
    device = jax.local_devices()[0]
    memory = device.memory_stats() or {}
    free = memory.get("bytes_limit", 0) - memory.get("bytes_in_use", 0)
    pool_bytes = min(Sizes.pool_bytes, free // 5)  # a comparison holds three of them
    if pool_bytes < 4 * LARGEST_L2:
        raise ConfigError(
            f"jax has {free / 1e9:.1f} GB of the GPU's memory free, too little for pools that no cache holds; "
            "end what else uses the GPU (about 14 GB are enough for everything)"
        )
    wide = str(getattr(device, "compute_capability", "")).split(".")[0] in ("9", "10")
    sizes = Sizes(records=record_formats(), pool_bytes=pool_bytes)
    if wide:
        sizes = replace(sizes, shared_memory=WIDE_SHARED_MEMORY)
    return replace(sizes, rows=(4,), heads=(16,)) if arguments.quick else sizes


def chosen_cases(sizes: Any, only: str | None) -> list[Any]:
    """The cases, those on the same resident arrays one after the other."""
    from kernel_check.cases import all_cases

    cases = all_cases(sizes)
    chosen = [case for case in cases if not only or only in case.name]
    if not chosen:
        ops = ", ".join(sorted({case.op for case in cases}))
        raise ConfigError(f"no case contains {only!r}; ops are {ops}")
    return sorted(chosen, key=lambda case: case.resident.name)


def compile_all(cases: list[Any], backend: Any, effort: Any) -> list[Any]:
    """Each case's programs, or the exception that compiling them raised. Compiled by several threads."""
    from kernel_check.programs import compile_case
    from tqdm import tqdm

    def attempt(case: Any) -> Any:
        try:
            return compile_case(case, backend, effort.kernel, effort.reference)
        except Exception as error:  # a kernel that does not compile is a result, and the others still run
            return error

    with ThreadPoolExecutor(min(COMPILING_THREADS, os.cpu_count() or 1)) as threads:
        return list(tqdm(threads.map(attempt, cases), total=len(cases), desc="compiling", unit="case"))


def run_cases(cases: list[Any], programs: Iterable[Any], seed: int, effort: Any) -> Iterator[Any]:
    """Results, in the order of the cases. Resident arrays are made when they are first needed, one set at a time."""
    import jax
    from kernel_check.measure import check, empty_loop, untried

    empty = empty_loop(effort.kernel.iterations, effort.repeats)
    key, resident, name = jax.random.key(seed), None, None
    for number, (case, compiled) in enumerate(zip(cases, programs, strict=True)):
        try:
            if isinstance(compiled, Exception):
                raise compiled
            if resident is None or name != case.resident.name:
                resident, name = None, case.resident.name
                gc.collect()
                resident = jax.jit(case.resident.make)(jax.random.fold_in(key, len(cases) + number))
            inputs = jax.random.fold_in(key, number)
            result, resident = check(case, compiled, resident, inputs, empty, effort.repeats)
        except Exception as error:  # as above
            resident = None  # may have been donated
            result = untried(case, f"{type(error).__name__}: {str(error).splitlines()[0][:300]}")
        yield result


def about(arguments: argparse.Namespace, seed: int, effort: Any) -> dict[str, Any]:
    """What is run, where and when."""
    import jax
    import jaxlib

    return {
        "device": jax.local_devices()[0].device_kind,
        "rehearsal": arguments.rehearse,
        "driver": "none" if arguments.rehearse else driver_version(),
        "jax": f"{jax.__version__}, jaxlib {jaxlib.__version__}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join([".venv/bin/python scripts/gpu_check.py", *sys.argv[1:]]),
        "seed": seed,
        "repeats": effort.repeats,
    }


def driver_version() -> str:
    """As nvidia-smi says it; "unknown" where there is none, as in some containers."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def write(folder: Path, facts: dict[str, Any], device: Any, results: list[Any]) -> None:
    """The JSON file and the page."""
    from kernel_check import report

    name = "gpu-check-" + re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-")
    (folder / f"{name}.json").write_text(json.dumps(report.as_json(facts, device, results), indent=1) + "\n")
    (folder / f"{name}.md").write_text(report.markdown(facts, device, results))
    print(f"wrote {folder / name}.json and .md")


def main(argv: list[str] | None = None) -> int:
    started = time.perf_counter()
    arguments = parse(argv)
    if problem := prepare(arguments.rehearse):
        print(f"gpu_check: {problem}", file=sys.stderr)
        return CANNOT_RUN
    from kernel_check import report
    from kernel_check.measure import Effort, measure_device
    from kernel_check.programs import Loop

    effort = Effort(Loop(2, 1), Loop(2, 1), 1, 2**16, 64) if arguments.rehearse else Effort()
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    try:
        folder = output_folder(arguments)
        cases = chosen_cases(sizes_for(arguments), arguments.only)
    except ConfigError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return CANNOT_RUN
    facts = about(arguments, seed, effort)
    print(f"{len(cases)} cases on {facts['device']}, jax {facts['jax']}, --seed {seed}", flush=True)

    programs = compile_all(cases, "interpret" if arguments.rehearse else "triton", effort)
    device = measure_device(effort)
    print(
        f"copy {device.copy / 1e9:.4g} GB/s, bfloat16 matmul {device.matmul / 1e12:.4g} TFLOP/s", flush=True
    )
    results = []
    for result in run_cases(cases, programs, seed, effort):
        results.append(result)
        print(f"[{len(results)}/{len(cases)}] {report.line(result, device)}", flush=True)

    facts["seconds"] = round(time.perf_counter() - started)
    if folder:
        write(folder, facts, device, sorted(results, key=lambda result: result.op))
    if arguments.rehearse:
        print("This was a rehearsal, not a measurement.")
    failed = [report.line(result, device) for result in results if not result.passed]
    print(f"{len(results) - len(failed)} of {len(results)} cases agree; {facts['seconds']} s", flush=True)
    print("".join(f"{line}\n" for line in failed), end="", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
