#!/usr/bin/env python
"""What it costs to hand a request's cache from one engine to another (prefill/decode disaggregation).

    .venv/bin/python scripts/bench_transfer.py [--producer 'tp4 dcp4'] [--consumer 'tp2 dcp2'] [--save-result]
    .venv/bin/python scripts/bench_transfer.py --measure throughput --transport tcp --tokens 4096
    .venv/bin/python scripts/bench_transfer.py --measure handover --prompt-tokens 32 512 2048 [--model DIRECTORY]

throughput: two processes have caches of GLM-5.2's sizes and no model. The consumer reads requests of --tokens over each
--transport into its pools; the table has the time from its beginning until all is unpacked, in parts, and GB/s of the
caches' own bytes, beside a plain copy of as many bytes in the same run. What arrived is compared with what was sent.

handover: two engines, P in a process of its own. The table has what lies between the end of a prompt on P and its first
token on D, in parts; what D takes for the same prompt alone; and how many prompts went on as they do on one engine.

Figures are those of the transfer, or hand-over, of median length among --repeat. Without a GPU both run on virtual CPU
devices: their times are then this CPU's, and nothing of them is a GPU's. With GPUs both processes use the same ones.

Exit code: 0; 1 if a transfer failed, or what arrived is wrong; 2 for what cannot work; 130 after an interrupt.
"""

import argparse
import os
import platform
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

from lib.interrupt import exit_on_interrupt
from lib.serving_report import Results
from lib.transfer_failures import MeasurementFailed, TransferFailed
from lib.transfer_flags import parse

from glm_dcp_jax import environment
from glm_dcp_jax.config import ConfigError

NAME = "bench_transfer"
ON_CPU = "Virtual devices of a CPU: nothing here is a GPU's time."


class Report:
    """Prints rows as they come, and keeps them where results are to be saved."""

    def __init__(self, given: argparse.Namespace, results: Results | None) -> None:
        self._given, self._results = given, results
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.notes: list[str] = []
        self.failures: list[str] = []

    def note(self, text: str) -> None:
        """Something that the tables do not say."""
        self.notes.append(text)
        print(text, flush=True)

    def begin(self, measure: str) -> None:
        """The head of a table."""
        self.rows[measure] = []
        print(f"\n{measure}\n\n{self._table(measure, [])}", flush=True)

    def add(self, measure: str, row: dict[str, Any]) -> None:
        """One more row."""
        self.rows[measure].append(row)
        print(self._table(measure, [row]).splitlines()[-1], flush=True)
        if self._results:
            every = [{"measure": name} | each for name, rows in self.rows.items() for each in rows]
            tables = [f"{name}\n\n{self._table(name, rows)}" for name, rows in self.rows.items()]
            self._results.write(self._about(), every, "\n\n".join([*self.notes, *tables]))

    def failed(self, measure: str, transport: str, error: TransferFailed) -> None:
        """A transport gave no figures, or not all."""
        self.failures.append(f"{measure} over {transport} failed: {error}")
        self.note(self.failures[-1])

    def draw(self) -> None:
        """The plot, of what there is."""
        if self._results and any(self.rows.values()):
            from lib.transfer_handover import PARTS
            from lib.transfer_plot import draw

            draw(self.rows, PARTS, self._results.plot)
            self._results.written.append(self._results.plot)

    def _table(self, measure: str, rows: list[dict[str, Any]]) -> str:
        from lib import transfer_handover, transfer_throughput

        return {"throughput": transfer_throughput, "handover": transfer_handover}[measure].table(rows)

    def _about(self) -> dict[str, Any]:
        import jax

        given = self._given
        return {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "command": shlex.join([".venv/bin/python", f"scripts/{NAME}.py", *given.command]),
            "model": f"P {given.producer} -> D {given.consumer}",
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "repeat": given.repeat,
            "notes": self.notes,
        }


def run(given: argparse.Namespace, report: Report) -> None:
    """Measure what was asked for. Raises as the measurements do."""
    if environment.has_nvidia_gpu():
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two processes share the GPUs
    environ = dict(os.environ)  # of the child, which has devices of its own number
    environment.prepare(max(given.producer.tp, given.consumer.tp))
    import jax
    from lib import transfer_handover, transfer_throughput

    from glm_dcp_jax.transfer.transports import available

    here = [name for name in given.transport if name in available()]
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {os.cpu_count()} cores", flush=True)
    if jax.default_backend() == "cpu":
        report.note(ON_CPU)
    for name in given.transport:
        if name not in here:
            report.note(f"{name} is not installed here, and left out.")
    if not here:
        raise ConfigError("none of these --transport can be used here; add tcp")
    for measure, module in (("throughput", transfer_throughput), ("handover", transfer_handover)):
        transports = [name for name in here if measure == "throughput" or name != "inproc"]
        if measure in given.measure and transports:
            report.begin(measure)
            module.measure(
                given, transports, environ, partial(report.add, measure), partial(report.failed, measure)
            )


def results_of(given: argparse.Namespace) -> Results | None:
    """Where results go. Raises OSError if nothing can be written there."""
    if not given.save_result:
        return None
    results = Results(given.result_dir or Path(), "transfer")
    results.check()
    return results


def main(argv: list[str] | None = None) -> int:
    given = parse(sys.argv[1:] if argv is None else argv, __doc__)
    try:
        results = results_of(given)
        report = Report(given, results)
        run(given, report)
    except (ConfigError, OSError) as error:
        return _fail(str(error), 2)
    except MeasurementFailed as error:
        return _fail(str(error), 1)
    try:
        report.draw()
    except ImportError as error:
        print(
            f"no plot: {error}; the extra [plot] installs it: {sys.executable} -m pip install -e '.[plot]'",
            file=sys.stderr,
        )
    if results and results.written:
        print(f"wrote {', '.join(map(str, results.written))}")
    return _fail("; ".join(report.failures), 1) if report.failures else 0


def _fail(message: str, code: int) -> int:
    print(f"{NAME}: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    exit_on_interrupt(NAME)
    sys.exit(main())
