"""lm-evaluation-harness over HTTP, with a task of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TASK = Path(__file__).parent / "lm_eval_task"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs the extra `conformance`"),
]


@pytest.mark.parametrize("kind", ["local-completions", "local-chat-completions"])
def test_a_local_task_is_scored(url, model, kind, tmp_path):
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    described = (TASK / "sums.yaml").read_text().replace("DATA", str(TASK / "sums.jsonl"))
    (tasks / "sums.yaml").write_text(described)
    path = "completions" if kind == "local-completions" else "chat/completions"
    arguments = f"model={model},base_url={url}/v1/{path},num_concurrent=2"
    arguments += ",tokenizer_backend=None,tokenized_requests=False"
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        "--model",
        kind,
        "--model_args",
        arguments,
        "--tasks",
        "local_sums",
    ]
    command += ["--include_path", str(tasks), "--output_path", str(tmp_path / "out"), "--log_samples"]
    if kind == "local-chat-completions":
        command.append("--apply_chat_template")
    environment = {
        **os.environ,
        "OPENAI_API_KEY": "secret",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf"),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    [results] = (tmp_path / "out").rglob("results_*.json")
    scores = json.loads(results.read_text())["results"]["local_sums"]
    assert 0 <= next(value for name, value in scores.items() if name.startswith("exact_match,")) <= 1
    [samples] = (tmp_path / "out").rglob("samples_*.jsonl")
    assert len(samples.read_text().splitlines()) == 3
