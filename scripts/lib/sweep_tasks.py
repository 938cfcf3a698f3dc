"""The tasks of a sweep: prompts with or without an answer, and what their texts are worth."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_KEYS = ("prompt", "answer", "max_tokens", "stop", "kind")
MAX_TOKENS = 32
"""Of a task that says nothing."""


class BadTasks(ValueError):
    """A task file that cannot be used; the message names the line."""


@dataclass(frozen=True)
class Task:
    """prompt: text or token ids. answer: a number, or the whole text; None if nobody knows it. stop: ends the text, and
    is no part of it. kind: what tables call tasks of its kind."""

    prompt: str | list[int]
    answer: str | None = None
    max_tokens: int = MAX_TOKENS
    stop: str | None = None
    kind: str = ""

    def is_right(self, text: str) -> bool:
        """Whether a text is the answer: its last number, where the answer is one, and else all of it, but for space
        around it. Of a number, commas and a fraction of nothing but zeros do not count."""
        assert self.answer is not None
        if _NUMBER.fullmatch(self.answer.strip()) is None:
            return text.strip() == self.answer.strip()
        numbers = _NUMBER.findall(text)
        return bool(numbers) and _value(numbers[-1]) == _value(self.answer.strip())


def _value(number: str) -> str:
    digits = number.replace(",", "")
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def load_tasks(file: Path) -> list[Task]:
    """One from each line of JSON. Raises BadTasks."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadTasks(f"{file} cannot be read: {error}") from None
    tasks = [_task(f"{file}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise BadTasks(
            f'{file} has no tasks; write one a line, such as {{"prompt": "2 + 3 =", "answer": "5"}}'
        )
    return tasks


def _task(where: str, line: str) -> Task:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise BadTasks(f"{where}: no JSON: {error}") from None
    if not isinstance(given, dict) or "prompt" not in given:
        raise BadTasks(f"{where}: a task is an object with a prompt")
    for key in given:
        if key not in _KEYS:
            raise BadTasks(f"{where}: there is no key {key!r}; a task has {', '.join(_KEYS)}")
    task = Task(**given)
    if not _is_prompt(task.prompt):
        raise BadTasks(f"{where}: prompt must be a text or a list of token ids, and not empty")
    if task.answer is not None and not isinstance(task.answer, str):
        raise BadTasks(f"{where}: answer must be a text, in quotes also where it is a number")
    if type(task.max_tokens) is not int or task.max_tokens < 1:
        raise BadTasks(f"{where}: max_tokens must be an integer from 1 on")
    if not isinstance(task.kind, str) or not (
        task.stop is None or (isinstance(task.stop, str) and task.stop)
    ):
        raise BadTasks(f"{where}: kind and stop must be texts, and stop not empty")
    return task


def _is_prompt(prompt: Any) -> bool:
    are_ids = isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)
    return bool(prompt) and (are_ids or isinstance(prompt, str))


@dataclass(frozen=True)
class Answers:
    """What servers said to all tasks: texts, None where none came, and the first error."""

    texts: Sequence[str | None]
    error: str | None = None


def identical(answers: Answers, plain: Answers) -> float:
    """Share of texts that are those of the plain server, 0 to 1."""
    pairs = list(zip(answers.texts, plain.texts, strict=True))
    return sum(text is not None and text == expected for text, expected in pairs) / len(pairs)


def strict_match(tasks: Sequence[Task], answers: Answers) -> float | None:
    """Share of right texts among the tasks whose answer is known; None if there are none."""
    known = [pair for pair in zip(tasks, answers.texts, strict=True) if pair[0].answer is not None]
    return (
        sum(text is not None and task.is_right(text) for task, text in known) / len(known) if known else None
    )
