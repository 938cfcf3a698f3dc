"""The memory of one GPU as a picture: a bar of parts, and the lines that it must not cross."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from glm_dcp_jax.config import ConfigError

_GB = 1e9
_LEAST_SHARE = 0.004
"""Parts smaller than this share of the memory are drawn together."""
_COLOURS = {
    "routed_experts": "#4269d0",
    "shared_experts": "#6cc5b0",
    "dense": "#9c6b4e",
    "attention": "#3ca951",
    "value_expansions": "#b5d99c",
    "indexer": "#97bbf5",
    "mtp": "#a463f2",
    "embedding": "#9498a0",
    "head": "#6f757f",
    "router": "#c9b458",
    "ckv": "#ff725c",
    "index_keys": "#ff8ab7",
    "mtp_cache": "#efb118",
    "workspace": "#d0d0d0",
    "free": "#f4f4f4",
    "small": "#444444",
}
_NAMES = {"ckv": "records", "mtp": "MTP layer", "mtp_cache": "MTP layer's cache", "small": "other parts"}


def check(file: Path) -> None:
    """Raise ConfigError if no picture can be drawn there, before anything is computed."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--png needs matplotlib, which is not installed: pip install -e '.[plot]', or use --json and draw it "
            "elsewhere"
        )
    if file.suffix.lower() != ".png":
        raise ConfigError(f"--png {file} does not end in .png; name a file that does")
    if not os.path.isdir(file.absolute().parent):  # which, unlike pathlib's, never raises
        raise ConfigError(f"--png {file}: there is no directory {file.absolute().parent}; make it first")
    was_there = os.path.exists(file)
    try:
        with file.open("ab"):  # on some systems nothing else tells whether this may be written
            pass
        if not was_there:
            file.unlink()
    except OSError as error:
        raise ConfigError(f"--png {file} cannot be written: {error.strerror}; name another file") from error
    except ValueError as error:  # such as a NUL
        raise ConfigError(f"--png {str(file)!r} cannot be written: {error}; name another file") from error


def draw(found: dict[str, Any], file: Path) -> None:
    """Draw a plan's memory. Raises ConfigError for a file that cannot be written."""
    from matplotlib.figure import Figure

    limit = found["memory_per_gpu_bytes"]
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    left = 0.0
    for name, nbytes in _drawn(found["memory_per_gpu"], limit):
        axes.barh(
            [0],
            [nbytes / _GB],
            left=left,
            color=_COLOURS[name],
            edgecolor="white",
            linewidth=0.5,
            label=f"{_NAMES.get(name, name.replace('_', ' '))} {nbytes / _GB:.1f} GB",
        )
        left += nbytes / _GB
    axes.axvline(limit / _GB, color="black", linewidth=1.5)
    axes.annotate(f"{limit / _GB:.1f} GB", (limit / _GB, 0.42), ha="right", va="bottom", fontsize=9)
    axes.set(xlim=(0, 1.03 * max(left, limit / _GB)), ylim=(-0.5, 0.6), yticks=[], xlabel="GB on each GPU")
    does = "fits" if found["fits"] else "does not fit"
    tokens = found["kv_cache"]["usable_tokens"]
    axes.set_title(f"{found['model']} on {found['gpus']}: {does}, {tokens:,} tokens of cache", fontsize=11)
    axes.legend(ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False)
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise ConfigError(f"--png {file} cannot be written: {error}") from error


def _drawn(memory: dict[str, int | None], limit: int) -> list[tuple[str, int]]:
    """Parts in the order of the bar; the estimate of the workspace in its place, and small ones as one."""
    sizes = {name: nbytes for name, nbytes in memory.items() if nbytes}
    if "workspace_estimate" in sizes:
        sizes["workspace"] = sizes.pop("workspace_estimate")
    shown = [(name, sizes[name]) for name in _COLOURS if sizes.get(name, 0) >= _LEAST_SHARE * limit]
    small = sum(nbytes for name, nbytes in sizes.items() if 0 < nbytes < _LEAST_SHARE * limit)
    return [*shown, ("small", small)] if small else shown
