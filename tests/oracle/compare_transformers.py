"""Holds the numpy oracle against transformers on the random checkpoints of `random_models`. Run by hand:

    python tests/oracle/compare_transformers.py [NAME ...] [--transformers-python PATH]

transformers (with torch) runs in a process of its own, of which PATH names the interpreter; the default is this one.
For each named config (default: all) one line gives the greatest differences of logits, hidden states and router
weights, and whether every selection, every chosen expert and every greedy token is the same. Exit status 1 if a
line is out of tolerance. `half_split_indexer` is left out: transformers does not read indexer_rope_interleave.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

TOLERANCE = {"logits": 2e-4, "hidden": 3e-4, "router_weights": 1e-5}
LENGTHS = (5, 20, 33, 60)


def run_transformers(checkpoint: Path) -> None:
    """Child process: reads prompts.json in the checkpoint, writes one pI.npz for each prompt."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        sys.exit(
            f"{error}: install the extra `bench` (torch, transformers), or name --transformers-python PATH"
        )

    # eager experts: the default, grouped_mm, wants every stride to be a multiple of 16 bytes
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    captured: dict[str, np.ndarray] = {}

    def capture(name, pick):
        def hook(module, inputs, output):
            captured[name] = pick(output).detach().numpy()

        return hook

    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            capture(f"hidden_{i}", lambda out: (out if torch.is_tensor(out) else out[0])[0])
        )
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.register_forward_hook(capture(f"selection_{i}", lambda out: out[0]))
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(capture(f"router_ids_{i}", lambda out: out[2]))
            layer.mlp.gate.register_forward_hook(capture(f"router_weights_{i}", lambda out: out[1]))
    for i, ids in enumerate(json.loads((checkpoint / "prompts.json").read_text())):
        with torch.no_grad():
            captured["logits"] = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
        np.savez(checkpoint / f"p{i}.npz", **captured)


def compare(forward, theirs) -> tuple[dict[str, float], dict[str, bool]]:
    """Greatest differences and equal choices of a Forward and the arrays of one pI.npz."""
    worst = {"logits": np.abs(forward.logits - theirs["logits"]).max(), "hidden": 0.0, "router_weights": 0.0}
    same = {"selections": True, "experts": True}
    same["tokens"] = np.array_equal(forward.logits.argmax(-1)[-8:], theirs["logits"].argmax(-1)[-8:])
    for i in range(len(forward.hidden) - 1):
        worst["hidden"] = max(worst["hidden"], np.abs(forward.hidden[i + 1] - theirs[f"hidden_{i}"]).max())
    for i, ours in forward.selections.items():
        for row, selection in enumerate(theirs[f"selection_{i}"]):
            visible = np.sort(
                selection[selection <= row]
            )  # transformers pads a short selection with future keys
            same["selections"] &= np.array_equal(visible, ours[row][ours[row] >= 0])
    for i, ours in forward.router_ids.items():
        order = np.argsort(theirs[f"router_ids_{i}"], axis=-1)
        same["experts"] &= np.array_equal(np.take_along_axis(theirs[f"router_ids_{i}"], order, -1), ours)
        weights = np.take_along_axis(theirs[f"router_weights_{i}"], order, -1)
        worst["router_weights"] = max(
            worst["router_weights"], np.abs(weights - forward.router_weights[i]).max()
        )
    return worst, same


def check_config(name: str, python: str) -> bool:
    """Prints the line of one config; True when everything is within tolerance."""
    from random_models import make_model, pick_prompts, write_checkpoint

    with tempfile.TemporaryDirectory() as directory:
        config, tensors = make_model(name)
        checkpoint = write_checkpoint(directory, config, tensors)
        prompts = pick_prompts(config, tensors, LENGTHS)
        sequences = [prompt.ids + prompt.continuation[:-1] for prompt in prompts]
        (checkpoint / "prompts.json").write_text(json.dumps(sequences))
        environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        if subprocess.run([python, __file__, "--child", str(checkpoint)], env=environment).returncode:
            sys.exit(f"{python} failed on {name}; its message is above")
        results = [
            compare(prompt.forward, np.load(checkpoint / f"p{i}.npz")) for i, prompt in enumerate(prompts)
        ]
    worst = {key: max(result[0][key] for result in results) for key in TOLERANCE}
    same = {key: all(result[1][key] for result in results) for key in ("selections", "experts", "tokens")}
    good = all(same.values()) and all(worst[key] <= TOLERANCE[key] for key in TOLERANCE)
    differences = "  ".join(f"{key} {value:.1e}" for key, value in worst.items())
    choices = "  ".join(f"{key} {'same' if value else 'DIFFER'}" for key, value in same.items())
    print(f"{name:20} {differences}  {choices}{'' if good else '  <-- out of tolerance'}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--transformers-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_transformers(arguments.child)
        return 0
    from random_models import CONFIGS

    names = arguments.names or [name for name in CONFIGS if name != "half_split_indexer"]
    if unknown := set(names) - set(CONFIGS):
        parser.error(f"unknown config {', '.join(sorted(unknown))}; known: {', '.join(CONFIGS)}")
    failures = [name for name in names if not check_config(name, arguments.transformers_python)]
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
