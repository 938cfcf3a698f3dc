"""Compile GLM-5.2's whole decode steps for GPUs, and write docs/results/planned-steps.md: half an hour on two cores.

`.venv/bin/python scripts/make_planned_steps.py --keep build/planned` keeps plans as JSON, and does not make them again.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

DOCUMENT = Path(__file__).parents[1] / "docs" / "results" / "planned-steps.md"
BEGIN, END = "<!-- tables: written by scripts/make_planned_steps.py -->\n", "<!-- end of tables -->\n"

DRAFTS = '{"method":"mtp","num_speculative_tokens":3}'
FLAGS = (
    *("-tp", "8", "-dcp", "8", "--kv-cache-dtype", "nvfp4_ds_mla", "--speculative-config", DRAFTS),
    *("--dcp-decode-path", "bulk", "--layers", "full", "--max-num-seqs", "32"),
)
SYSTEMS = {
    "8xH200, FP8": ("glm-5.2-fp8", "8xH200"),
    "8xRTX-PRO-6000, NVFP4": ("glm-5.2-nvfp4", "8xRTX-PRO-6000"),
    "8xRTX-PRO-6000, NVFP4, `--dcp-transport direct`": (
        "glm-5.2-nvfp4",
        "8xRTX-PRO-6000",
        "--dcp-transport",
        "direct",
    ),
    "8xB200, NVFP4": ("glm-5.2-nvfp4", "8xB200"),
}
CONCURRENCY = (1, 8, 32)
PARTS = ("weights", "records", "indexer", "all_reduces", "exchanges", "launches", "other")
BYTES = ("routed_experts", "index_keys", "records", "attention", "collectives", "other")


class Plan(NamedTuple):
    """A system's name, requests, the planner's answer, and the seconds it took."""

    system: str
    requests: int
    found: dict[str, Any]
    seconds: float

    @property
    def step(self) -> dict[str, Any]:
        """What the answer says about the decode step."""
        return self.found["decode"]["bulk"]


def command(system: str, requests: int) -> list[str]:
    """The planner's arguments."""
    model, gpus, *more = SYSTEMS[system]
    return ["--model", model, "--gpus", gpus, *FLAGS, *more, "--concurrency", str(requests)]


def planned(system: str, requests: int, keep: Path) -> Plan:
    """A plan, made now or kept from before."""
    kept = keep / f"{''.join(filter(str.isalnum, system))}-{requests}.json"
    if not kept.exists():
        print(f"{system}, {requests} requests ...", file=sys.stderr, flush=True)
        began = time.monotonic()
        run = [sys.executable, "-m", "glm_dcp_jax.plan", *command(system, requests), "--json"]
        done = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True)
        kept.write_text(json.dumps({"seconds": time.monotonic() - began, "found": json.loads(done.stdout)}))
    stored = json.loads(kept.read_text())
    return Plan(system, requests, stored["found"], stored["seconds"])


def overview(plans: list[Plan]) -> str:
    """A line for each plan."""
    lines = [
        "| system | requests | compiled in | cache beside it "
        "| read | least | ratio | sent | ratio with it | step | least |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for plan in plans:
        step = plan.step
        read, needed = dict(step["bytes_read_by_part"]), sum(step["floor_bytes_by_part"].values()) / 1e9
        sent = read.pop("collectives", 0) / 1e9
        took, least = (sum(step[name].values()) for name in ("ms_by_part", "floor_ms_by_part"))
        lines.append(
            f"| {plan.system} | {plan.requests} | {plan.seconds:.0f} s | "
            f"{plan.found['kv_cache']['tokens'] / 1e6:.2f} M tokens | "
            f"{sum(read.values()) / 1e9:.1f} GB | {needed:.1f} GB | {step['bytes_read_to_floor']:.2f} | "
            f"{sent:.1f} GB | {step['bytes_read_and_sent_to_floor']:.2f} | {took:.2f} ms | {least:.2f} ms |"
        )
    return "\n".join(lines)


def by_part(plans: list[Plan], ours: str, least: str, parts: tuple[str, ...], unit: float) -> str:
    """Each part of each plan, as step / least."""
    names = [part.replace("_", " ") for part in parts]
    lines = [
        f"| system | requests | {' | '.join(names)} |",
        "|---|---:|" + "---:|" * len(parts),
    ]
    for plan in plans:
        found, floor = plan.step[ours], plan.step[least]
        cells = [f"{found.get(part, 0) / unit:.2f} / {floor.get(part, 0) / unit:.2f}" for part in parts]
        lines.append(f"| {plan.system} | {plan.requests} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(plans: list[Plan]) -> str:
    """All of them."""
    return (
        f"{overview(plans)}\n\nMilliseconds, step / least:\n\n"
        f"{by_part(plans, 'ms_by_part', 'floor_ms_by_part', PARTS, 1)}\n\n"
        "GB read on each GPU, step / least (the parts that differ most):\n\n"
        f"{by_part(plans, 'bytes_read_by_part', 'floor_bytes_by_part', BYTES, 1e9)}\n"
    )


def main() -> None:
    """Plan, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, required=True, help="a folder for the plans, as JSON")
    keep = parser.parse_args().keep
    keep.mkdir(parents=True, exist_ok=True)
    plans = [planned(system, requests, keep) for system in SYSTEMS for requests in CONCURRENCY]
    before, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(before + BEGIN + "\n" + tables(plans) + "\n" + END + rest.split(END)[1])
    print(f"wrote {DOCUMENT}")


if __name__ == "__main__":
    main()
