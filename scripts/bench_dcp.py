#!/usr/bin/env python
"""Decode steps by each DCP path, matched: one process, one model, one cache; only the path changes.

    .venv/bin/python scripts/bench_dcp.py [--dcp 2 4 8] [--contexts 8192 32768 ...] [--concurrency 1 2 4 8] [--mtp 0 3]
        [--repeats 7] [--output DIRECTORY]

Weights and cache are random. On NVIDIA GPUs the model has GLM-5.2's layer sizes (2 lone Full layers and 3 groups of
four, 32 experts), bfloat16 and NVFP4 records. Without GPUs it is an eighth of that: 14 small layers in float32 that
select 256 positions, on virtual devices, and contexts are an eighth as long (1k to 32k). Everything of a step runs but
sampling. Paths take turns, and a figure is the median over turns. Rows of a request are 1 + mtp, of one and the same
token, and what the cache holds lacks its roped part: else what random weights select for neighbouring tokens would have
little in common, and every exchange overflow.

Printed as a table: tokens/s of all requests together at one token a request and step (drafts that are accepted would
multiply all columns alike), the gain of `bulk` over `records` (per layer), and of the exchanges of one step: bytes that
each device receives, and collectives that block, both as the policy counts them; the share of what rows selected that
is left when each record is counted once per request; and groups whose fast exchange overflowed. With --output also as
JSON and PNG.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lib.interrupt import exit_on_interrupt

from glm_dcp_jax import environment
from glm_dcp_jax.config import CacheConfig, ConfigError, EngineConfig, ModelConfig, ParallelConfig
from glm_dcp_jax.config.engine import MAX_VIRTUAL_DEVICES
from glm_dcp_jax.config.speculative import MOST_DRAFTS

PATHS = ("queries", "records", "bulk")
STEPS_A_TURN = 4
MOST_REQUESTS = 1024
"""Of one step: more would be compiled for, and take the machine's memory, before anything is said."""
MOST_REPEATS = 10_000
LAYERS = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 14,
    "indexer_types": ["full"] * 2 + ["full", "shared", "shared", "shared"] * 3,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 11,
    "rope_theta": 8e6,
}
SMALL = LAYERS | {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "index_topk": 256,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "max_position_embeddings": 131_072,
}


def model_config(on_gpu: bool) -> dict[str, Any]:
    """config.json of the random model."""
    if not on_gpu:
        return SMALL
    from glm_dcp_jax.plan import glm52  # loads jax, which takes seconds

    return glm52.CONFIG | LAYERS | {"n_routed_experts": 32}


def parse(arguments: list[str] | None, on_gpu: bool) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    scale = 1 if on_gpu else 8
    contexts = [length // scale for length in (8192, 32_768, 65_536, 131_072, 262_144)]
    numbers: dict[str, Any] = {"type": int, "nargs": "+", "metavar": "N"}
    parser.add_argument("--dcp", default=[2, 4, 8], **numbers)
    parser.add_argument("--contexts", default=contexts, **numbers)
    parser.add_argument("--concurrency", default=[1, 2, 4, 8], **numbers)
    parser.add_argument("--mtp", default=[0, 3], **numbers)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, metavar="DIRECTORY")
    given = parser.parse_args(arguments)
    if 1 in given.dcp:
        parser.error(
            "--dcp 1 leaves nothing to exchange, so that all paths are the same program; use 2 or more"
        )
    longest = model_config(on_gpu)["max_position_embeddings"]
    for name, least, most in (
        ("dcp", 2, MAX_VIRTUAL_DEVICES),
        ("contexts", 1, longest),
        ("concurrency", 1, MOST_REQUESTS),
        ("mtp", 0, MOST_DRAFTS),
        ("repeats", 1, MOST_REPEATS),
    ):
        value = getattr(given, name)
        values = value if isinstance(value, list) else [value]
        if min(values) < least:
            parser.error(f"--{name} must be at least {least}")
        if max(values) > most:
            parser.error(f"--{name} must be at most {most}")
    if min(given.contexts) <= max(given.mtp) + 1:
        parser.error("--contexts must be longer than the rows of a request")
    return given


class Bench:
    """A random model and cache on the first `dcp` devices, and its decode steps by each path.

    Raises ConfigError if the machine cannot hold a cache of so many requests with so many tokens each.
    """

    def __init__(self, dcp: int, on_gpu: bool, requests: int, context: int) -> None:
        import jax

        from glm_dcp_jax.engine.blueprint import Blueprint
        from glm_dcp_jax.parallel.mesh import make_mesh

        model = ModelConfig.from_hf(model_config(on_gpu))
        cache = CacheConfig(kv_cache_dtype="nvfp4_ds_mla" if on_gpu else "float32")
        self.blueprints = {}
        for path in PATHS:
            parallel = ParallelConfig(dcp, dcp, "a2a", dcp_decode_path=path)
            config = EngineConfig("random", parallel, cache, dtype="bfloat16" if on_gpu else "float32")
            self.blueprints[path] = Blueprint(config, model, make_mesh(parallel))
        one = self.blueprints["bulk"]
        self.layout, self.vocab_size = one.layout, model.vocab_size
        pages = requests * one.layout.pages_for(context) + 1
        _check_cache(one, pages, f"--contexts {context} and --concurrency {requests}")
        self.parameters = jax.jit(
            lambda: jax.tree.map(_random_parameter, one.shape.parameters, is_leaf=_is_variable),
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, one.parameters()),
        )()
        self.pools = _random_pools(one, pages)

    def measure(self, requests: int, rows: int, context: int, repeats: int) -> dict[str, dict[str, float]]:
        """For each path: seconds of a step, bytes received, collectives that block, and of the last step the share of
        selected entries that is unique, and the groups that overflowed."""
        import numpy as np

        from glm_dcp_jax.engine.steps import BlockShape, StepShape, leaves_of
        from glm_dcp_jax.parallel.batch import Block

        pages = self.layout.pages_for(context)
        block_shape = BlockShape("decode", requests, rows, pages)
        shape = StepShape((block_shape,), requests * rows)
        rng = np.random.default_rng(0)
        block = Block(
            np.repeat(rng.integers(self.vocab_size, size=(requests, 1)), rows, axis=1).astype(np.int32),
            np.broadcast_to(np.arange(context - rows, context, dtype=np.int32), (requests, rows)),
            1 + np.arange(requests * pages, dtype=np.int32).reshape(requests, pages),
        )
        logit_rows, leaves = np.arange(requests * rows, dtype=np.int32), leaves_of(self.parameters)
        steps = {
            path: blueprint.steps.compile(shape, self.parameters, self.pools)
            for path, blueprint in self.blueprints.items()
        }
        times: dict[str, list[float]] = {path: [] for path in PATHS}
        moved = {}
        for turn in range(repeats + 1):
            for path in PATHS:
                began = time.perf_counter()
                for _ in range(STEPS_A_TURN):
                    out = steps[path](leaves, self.pools, (block,), logit_rows)
                    self.pools = out.pools
                    out.logits.block_until_ready()
                if turn:  # the first one warms up
                    times[path].append((time.perf_counter() - began) / STEPS_A_TURN)
                moved[path] = out.moved
        found = {}
        for path, blueprint in self.blueprints.items():
            estimate = blueprint.decode_estimate(block_shape)
            found[path] = {
                "seconds": statistics.median(times[path]),
                "received": estimate.received,
                "blocking": estimate.blocking,
                "unique": float(moved[path].records / np.maximum(moved[path].entries, 1)),
                "overflowing_groups": int(moved[path].overflows),
            }
        return found


def _check_cache(blueprint: Any, pages: int, asked: str) -> None:
    """Raise ConfigError if the machine cannot hold so many pages. asked: by which flags."""
    from glm_dcp_jax.engine.memory import number_of_pages

    cache = CacheConfig(num_gpu_blocks_override=pages)
    try:
        number_of_pages(
            cache,
            blueprint.model,
            blueprint.layout,
            blueprint.record,
            blueprint.mesh,
            workspace=lambda pages: 0,
        )
    except ConfigError as error:
        reason = str(error).partition(";")[0]
        raise ConfigError(f"{reason}; lower {asked}") from None


def _is_variable(leaf: Any) -> bool:
    from glm_dcp_jax.model.network import is_variable

    return is_variable(leaf)


def _random_parameter(variable: Any) -> Any:
    """Norms are 1; other weights keep the size of what they multiply."""
    import zlib

    import jax
    import jax.numpy as jnp

    leaf, name = variable.get_value(), variable.get_metadata("source").names[0]
    if "norm" in name:
        return variable.replace(jnp.ones(leaf.shape, leaf.dtype))
    values = jax.random.normal(jax.random.key(zlib.crc32(name.encode())), leaf.shape, leaf.dtype)
    return variable.replace(values * leaf.shape[-1] ** -0.5)


def _random_pools(blueprint: Any, pages: int) -> Any:
    """As if random tokens had been computed: the same few thousand records and index keys all over the pools.

    What is roped in them is 0, so that rows of a request, at their different positions, select much the same.
    """
    import jax
    import jax.numpy as jnp

    from glm_dcp_jax.cache.pools import Pools
    from glm_dcp_jax.kernels.index_keys import write_index_keys

    record, shapes = blueprint.record, blueprint.pools(pages)
    few = 4093  # a prime: copies of a record lie on different ranks

    def fill() -> Any:
        latent, rope, key = (
            jax.random.normal(jax.random.key(number), (few, width))
            for number, width in enumerate((record.latent_width, record.rope_width, record.index.width))
        )
        encoded = record.encode(latent, jnp.zeros_like(rope))
        key = key.at[:, : record.rope_width].set(0)
        filled = []
        for shape in shapes:
            slots = shape.ckv.shape[1]
            ckv = jnp.broadcast_to(encoded[jnp.arange(slots) % few], shape.ckv.shape).astype(record.dtype)
            index_keys = jnp.zeros(shape.index_keys.shape, shape.index_keys.dtype)
            for layer in range(shape.index_keys.shape[0]):
                every = jnp.arange(slots, dtype=jnp.int32)
                keys = jnp.roll(key, layer, axis=0)[every % few]
                index_keys = write_index_keys(
                    index_keys, layer, every, keys, record.index, blueprint.layout.block_size, "reference"
                )
            filled.append(Pools(ckv, index_keys))
        return tuple(filled)

    return jax.jit(fill, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes))()


def table(results: list[dict[str, Any]]) -> str:
    """Context, concurrency, `records`, `bulk` and its gain over it; then `queries`, and figures of the exchanges."""
    lines = [
        "| dcp | MTP | context | conc. | per-layer | bulk | delta | queries | bytes received, per-layer/bulk | queries "
        "| blocking, per-layer/bulk/queries | unique | overflows |",
        "|" + "---:|" * 13,
    ]
    for result in results:
        paths, requests = result["paths"], result["concurrency"]
        rate = {path: requests / paths[path]["seconds"] for path in PATHS}
        delta = 100 * (rate["bulk"] / rate["records"] - 1)
        blocking = "/".join(str(paths[path]["blocking"]) for path in ("records", "bulk", "queries"))
        lines.append(
            f"| {result['dcp']} | {result['mtp']} | {result['context']:,} | {requests} | {rate['records']:.2f} | "
            f"{rate['bulk']:.2f} | {delta:+.2f}% | {rate['queries']:.2f} | {paths['bulk']['received']:,} | "
            f"{paths['queries']['received']:,} | {blocking} | {paths['bulk']['unique']:.0%} | "
            f"{paths['bulk']['overflowing_groups']} |"
        )
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], file: Path) -> None:
    """Tokens/s over context, a panel for each DCP size and number of drafts, a line for each path and concurrency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({(result["dcp"], result["mtp"]) for result in results})
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 4), squeeze=False)
    styles = dict(zip(PATHS, ("-", "--", ":"), strict=True))
    for axis, (dcp, mtp) in zip(axes[0], panels, strict=True):
        mine = [result for result in results if (result["dcp"], result["mtp"]) == (dcp, mtp)]
        for number, requests in enumerate(sorted({result["concurrency"] for result in mine})):
            line = [result for result in mine if result["concurrency"] == requests]
            contexts = [result["context"] for result in line]
            for path in PATHS:
                rates = [requests / result["paths"][path]["seconds"] for result in line]
                axis.plot(contexts, rates, styles[path], color=f"C{number}", label=f"{path}, C{requests}")
        axis.set(title=f"DCP {dcp}, MTP {mtp}", xlabel="context", xscale="log", ylabel="tokens/s")
        axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def _check_output(folder: Path) -> None:
    """Raise OSError or ConfigError now for files that could not be written when all is measured."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (folder / "dcp.json", folder / "dcp.png"):
        is_new = not file.exists()
        file.open("ab").close()
        if is_new:
            file.unlink()
    if find_spec("matplotlib") is None:
        raise ConfigError("--output draws with matplotlib, which is not installed: pip install -e '.[plot]'")


def run(given: argparse.Namespace, on_gpu: bool, command: str) -> None:
    """Measure and print everything, and write what --output asks for. Raises ConfigError and OSError."""
    if given.output:
        _check_output(given.output)
    environment.prepare(max(given.dcp))
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")
    have = jax.device_count()
    if max(given.dcp) > have:
        raise ConfigError(f"--dcp {max(given.dcp)} needs as many devices, and there are {have}")
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, {os.cpu_count()} cores", flush=True)
    results: list[dict[str, Any]] = []
    print(table([]), flush=True)
    about = {"device": device, "jax": jax.__version__, "cores": os.cpu_count(), "repeats": given.repeats}
    about["command"] = command
    for dcp in given.dcp:
        bench = Bench(dcp, on_gpu, max(given.concurrency), max(given.contexts))
        for mtp, context, requests in itertools.product(given.mtp, given.contexts, given.concurrency):
            paths = bench.measure(requests, 1 + mtp, context, given.repeats)
            result = {"dcp": dcp, "mtp": mtp, "context": context, "concurrency": requests}
            results.append(result | {"paths": paths})
            print(table(results[-1:]).splitlines()[-1], flush=True)
            if given.output:
                text = json.dumps({"about": about, "results": results}, indent=1) + "\n"
                (given.output / "dcp.json").write_text(text)
        del bench
    if given.output:
        plot(results, given.output / "dcp.png")
        print(f"wrote dcp.json and dcp.png to {given.output}")


def main(argv: list[str] | None = None) -> int:
    on_gpu = environment.has_nvidia_gpu()
    given = parse(argv, on_gpu)
    command = " ".join([".venv/bin/python scripts/bench_dcp.py", *(argv or sys.argv[1:])])
    try:
        run(given, on_gpu, command)
    except (ConfigError, OSError) as error:
        print(f"bench_dcp: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    exit_on_interrupt("bench_dcp")
    sys.exit(main())
