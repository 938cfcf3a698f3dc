#!/usr/bin/env python
"""Greedy answers of Hugging Face transformers and of this engine to the same tasks, from the same checkpoint, float32.

    .venv/bin/python scripts/compare_answers.py [--limit 50] [--transformers-python PATH]

Each side runs in a process of its own, on the CPU. Where two answers part, transformers says how far its best token was
ahead of the other side's there: within --tie it is a tie, which either may break. Needs the extra `bench` (torch,
transformers); PATH may name another interpreter that has them.

Exit code: 0; 1 if answers part that are no ties, or a side failed; 2 for flags or tasks that cannot work.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_TASKS = _HERE / "tasks" / "demo.jsonl"
_SIDES = ("transformers", "ours")


def answers_of_transformers(model_directory: str, asked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each task its prompt's ids, the answer's ids, and before each of them the two best logits' distance."""
    import torch
    import transformers

    torch.set_grad_enabled(False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    (end,) = tokenizer.encode("\n", add_special_tokens=False)
    given = []
    for task in asked:
        prompt = tokenizer.encode(task["prompt"], add_special_tokens=False)
        cache = transformers.DynamicCache(config=model.config)
        ids, answer, gaps = prompt, [], []
        for _ in range(task["max_tokens"]):
            output = model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            best = output.logits[0, -1].topk(2)
            gaps.append(float(best.values[0] - best.values[1]))
            ids = [int(best.indices[0])]
            answer += ids
            if tokenizer.decode(ids).endswith("\n") or ids[0] == end:
                break
        given.append({"prompt": prompt, "answer": answer, "gaps": gaps, "text": tokenizer.decode(answer)})
    return given


def answers_of_ours(model_directory: str, asked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each task its prompt's ids and the answer's."""
    from glm_dcp_jax import LLM, SamplingParams

    llm = LLM(model_directory, dtype="float32", max_num_seqs=8)
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=task["max_tokens"], stop="\n", include_stop_str_in_output=True
        )
        for task in asked
    ]
    requests = llm.generate([task["prompt"] for task in asked], params)
    return [
        {
            "prompt": one.prompt_token_ids,
            "answer": list(one.outputs[0].token_ids),
            "text": one.outputs[0].text,
        }
        for one in requests
    ]


def compare(theirs: dict[str, Any], ours: dict[str, Any], tie: float) -> str:
    """ "same", or where two answers part: "tie" or "different", with the distance."""
    if theirs["prompt"] != ours["prompt"]:
        return "different prompts"
    if theirs["answer"] == ours["answer"]:
        return "same"
    pairs = zip(theirs["answer"], ours["answer"], strict=False)
    at = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return "different lengths"
    gap = theirs["gaps"][at]
    return f"{'tie' if gap <= tie else 'different'} at token {at}: {gap:.2e} between the best two"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The flags. Exits with 2 for what cannot work."""
    parser = argparse.ArgumentParser(
        prog="compare_answers.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", type=Path, help="a checkpoint's directory (default: the built-in model's)")
    parser.add_argument("--tasks", type=Path, default=_TASKS, help=f"default: {_TASKS.name} in scripts/tasks")
    parser.add_argument(
        "--limit", type=int, default=50, help="the first so many tasks (default: %(default)s)"
    )
    parser.add_argument("--tie", type=float, default=1e-3, help="in logits (default: %(default)s)")
    parser.add_argument("--transformers-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--side", choices=_SIDES, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.limit < 1:
        parser.error(f"--limit must be at least 1, but is {given.limit}")
    if given.model is None:
        given.model = _HERE.parent / "glm_dcp_jax" / "demo" / "model"
    return given


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    given = parse(arguments)
    if given.side:
        asked = json.load(sys.stdin)
        answer = answers_of_transformers if given.side == "transformers" else answers_of_ours
        given.tasks.write_text(json.dumps(answer(str(given.model), asked)))
        return 0
    sys.path.insert(0, str(_HERE))
    from lib.sweep_tasks import BadTasks, load_tasks

    try:
        tasks = [task for task in load_tasks(given.tasks) if isinstance(task.prompt, str)][: given.limit]
    except BadTasks as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    asked = json.dumps([{"prompt": task.prompt, "max_tokens": task.max_tokens} for task in tasks])
    sides = []
    for side, python in zip(_SIDES, (given.transformers_python, sys.executable), strict=True):
        print(f"{side}: {len(tasks)} tasks", file=sys.stderr, flush=True)
        with tempfile.NamedTemporaryFile(suffix=".json") as answers:
            command = [python, __file__, "--side", side, "--model", str(given.model), "--tasks", answers.name]
            done = subprocess.run(command, input=asked, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
            if done.returncode:
                print(f"error: {side} failed", file=sys.stderr)
                return 1
            sides.append(json.loads(Path(answers.name).read_text()))
    found = [compare(theirs, ours, given.tie) for theirs, ours in zip(*sides, strict=True)]
    for number, result in enumerate(found):
        if result != "same":
            print(f"task {number}: {result}")
    print(f"{found.count('same')} of {len(found)} answers are the same")
    return 0 if all(result == "same" or result.startswith("tie") for result in found) else 1


if __name__ == "__main__":
    sys.exit(main())
