"""Held-out problems as prompts of a length, and how many the network in training would get right."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax import Array

from demo_training import documents, passes, problems
from demo_training.description import layers
from demo_training.documents import FILLER_TOKENS
from demo_training.network import Parameters, Shape
from demo_training.passes import Attention
from demo_training.problems import Problem, filler
from demo_training.words import World


class Question(NamedTuple):
    """prompt: ends where the answer begins. answer: all of it, as it should be."""

    kind: str
    prompt: str
    answer: str
    number: int


def _facts(world: World) -> Problem:
    return problems.facts(world)[0]


def _shared_facts(world: World) -> Problem:
    return problems.shared_facts(world)[0]


KINDS: dict[str, Callable[[World], Problem]] = {
    "facts": _facts,
    "shared facts": _shared_facts,
    "one step": problems.one_step,
    "two steps": problems.two_steps,
}
_EXAMPLES = 2
_MULTIPLE = 64


def question(kind: str, world: World, tokens: int, tokenizer: tokenizers.Tokenizer) -> Question:
    """One whose prompt is about `tokens` tokens long, as plain text, filled up with sentences that answer nothing.

    Word problems come with examples of their kind, which the training could have seen.
    """
    problem = KINDS[kind](world)
    asked = f"\nQ: {documents.question_of(problem)}\nA:"
    if not problem.scattered:
        seen = World(world.rng)
        shown = [KINDS[kind](seen) for _ in range(_EXAMPLES)]
        examples = "".join(piece.text for one in shown for piece in documents.question_and_answer(one))
        asked = f"{examples}{asked}"
    told = problem.told if problem.scattered else ()
    others: list[str] = []
    while True:
        text = documents.scatter(world, told, others) if told or others else ""
        prompt = f"{text}\n{asked}" if text else asked.removeprefix("\n")
        missing = tokens - len(tokenizer.encode(prompt).ids)
        if missing < FILLER_TOKENS:
            return Question(kind, prompt, problem.full_answer, problem.number)
        others += [filler(world) for _ in range(-(-missing // (FILLER_TOKENS + 4)))]


def score(
    parameters: Parameters,
    s: Shape,
    count: int,
    attention: Attention,
    tokenizer: tokenizers.Tokenizer,
    length: int,
) -> dict[str, float]:
    """Kind -> share of held-out problems of about `length` tokens whose whole answer greedy decoding would give."""
    shares = {}
    for kind in KINDS:
        world = World(random.Random(f"exam {kind} {length}"), held_out=True)
        questions = [question(kind, world, length - 40, tokenizer) for _ in range(64)]
        right = [
            _right(parameters, s, count, attention, tokenizer, questions[at : at + 8])
            for at in range(0, len(questions), 8)
        ]
        shares[kind] = float(np.mean(np.concatenate(right)))
    return shares


def _right(
    parameters: Parameters,
    s: Shape,
    count: int,
    attention: Attention,
    tokenizer: tokenizers.Tokenizer,
    questions: Sequence[Question],
) -> np.ndarray:
    """[len(questions)] bool: whether every token of the answer is the best one behind those before it."""
    prompts = [tokenizer.encode(one.prompt).ids for one in questions]
    answers = [tokenizer.encode(f" {one.answer}\n").ids for one in questions]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = np.zeros((len(questions), -(-longest // _MULTIPLE) * _MULTIPLE), np.int32)
    said = np.zeros(ids.shape, bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, : len(prompt) + len(answer)] = prompt + answer
        said[row, len(prompt) : len(prompt) + len(answer)] = True
    best = np.asarray(_best(parameters, s, count, attention, jnp.asarray(ids)))
    return np.all((best[:, :-1] == ids[:, 1:]) | ~said[:, 1:], axis=1)


@partial(jax.jit, static_argnames=("s", "count", "attention"))
def _best(parameters: Parameters, s: Shape, count: int, attention: Attention, ids: Array) -> Array:
    """[B, T] int32."""
    hidden = passes.trunk(parameters, s, layers(count), ids, attention).hidden
    return jnp.argmax(hidden @ parameters["lm_head"].T, axis=-1)
