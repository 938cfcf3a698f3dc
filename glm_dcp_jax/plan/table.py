"""The planner's answer in words, at most 100 columns wide, or as JSON."""

import json
import textwrap
from typing import Any

from glm_dcp_jax.plan.capacity import POOL_PARTS
from glm_dcp_jax.plan.decode_report import GROUPS
from glm_dcp_jax.plan.parts import COLLECTIVES
from glm_dcp_jax.plan.weights import WEIGHT_PARTS

WIDTH = 100
_GB = 1e9


def as_json(found: dict[str, Any]) -> str:
    """One object."""
    return json.dumps(found, indent=1, allow_nan=False)


def as_text(found: dict[str, Any], floor: bool) -> str:
    """Tables. floor: also how far each part of a step is from the least that it could take."""
    sections = [_heading(found), _memory(found), _cache(found), _decode(found)]
    if floor:
        compiled = {path: each for path, each in found["decode"].items() if each.get("ms_by_part")}
        sections += [_floor(path, figures) for path, figures in compiled.items()]
    return "\n\n".join([*sections, _wrapped(found["note"])])


def _heading(found: dict[str, Any]) -> str:
    counted = found["parameters"]
    tp, dcp = found["tensor_parallel_size"], found["decode_context_parallel_size"]
    lines = [
        f"{found['model']} on {found['gpus']}, -tp {tp} -dcp {dcp}, "
        f"{found['num_speculative_tokens']} drafts a step",
        f"{counted['total'] / 1e9:.3f} B parameters ({counted['trunk'] / 1e9:.3f} B without the MTP layer), "
        f"{counted['tensors']:,} tensors, {counted['checkpoint_bytes'] / _GB:.1f} GB; {found['weights_stored']}",
    ]
    verdict = "It fits." if found["fits"] else f"It does not fit: {found['why_not']}."
    lines = [line for text in (*lines, verdict) for line in textwrap.wrap(text, WIDTH)]
    if not found["fits"]:
        lines.append("What would fit, each by itself (GB of weights on each GPU, tokens of cache):")
        for each in found["what_would_fit"]:
            tail = f"  {each['weights_per_gpu'] / _GB:6.1f} GB  {each['tokens']:>10,}"
            change = textwrap.wrap(each["change"], WIDTH - len(tail) - 4)
            lines += [
                f"  - {change[0]:<{WIDTH - len(tail) - 4}}{tail}",
                *(f"    {more}" for more in change[1:]),
            ]
        if not found["what_would_fit"]:
            lines.append("  nothing that was tried: see docs/planner.md")
    return "\n".join(lines)


def _memory(found: dict[str, Any]) -> str:
    memory, limit = found["memory_per_gpu"], found["memory_per_gpu_bytes"]
    lines = [f"Memory of each GPU, {limit / _GB:.1f} GB"]

    def line(name: str, nbytes: int, note: str = "") -> str:
        return f"  {name:<22}{nbytes / _GB:>9.3f} GB {100 * nbytes / limit:>6.1f} %  {note}".rstrip()

    weights = sum(memory[part] for part in WEIGHT_PARTS)
    lines.append(line("weights", weights))
    lines += [line(f"  {part.replace('_', ' ')}", memory[part]) for part in WEIGHT_PARTS if memory[part]]
    names = {"ckv": "records", "index_keys": "index keys", "mtp_cache": "MTP layer's"}
    lines.append(line("cache", sum(memory[part] for part in POOL_PARTS)))
    lines += [line(f"  {names[part]}", memory[part]) for part in POOL_PARTS if memory[part]]
    if memory["workspace"] is None:
        lines.append(line("workspace", memory["workspace_estimate"], "estimated, nothing was compiled"))
    else:
        lines.append(line("workspace", memory["workspace"], "XLA's temporaries of the largest step"))
    lines.append(line("free", memory["free"], "not for the engine: see --gpu-memory-utilization"))
    return "\n".join(lines)


def _cache(found: dict[str, Any]) -> str:
    cache = found["kv_cache"]
    most = cache["max_concurrency"]
    return "\n".join(
        [
            f"Cache, {cache['record_format']}: {cache['record_bytes']} bytes a record, "
            f"{cache['index_key_bytes']} an index key",
            f"  {cache['tokens']:,} tokens in {cache['pages']:,} pages of {cache['tokens_per_page']}, "
            f"the null page included; {cache['usable_tokens']:,} can be used",
            f"  {cache['bytes_per_page']:,} bytes a page and {cache['bytes_per_token']:,.0f} a token on each GPU",
            f"  {most['requests']:.2f} requests of {most['context']:,} tokens at once",
        ]
    )


def _decode(found: dict[str, Any]) -> str:
    step = found["decode_step"]
    figures = list(found["decode"].values())
    basis, link = figures[0]["basis"], found["link"]
    reads = "bytes_read_by_part" in figures[0]
    shortened = f"; the cache does not hold {step['shortened_from']:,}" if step["shortened_from"] else ""
    lines = [
        f"A decode step of {step['requests']} x {step['context']:,} tokens, modelled ({basis}){shortened}",
        f"  link of {link['bandwidth'] / _GB:g} GB/s and {link['latency'] * 1e6:g} us, {link['source']}",
        f"  {'path':<9}{'blocking':>9}{'hidden':>8}{'received':>12}{'read' if reads else '':>10}{'step':>10}"
        "  tokens/s: no draft, all",
    ]
    for path, each in found["decode"].items():
        speed = each["modelled_tokens_per_s"]
        read = sum(each["bytes_read_by_part"].values()) / _GB if "bytes_read_by_part" in each else None
        lines.append(
            f"  {path:<9}{each['blocking_collectives']:>9}{each['hidden_collectives']:>8}"
            f"{each['bytes_received_per_gpu'] / 1e6:>9.1f} MB"
            + (f"{'':>10}" if read is None else f"{read:>7.2f} GB")
            + (
                f"{each['modelled_step_ms']:>7.2f} ms"
                f"{speed['no_draft_accepted']:>12,.0f}{speed['all_drafts_accepted']:>10,.0f}"
                if speed
                else f"{'-':>10}  "
                + ("the cache does not hold it" if found["weights_fit"] else "it does not fit")
            )
        )
    return "\n".join(lines)


def _floor(path: str, figures: dict[str, Any]) -> str:
    """The step's milliseconds by part next to the floor's, and its bytes."""
    ms, least = figures["ms_by_part"], figures["floor_ms_by_part"]
    lines = [
        f"Path {path}, next to the least it could take",
        f"  {'ms':<16}{'step':>10}{'floor':>10}{'distance':>10}",
    ]
    lines += [
        f"  {name.replace('_', ' '):<16}{ms[name]:>10.3f}{least[name]:>10.3f}{ms[name] - least[name]:>10.3f}"
        for name in GROUPS
    ]
    whole, floor = sum(ms.values()), sum(least.values())
    lines.append(f"  {'all':<16}{whole:>10.3f}{floor:>10.3f}{whole - floor:>10.3f}")
    read, needed = dict(figures["bytes_read_by_part"]), figures["floor_bytes_by_part"]
    sent = read.pop(COLLECTIVES, 0)
    lines.append(f"  {'MB read':<16}{'step':>10}{'floor':>10}{'ratio':>10}")
    for name in sorted(read, key=lambda part: -read[part]):
        under = needed.get(name, 0)
        ratio = f"{read[name] / under:>10.2f}" if under else f"{'-':>10}"
        lines.append(f"  {name.replace('_', ' '):<16}{read[name] / 1e6:>10.1f}{under / 1e6:>10.1f}{ratio}")
    lines.append(
        f"  {'all':<16}{sum(read.values()) / 1e6:>10.1f}{sum(needed.values()) / 1e6:>10.1f}"
        f"{figures['bytes_read_to_floor']:>10.2f}   ({figures['kernels']:,} kernels)"
    )
    lines.append(
        f"  {'and sent':<16}{sent / 1e6:>10.1f}{'':>10}{figures['bytes_read_and_sent_to_floor']:>10.2f}"
    )
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, WIDTH))
