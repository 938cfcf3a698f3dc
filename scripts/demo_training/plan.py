"""The whole of it: tokenizer, stages, checkpoint, plot."""

import dataclasses
import json
from pathlib import Path

import tokenizers

from demo_training import export
from demo_training.description import VOCABULARY, describe
from demo_training.network import Shape
from demo_training.run import Training
from demo_training.stages import STAGES
from demo_training.tokenizer import make_tokenizer
from glm_dcp_jax.demo.tokenizer import END_OF_TEXT, STOPS


def train(work: Path, out: Path, steps: int | None = None) -> None:
    """Train in `work` what is left to train, and write the checkpoint to `out`. steps: of every stage, or None."""
    tokenizer = _tokenizer(work / "tokenizer.json")
    config = describe([tokenizer.token_to_id(stop) for stop in STOPS], tokenizer.token_to_id(END_OF_TEXT))
    plan = tuple(dataclasses.replace(stage, steps=steps or stage.steps) for stage in STAGES)
    try:
        parameters = Training(work, Shape.of(config), tokenizer, plan).run()
    finally:
        plot(work)
    export.write(out, config, tokenizer, parameters)


def _tokenizer(file: Path) -> tokenizers.Tokenizer:
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(make_tokenizer(VOCABULARY).to_str())
    return tokenizers.Tokenizer.from_file(str(file))


def plot(work: Path) -> None:
    """loss.png from log.jsonl: what was said, the indexers, the drafts, over all steps. Nothing without a log."""
    try:
        lines = [json.loads(line) for line in (work / "log.jsonl").read_text().splitlines()]
    except FileNotFoundError:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [line for line in lines if "loss" in line]
    figure, axes = plt.subplots(figsize=(11, 5))
    for label, values in (
        ("answers", [line["loss"] or None for line in steps]),
        ("indexers", [line["index"] or None for line in steps]),
        ("drafts", [sum(line["drafts"]) / len(line["drafts"]) if line["drafts"] else None for line in steps]),
    ):
        points = [(at, value) for at, value in enumerate(values) if value is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1)
    starts = [at for at, line in enumerate(steps) if not at or line["stage"] != steps[at - 1]["stage"]]
    for at in starts:
        axes.axvline(at, color="0.8", linewidth=0.8)
        axes.text(at, 1.01, steps[at]["stage"], transform=axes.get_xaxis_transform(), rotation=25, fontsize=8)
    axes.set(yscale="log", ylabel="loss (nats a token)", xlabel="20 steps each, whatever their length")
    axes.legend()
    figure.savefig(work / "loss.png", dpi=110, bbox_inches="tight")
    plt.close(figure)
