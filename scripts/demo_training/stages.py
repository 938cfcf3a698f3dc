"""The stages of the training, one after another: what is read, how long, and what learns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from demo_training import passes
from demo_training.description import DRAFTER, LAYERS, layers
from demo_training.network import Shape
from demo_training.passes import Attention

Parameters = dict[str, Array]

_ADAM_SHARE = 0.3
"""Adam's learning rate, for what is no matrix of a layer, as a share of Muon's."""
_MUON_RMS = 0.2
_WARM_UP = 20
_BIAS_STEP = 0.01
"""How much a router's bias changes a step, against loads that differ."""
_BIAS = "e_score_correction_bias"
_INDEX_LOSS, _DRAFT_LOSS = 0.3, 0.3
_NO_MUON = ("gate", "weights_proj")


@dataclass(frozen=True)
class Stage:
    """mixture: kind of text -> share. length, batch: of rows. layers: how many of them there are yet.

    rate: Muon's learning rate at the beginning; last: at the end, as a share of it. learns: "all", or of the trunk only
    the "indexer"s, by what dense attention attends to. drafts: whether the MTP layer learns too. goal: a loss at which
    the stage ends early: when copying emerges is a matter of luck.
    """

    name: str
    steps: int
    length: int
    batch: int
    rate: float
    mixture: Mapping[str, float] = field(hash=False)
    last: float = 1.0
    layers: int = 4
    attention: Attention = Attention.DENSE
    learns: str = "all"
    drafts: bool = False
    goal: float = 0.0


_READING = {"reading": 0.65, "word problems": 0.25, "equations": 0.1}
_ALL = {"reading": 0.5, "word problems": 0.33, "equations": 0.05, "small talk": 0.07, "tool call": 0.05}
_PROBLEMS = {"word problems": 0.75, "equations": 0.1, "reading": 0.15}

STAGES = (
    Stage("copying", 2000, 32, 64, 0.01, {"copying": 0.7, "pairs": 0.3}, goal=0.4),
    Stage(
        "pairs and sums", 1500, 64, 32, 0.005, {"copying": 0.1, "pairs": 0.45, "equations": 0.45}, goal=0.5
    ),
    Stage("short texts", 500, 128, 24, 0.004, _READING),
    Stage("texts", 300, 256, 16, 0.004, _READING),
    Stage("long texts", 250, 512, 8, 0.0034, _READING),
    Stage("longer texts", 300, 1024, 4, 0.0028, _READING),
    Stage("problems", 500, 192, 16, 0.004, _PROBLEMS, last=0.2),
    Stage("grown", 700, 1024, 4, 0.003, _ALL, last=0.3, layers=LAYERS),
    Stage(
        "indexers",
        300,
        1024,
        4,
        0.01,
        _ALL,
        last=0.1,
        layers=LAYERS,
        attention=Attention.INDEXED,
        learns="indexer",
        drafts=True,
    ),
    Stage("sparse", 450, 1024, 4, 0.002, _ALL, 0.1, LAYERS, Attention.SPARSE, drafts=True),
    Stage("sparse and long", 100, 2048, 2, 0.0005, _ALL, 0.1, LAYERS, Attention.SPARSE, drafts=True),
)


class Learner(NamedTuple):
    """What a stage changes."""

    parameters: Parameters
    optimizer: optax.OptState


class Report(NamedTuple):
    """Of a step. loss: of what is said. index: of the indexers. drafted: [DRAFTS], of the MTP layer's steps."""

    loss: Array
    index: Array
    drafted: Array
    loads: Array


def trainable(stage: Stage, name: str) -> bool:
    """Whether a parameter learns by its gradient in a stage."""
    if name.endswith(_BIAS):
        return False
    return stage.learns == "all" or ".indexer." in name or name.startswith(f"layers.{DRAFTER.index}.")


def optimizer(stage: Stage) -> optax.GradientTransformation:
    """Muon for the layers' matrices, Adam for the rest, nothing for what does not learn."""

    def schedule(peak: float) -> optax.Schedule:
        return optax.join_schedules(
            [
                optax.linear_schedule(0.1 * peak, peak, _WARM_UP),
                optax.linear_schedule(peak, peak * stage.last, max(1, stage.steps - _WARM_UP)),
            ],
            [_WARM_UP],
        )

    def dimensions(parameters: Parameters) -> dict[str, optax.contrib.MuonDimensionNumbers | None]:
        return {name: _muon_dimensions(name, array) for name, array in parameters.items()}

    muon = optax.contrib.muon(
        schedule(stage.rate),
        consistent_rms=_MUON_RMS,
        adam_b2=0.99,
        adam_learning_rate=schedule(stage.rate * _ADAM_SHARE),
        muon_weight_dimension_numbers=dimensions,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def _muon_dimensions(name: str, array: Array) -> optax.contrib.MuonDimensionNumbers | None:
    if getattr(array, "ndim", 0) < 2 or not name.startswith("layers.") or name.endswith(_NO_MUON):
        return None
    return optax.contrib.MuonDimensionNumbers(reduction_axis=array.ndim - 1, output_axis=array.ndim - 2)


def loss(
    learning: Parameters, fixed: Parameters, s: Shape, stage: Stage, ids: Array, weights: Array
) -> tuple[Array, Report]:
    """What a step makes smaller. ids, weights: [B, T + 1]."""
    p = fixed | learning
    passed = passes.trunk(p, s, layers(stage.layers), ids[:, :-1], stage.attention)
    spoken = (
        jnp.zeros(())
        if stage.learns == "indexer"
        else passes.cross_entropy(p, passed.hidden, ids[:, 1:], weights[:, 1:])
    )
    total = spoken + _INDEX_LOSS * passed.distance
    drafted = jnp.zeros(passes.DRAFTS)
    loads = [passed.loads[layer.index] for layer in layers(stage.layers) if layer.sparse]
    if stage.drafts:
        made = passes.drafts(p, s, DRAFTER, passed.hidden, ids[:, :-1], stage.attention)
        head = {"lm_head": jax.lax.stop_gradient(p["lm_head"])}
        costs = []
        for step, hidden in enumerate(made.hidden):
            rows = hidden.shape[1] - step
            targets, counts = ids[:, 2 + step :], weights[:, 2 + step :]
            costs.append(passes.cross_entropy(head, hidden[:, :rows], targets[:, :rows], counts[:, :rows]))
        drafted = jnp.stack(costs)
        total += _DRAFT_LOSS * drafted.sum() + _INDEX_LOSS * made.distance
        loads.append(made.loads)
    return total, Report(spoken, passed.distance, drafted, jnp.stack(loads))


@partial(jax.jit, static_argnames=("s", "stage"), donate_argnames="learner")
def step(learner: Learner, s: Shape, stage: Stage, ids: Array, weights: Array) -> tuple[Learner, Report]:
    """One step of a stage."""
    learning = {name: array for name, array in learner.parameters.items() if trainable(stage, name)}
    fixed = {name: array for name, array in learner.parameters.items() if name not in learning}
    (_, report), gradients = jax.value_and_grad(loss, has_aux=True)(learning, fixed, s, stage, ids, weights)
    updates, state = optimizer(stage).update(gradients, learner.optimizer, learning)
    learned = fixed | optax.apply_updates(learning, updates)
    return Learner(learned | _balanced(learned, stage, report.loads), state), report


def _balanced(parameters: Parameters, stage: Stage, loads: Array) -> Parameters:
    """The routers' biases, moved towards experts that had less than their share. loads: [sparse layers, E]."""
    indices = [layer.index for layer in layers(stage.layers) if layer.sparse] + [DRAFTER.index] * stage.drafts
    moved = {}
    for index, load in zip(indices, loads, strict=True):
        name = f"layers.{index}.mlp.gate.{_BIAS}"
        if not trainable(stage, f"layers.{index}.mlp.gate"):
            continue
        moved[name] = parameters[name] + _BIAS_STEP * jnp.sign(load.mean() - load)
    return moved


def begin(parameters: Parameters, stage: Stage) -> Learner:
    """A stage's first learner."""
    learning = {name: array for name, array in parameters.items() if trainable(stage, name)}
    return Learner(parameters, optimizer(stage).init(learning))
