#!/usr/bin/env python
"""Write scripts/tasks/demo.jsonl: 500 problems for the built-in model, with names and sums that its training never saw.

.venv/bin/python scripts/make_demo_tasks.py

The same file on every run; any 100 problems in a row have every kind.
"""

import json
import random
from pathlib import Path

import tokenizers
from demo_training import exam
from demo_training.words import World

_ROOT = Path(__file__).resolve().parent.parent
_TOKENIZER = _ROOT / "glm_dcp_jax" / "demo" / "model" / "tokenizer.json"
_TASKS = _ROOT / "scripts" / "tasks" / "demo.jsonl"

COUNTS = {
    ("facts", 1024): 75,
    ("shared facts", 1024): 75,
    ("one step", 200): 50,
    ("two steps", 200): 50,
    ("one step", 1024): 25,
    ("two steps", 1024): 25,
    **{(kind, length): 25 for kind in ("facts", "shared facts") for length in (128, 512, 2048, 4000)},
}
"""(kind, tokens of the prompt) -> how many."""
_MAX_TOKENS = 40


def tasks(tokenizer: tokenizers.Tokenizer) -> list[dict[str, object]]:
    """All of them, kinds mixed."""
    placed = []
    for (kind, length), count in COUNTS.items():
        world = World(random.Random(f"tasks {kind} {length}"), held_out=True)
        for number in range(count):
            one = exam.question(kind, world, length, tokenizer)
            task = {
                "kind": f"{kind}, {length} tokens",
                "prompt": one.prompt,
                "answer": str(one.number),
                "max_tokens": _MAX_TOKENS,
                "stop": "\n",
            }
            placed.append(((number + world.rng.random()) / count, task))
    return [task for _, task in sorted(placed, key=lambda pair: pair[0])]


if __name__ == "__main__":
    made = tasks(tokenizers.Tokenizer.from_file(str(_TOKENIZER)))
    _TASKS.write_text("".join(f"{json.dumps(task)}\n" for task in made))
    print(f"{_TASKS}: {len(made)} tasks")
