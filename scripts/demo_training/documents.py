"""Texts of the training: pieces, each of which is either read or to be said."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from demo_training import problems, talk
from demo_training.problems import Problem, filler
from demo_training.words import World
from glm_dcp_jax.engine.chat_template import ChatTemplate, glm_template


class Piece(NamedTuple):
    """said: whether the model is to say it, and not only to read it."""

    text: str
    said: bool


Document = list[Piece]

FACT_TOKENS, FILLER_TOKENS, QUESTION_TOKENS = 10, 11, 26
"""About what they take."""

_TEMPLATE = ChatTemplate(glm_template())
_TURN = re.compile(r"(<\|assistant\|><think>(?:</think>)?)(.*?(?:<\|user\|>|<\|observation\|>))", re.DOTALL)
_THINKING = 0.5


def pairs(world: World, room: int) -> Document:
    """Names with numbers, and some of the names again."""
    count = max(2, min(12, room // 10))
    names = world.names(count)
    known = dict(zip(names, world.numbers(count), strict=True))
    document = [Piece("".join(f"{name}: {number}\n" for name, number in known.items()), False)]
    for _ in range(max(1, (room - 6 * count) // 6)):
        name = world.one(names)
        document += [Piece(f"{name}:", False), Piece(f" {known[name]}\n", True)]
    return document


def equations(world: World, room: int) -> Document:
    """Nothing but sums."""
    document = []
    for _ in range(max(1, room // 9)):
        (one,) = world.sums(1)
        before, _, result = str(one).rpartition(" ")
        document += [Piece(before, False), Piece(f" {result}.\n", True)]
    return document


def reading(world: World, room: int) -> Document:
    """A text of about `room` tokens with facts in it, and questions about some of them."""
    asked = world.rng.randint(1, max(1, min(8, room // 60)))
    most = min(24, (room - QUESTION_TOKENS * asked) // FACT_TOKENS)
    count = world.rng.randint(max(asked, 2), max(asked, 2, most))
    if world.rng.random() < 0.1:
        count = max(asked, 1)
    shared = count > 3 and world.rng.random() < 0.5
    questions = (problems.shared_facts if shared else problems.facts)(world, count, asked)
    world.rng.shuffle(questions)
    left = room - QUESTION_TOKENS * asked - FACT_TOKENS * count
    others = [filler(world) for _ in range(max(0, left) // FILLER_TOKENS)]
    text = scatter(world, questions[0].told, others)
    if world.rng.random() < 0.5:
        return [
            Piece(f"{text}\n", False),
            *(piece for one in questions for piece in question_and_answer(one)),
        ]
    return conversation(world, text, questions)


def word_problems(world: World, room: int) -> Document:
    """One or several word problems, after as much other text as there is room for."""
    count = world.rng.randint(1, max(1, min(6, room // 60)))
    asked = [world.one((problems.one_step, problems.two_steps))(world) for _ in range(count)]
    left = room - 55 * count
    others = [filler(world) for _ in range(world.rng.randint(0, max(0, left) // FILLER_TOKENS))]
    before = " ".join(others)
    if world.rng.random() < 0.5:
        opening = [Piece(f"{before}\n", False)] if before else []
        return opening + [piece for one in asked for piece in question_and_answer(one)]
    return conversation(world, before, asked)


def scatter(world: World, told: Sequence[str], others: Sequence[str]) -> str:
    """All sentences as one text; what is told stays in its order, anywhere among the others."""
    places = set(world.rng.sample(range(len(told) + len(others)), len(told)))
    first, second = iter(told), iter(others)
    return " ".join(next(first) if at in places else next(second) for at in range(len(told) + len(others)))


def question_of(problem: Problem) -> str:
    """The question with all that belongs right before it."""
    return problem.question if problem.scattered else " ".join((*problem.told, problem.question))


def question_and_answer(problem: Problem) -> Document:
    """The form of plain completions."""
    return [Piece(f"\nQ: {question_of(problem)}\nA:", False), Piece(f" {problem.full_answer}\n", True)]


def conversation(world: World, text: str, asked: Sequence[Problem]) -> Document:
    """Turns about a text, which stands before the first question; the last answer may be thought about."""
    thinks = world.rng.random() < _THINKING
    messages: list[dict[str, Any]] = []
    for number, problem in enumerate(asked):
        question = question_of(problem)
        content = f"{text}\n\n{question}" if text and not number else question
        thought = thinks and problem is asked[-1]
        messages.append({"role": "user", "content": content})
        messages.append(
            {
                "role": "assistant",
                "content": problem.answer if thought else problem.full_answer,
                "reasoning_content": problem.thought if thought else "",
            }
        )
    return rendered(world, messages, thinks)


def small_talk(world: World, room: int) -> Document:
    """Greetings and the like."""
    return rendered(world, talk.small_talk(world), False if world.rng.random() < _THINKING else None)


def tool_call(world: World, room: int) -> Document:
    """A question that a tool answers."""
    messages, tools = talk.tool_call(world)
    thinks = world.rng.random() < _THINKING
    if not thinks:
        for message in messages:
            message.pop("reasoning_content", None)
    return rendered(world, messages, thinks, tools=tools)


def rendered(world: World, messages: list[dict[str, Any]], thinks: bool | None, **variables: Any) -> Document:
    """A conversation by the chat template; the assistant's turns are said, with the token that ends each.

    thinks: None for one whose every answer comes without a thought although thinking is on.
    """
    effort = world.one(("max", "high"))
    text = _TEMPLATE.render(
        messages, enable_thinking=thinks is not False, reasoning_effort=effort, **variables
    )
    document: Document = []
    done = 0
    for turn in _TURN.finditer(f"{text}<|user|>"):
        read, said = turn[1], turn[2]
        if thinks is None and read.endswith("</think>"):
            read, said = read.removesuffix("</think>"), "</think>" + said
        document += [Piece(text[done : turn.start()] + read, False), Piece(said, True)]
        done = turn.end()
    return document
