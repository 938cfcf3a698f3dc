"""One training from the first stage to the last, kept on disk so that it can go on after an interruption."""

import json
import os
import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tqdm import tqdm

from demo_training import exam, stages, start
from demo_training.description import DRAFTER, layers
from demo_training.network import Shape
from demo_training.passes import Attention
from demo_training.rows import Rows
from demo_training.stages import Learner, Stage

_SEED = 52
_LOG_EVERY = 20


@dataclass(frozen=True)
class Progress:
    """Where a training is: the stage and step that come next."""

    stage: int
    step: int
    learner: Learner


class Training:
    """Trains in a directory: progress.pkl to go on from, log.jsonl with a line every few steps."""

    def __init__(
        self,
        directory: Path,
        shape: Shape,
        tokenizer: tokenizers.Tokenizer,
        plan: tuple[Stage, ...],
        save_every: float = 120.0,
    ) -> None:
        self._directory, self._shape, self._tokenizer, self._plan = directory, shape, tokenizer, plan
        self._save_every = save_every
        directory.mkdir(parents=True, exist_ok=True)

    def run(self) -> dict[str, np.ndarray]:
        """Train what is left to train; the parameters afterwards."""
        progress = self._load() or Progress(0, 0, stages.begin(_arrays(self._first()), self._plan[0]))
        for number in range(progress.stage, len(self._plan)):
            if number != progress.stage:
                progress = Progress(number, 0, self._begin(number, progress.learner.parameters))
            progress = self._stage(progress)
            self._examine(self._plan[number], progress.learner)
        return {name: np.asarray(array) for name, array in progress.learner.parameters.items()}

    def _first(self) -> start.Arrays:
        rng = np.random.default_rng(_SEED)
        numbers = {value: self._tokenizer.token_to_id(str(value)) for value in range(100)}
        arrays = start.embeddings(self._shape, numbers, rng)
        for kind in layers(self._plan[0].layers):
            arrays |= start.layer(self._shape, kind, rng)
        start.attend_to_distances(self._shape, "layers.0.self_attn", arrays)
        return arrays

    def _begin(self, number: int, parameters: stages.Parameters) -> Learner:
        """A stage's first learner, with the layers that the stage before did not have."""
        before, now = self._plan[number - 1], self._plan[number]
        rng = np.random.default_rng([_SEED, number])
        for kind in layers(now.layers)[before.layers :]:
            parameters |= _arrays(start.layer(self._shape, kind, rng, silent=True))
        if now.drafts and not before.drafts:
            parameters |= _arrays(start.drafter(self._shape, DRAFTER, rng))
        return stages.begin(parameters, now)

    def _stage(self, progress: Progress) -> Progress:
        stage, learner = self._plan[progress.stage], progress.learner
        rows = Rows(self._tokenizer, stage.mixture, stage.length, stage.batch)
        saved = logged = time.monotonic()
        recent: list[stages.Report] = []
        bar = tqdm(total=stage.steps, initial=progress.step, desc=stage.name, unit="step", mininterval=5)
        for step, batch in enumerate(rows.ahead(stage.name, progress.step, stage.steps), progress.step):
            learner, report = stages.step(learner, self._shape, stage, batch.ids, batch.weights)
            bar.update()
            recent.append(report)
            if step % _LOG_EVERY == _LOG_EVERY - 1:
                mean = jax.tree.map(lambda *values: np.mean(values, axis=0), *recent)
                recent.clear()
                now = time.monotonic()
                rate = _LOG_EVERY * stage.length * stage.batch / (now - logged)
                self._log(stage, step + 1, mean, rate)
                bar.set_postfix(loss=f"{float(mean.loss):.3f}", tokens_per_s=round(rate))
                logged = now
                if mean.loss < stage.goal:
                    break
                if now - saved > self._save_every:
                    self._save(Progress(progress.stage, step + 1, learner))
                    saved = now
        bar.close()
        done = Progress(progress.stage, stage.steps, learner)
        self._save(done)
        return done

    def _log(self, stage: Stage, step: int, report: stages.Report, rate: float) -> None:
        loads = np.asarray(report.loads)
        shares = loads / np.maximum(loads.sum(-1, keepdims=True), 1) if loads.size else np.zeros((1, 1))
        self._write(
            {
                "stage": stage.name,
                "step": step,
                "loss": float(report.loss),
                "index": float(report.index),
                "drafts": [round(float(cost), 4) for cost in report.drafted] if stage.drafts else None,
                "expert_shares": [round(float(shares.min()), 3), round(float(shares.max()), 3)],
                "tokens_per_s": round(rate),
                "time": round(time.time()),
            }
        )

    def _examine(self, stage: Stage, learner: Learner) -> None:
        attention = Attention.SPARSE if stage.attention is not Attention.DENSE else Attention.DENSE
        for length in sorted({min(stage.length, 128), stage.length}):
            if length < 128:
                continue
            shares = exam.score(
                learner.parameters, self._shape, stage.layers, attention, self._tokenizer, length
            )
            self._write(
                {"stage": stage.name, "length": length, "attention": attention.value, "right": shares}
            )

    def _write(self, line: dict[str, Any]) -> None:
        with (self._directory / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")

    @property
    def _file(self) -> Path:
        return self._directory / "progress.pkl"

    def _save(self, progress: Progress) -> None:
        half = self._file.with_suffix(".half")
        with half.open("wb") as file:
            pickle.dump((progress.stage, progress.step, jax.tree.map(np.asarray, progress.learner)), file)
        os.replace(half, self._file)

    def _load(self) -> Progress | None:
        try:
            with self._file.open("rb") as file:
                stage, step, learner = pickle.load(file)
        except FileNotFoundError:
            return None
        return Progress(stage, step, jax.tree.map(jnp.asarray, learner))


def _arrays(arrays: start.Arrays) -> stages.Parameters:
    return {name: jnp.asarray(array) for name, array in arrays.items()}
