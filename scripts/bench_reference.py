#!/usr/bin/env python
"""Measures this engine against Hugging Face transformers on the same random checkpoint, float32, batch 1, on CPU.

    python scripts/bench_reference.py [--contexts 1024 4096 16384] [--output FILE] [--transformers-python PATH]

The model is small (52.96 M parameters: hidden 512, 8 layers of which 3 dense, 8 heads, 16 experts, vocabulary 8192)
and its weights are random. Each system runs in a process of its own, one after the other, on the same number of
cores. Needs the extra `bench` (torch, transformers); PATH may name another interpreter that has them.

What is timed, after a warm-up and on both sides token by token:

- transformers: calls of the model's forward with a DynamicCache and the argmax of the last row, in the fastest
  setting known for float32 (sdpa attention, eager experts). Prefill is one call with the whole prompt, decode one
  call with one token. Longer contexts are filled in chunks of 1024 tokens, which is not timed. What generate()
  does around these calls is left out, which favours transformers.
- glm_dcp_jax: the engine steps that LLM.generate drives, with scheduling, sampling and output. Prefill is the time
  until the first token of a prompt, decode the time from one token to the next.

Prefill is the median of 5 prompts of 1024 tokens, decode of 32 tokens; the fastest one is printed beside it. Where
other processes were busy meanwhile (Linux only), a warning says so: that slows torch far more than proportionally,
so such a ratio says nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

PREFILL_TOKENS = 1024
PREFILL_REPEATS = 5
DECODE_STEPS = 32
BUSY = 0.2  # cores used by others from which on a result is not to be trusted
WARM_STEPS = 2  # decode steps before these, in which caches grow for the first time
VOCAB_SIZE = 8192
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
)  # read when torch is imported
SIDES = {"transformers": "transformers", "ours": "glm_dcp_jax"}

MODEL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "first_k_dense_replace": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 256,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "max_position_embeddings": 32768,
}


def make_checkpoint(directory: Path) -> None:
    """Writes the random checkpoint with the generator of the tests."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "oracle"))
    from random_models import BASE_CONFIG, make_tensors, write_checkpoint

    config = BASE_CONFIG | MODEL
    write_checkpoint(directory, config, make_tensors(config))


def random_prompt(length: int, seed: int) -> list[int]:
    import numpy as np

    return np.random.default_rng([length, seed]).integers(VOCAB_SIZE, size=length).tolist()


def measure_transformers(checkpoint: Path, contexts: list[int]) -> dict:
    try:
        import torch
        import transformers
    except ImportError as error:
        sys.exit(
            f"{error} in {sys.executable}. The comparison needs torch and transformers (>= 5.24): "
            "pip install '.[bench]', or name an interpreter that has them with --transformers-python PATH."
        )
    torch.set_grad_enabled(False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager"
    )

    def step(ids: list[int], cache) -> int:
        return int(model(torch.tensor([ids]), cache=cache, use_cache=True, logits_to_keep=1).logits.argmax())

    def prefill(ids: list[int]):
        cache = transformers.DynamicCache(config=model.config)
        for start in range(0, len(ids), PREFILL_TOKENS):
            token = step(ids[start : start + PREFILL_TOKENS], cache)
        return token, cache

    def decode(context: int) -> list[float]:
        token, cache = prefill(random_prompt(context, 0))
        times = []
        for _ in range(WARM_STEPS + DECODE_STEPS):
            start = time.perf_counter()
            token = step([token], cache)
            times.append(time.perf_counter() - start)
        return times[WARM_STEPS:]

    prefill(random_prompt(PREFILL_TOKENS, 0))
    prefills = []
    for seed in range(PREFILL_REPEATS):
        ids, start = random_prompt(PREFILL_TOKENS, seed + 1), time.perf_counter()
        prefill(ids)
        prefills.append(time.perf_counter() - start)
    return {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "prefill_seconds": prefills,
        "decode_seconds": {str(context): decode(context) for context in contexts},
    }


def measure_ours(checkpoint: Path, contexts: list[int]) -> dict:
    try:
        import jax

        import glm_dcp_jax
        from glm_dcp_jax import LLM, SamplingParams
    except ImportError as error:
        sys.exit(f"{error} in {sys.executable}. Install this project there: pip install -e '.[bench]'.")

    llm = LLM(
        model=str(checkpoint),
        dtype="float32",
        max_model_len=max([PREFILL_TOKENS, *contexts]) + 1 + WARM_STEPS + DECODE_STEPS,
        skip_tokenizer_init=True,
        max_num_batched_tokens=PREFILL_TOKENS,
        max_num_seqs=1,
    )

    def token_times(prompt: list[int], tokens: int) -> list[float]:
        """Seconds each token took, the first one with the prefill."""
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        llm.engine.add_request("measured", prompt, params)
        times, start = [], time.perf_counter()
        while llm.engine.has_unfinished:
            if llm.engine.step():
                times.append(time.perf_counter() - start)
                start = time.perf_counter()
        if len(times) != tokens:
            raise RuntimeError(
                f"{tokens} tokens came in {len(times)} steps: the times would not be comparable"
            )
        return times

    def decode(context: int) -> list[float]:
        return token_times(random_prompt(context, 0), 1 + WARM_STEPS + DECODE_STEPS)[1 + WARM_STEPS :]

    token_times(random_prompt(PREFILL_TOKENS, 0), 2)
    prompts = [random_prompt(PREFILL_TOKENS, seed + 1) for seed in range(PREFILL_REPEATS)]
    return {
        "versions": {"jax": jax.__version__, "glm_dcp_jax": glm_dcp_jax.__version__},
        "prefill_seconds": [token_times(prompt, 1)[0] for prompt in prompts],
        "decode_seconds": {str(context): decode(context) for context in contexts},
    }


def machine_seconds() -> float | None:
    """CPU seconds all processes together have used since boot; None where the system does not say."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def run_side(side: str, workdir: Path, contexts: list[int], threads: int) -> None:
    """Child process: measures one system on `threads` cores of the CPU and writes workdir/SIDE.json."""
    os.environ.update({name: str(threads) for name in THREAD_VARIABLES} | {"JAX_PLATFORMS": "cpu"})
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    machine, own, wall = machine_seconds(), time.process_time(), time.perf_counter()
    measure = measure_transformers if side == "transformers" else measure_ours
    result = measure(workdir / "model", contexts)
    if machine is not None:
        others = machine_seconds() - machine - (time.process_time() - own)
        result["cores_used_by_others"] = round(others / (time.perf_counter() - wall), 2)
    (workdir / f"{side}.json").write_text(json.dumps(result, indent=1))


def spawn_side(side: str, python: str, workdir: Path, contexts: list[int], threads: int) -> dict | None:
    """Runs one side in its own process; None if it failed (its message has been printed)."""
    command = [python, __file__, "--side", side, "--workdir", str(workdir), "--threads", str(threads)]
    command += ["--contexts", *map(str, contexts)]
    print(f"measuring {SIDES[side]} ...", file=sys.stderr, flush=True)
    if subprocess.run(command).returncode:
        print(f"{SIDES[side]} could not be measured", file=sys.stderr)
        return None
    return json.loads((workdir / f"{side}.json").read_text())


def print_table(results: dict[str, dict], contexts: list[int]) -> None:
    """Prints tokens/s and ms of each side that was measured, and the ratio of the medians where both were."""
    rows = {f"prefill {PREFILL_TOKENS}": (PREFILL_TOKENS, lambda side: side["prefill_seconds"])}
    for context in contexts:
        rows[f"decode at {context}"] = (1, lambda side, key=str(context): side["decode_seconds"][key])
    print("median (fastest)" + "".join(f"{SIDES[side]:>42}" for side in results) + f"{'ratio':>9}")
    for name, (tokens, times) in rows.items():
        middles = [median(times(side)) for side in results.values()]
        fastest = [min(times(side)) for side in results.values()]
        cells = "".join(
            f"{tokens / m:>14.1f} tok/s {m * 1e3:>9.1f} ms ({f * 1e3:.1f})".rjust(42)
            for m, f in zip(middles, fastest, strict=True)
        )
        ratio = f"{middles[0] / middles[1]:>8.2f}x" if len(middles) == 2 else f"{'-':>9}"
        print(f"{name:16}{cells}{ratio}")
    for side, result in results.items():
        if (others := result.get("cores_used_by_others", 0)) > BUSY:
            print(
                f"WARNING: other processes used {others} cores while {SIDES[side]} was measured; repeat this"
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384], metavar="TOKENS")
    parser.add_argument("--threads", type=int, default=2, help="cores for each side (default 2)")
    parser.add_argument("--workdir", type=Path, help="keep checkpoint and results here (default: temporary)")
    parser.add_argument("--output", type=Path, help="write all times as JSON")
    parser.add_argument("--transformers-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--side", choices=SIDES, help="child mode: measure one side in this process")
    arguments = parser.parse_args()
    if arguments.side:
        run_side(arguments.side, arguments.workdir, arguments.contexts, arguments.threads)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        workdir = arguments.workdir or Path(temporary)
        make_checkpoint(workdir / "model")
        pythons = {"transformers": arguments.transformers_python, "ours": sys.executable}
        measured = {
            side: spawn_side(side, python, workdir, arguments.contexts, arguments.threads)
            for side, python in pythons.items()
        }
    results = {side: result for side, result in measured.items() if result is not None}
    if results:
        print_table(results, arguments.contexts)
    if arguments.output:
        arguments.output.write_text(json.dumps({"threads": arguments.threads, **results}, indent=1))
    return 0 if len(results) == len(SIDES) else 1


if __name__ == "__main__":
    sys.exit(main())
