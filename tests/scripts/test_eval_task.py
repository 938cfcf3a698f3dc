"""scripts/eval_task.py and scripts/layout_sweep.py: their tables and exit codes, with servers that have no model."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(Path(__file__).parent)]

import eval_task  # noqa: E402
import layout_sweep  # noqa: E402
from layout_sweep import Setting  # noqa: E402
from lib import own_server  # noqa: E402
from stub_texts import NO_START, OTHER_TEXTS, REFUSES  # noqa: E402

STUB = (sys.executable, str(Path(__file__).parent / "stub_texts.py"))


@pytest.fixture(autouse=True)
def _stubs(monkeypatch) -> None:
    monkeypatch.setattr(own_server, "COMMAND", STUB)


@pytest.fixture
def tasks(tmp_path) -> str:
    """Three, of which the stub, which says the prompt and its length, gets two right; and one without an answer."""
    lines = [
        {"prompt": "abc", "answer": "3", "kind": "long"},
        {"prompt": "ab", "answer": "7", "kind": "short", "stop": "\n"},
        {"prompt": "a", "answer": "1", "kind": "short"},
        {"prompt": "nobody knows"},
    ]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


def server(wrong: int, exact: bool = True) -> Setting:
    return Setting("axis", f"server {wrong}", (f"--decode=--block-size {wrong}",), exact)


def test_each_kind_has_a_row(tasks, tmp_path, capsys):
    file = tmp_path / "result.json"
    assert eval_task.main(["--tasks", tasks, "--save-result", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| Kind | Tasks | Strict match |",
        "| --- | ---: | ---: |",
        "| long | 1 | 1.0000 |",
        "| short | 2 | 0.5000 |",
        "| all | 3 | 0.6667 |",
    ]
    saved = json.loads(file.read_text())
    assert saved["texts"] == ["abc 3", "ab 2", "a 1"] and saved["accepted_length"] is None
    assert saved["command"].startswith(".venv/bin/python scripts/eval_task.py --tasks ")


def test_a_limit_takes_the_first_ones(tasks, capsys):
    assert eval_task.main(["--tasks", tasks, "--limit", "1"]) == 0
    assert "| all | 1 | 1.0000 |" in capsys.readouterr().out


def test_tasks_that_were_not_answered_are_an_error(tasks, capsys):
    assert eval_task.main(["--tasks", tasks, "--", f"--decode=--block-size {REFUSES}"]) == 1
    output = capsys.readouterr()
    assert "error: 3 tasks were not answered; the first: RequestFailed: 500" in output.err
    assert "| all | 3 | 0.0000 |" in output.out


def test_a_server_that_does_not_start_is_an_error(tasks, capsys):
    assert eval_task.main(["--tasks", tasks, "--", f"--decode=--block-size {NO_START}"]) == 1
    assert "error: the server ended with 1; the end of its log:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--limit", "0"], "must be an integer from 1 on"),
        (["--base-url", "http://127.0.0.1:1", "--model", "m"], "leave --model and the flags behind -- away"),
        (["--save-result", "nowhere/x.json"], "is no directory; make it first"),
    ],
)
@pytest.mark.parametrize("script", [eval_task, layout_sweep])
def test_wrong_flags_are_explained(script, flags, why, capsys):
    if script is layout_sweep and "--base-url" in flags:
        flags, why = ["--only", "nothing"], "--only: no server has nothing in its name"
    with pytest.raises(SystemExit) as ended:
        script.main(flags)
    assert ended.value.code == 2 and why in capsys.readouterr().err


@pytest.mark.parametrize("script", [eval_task, layout_sweep])
@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({"prompt": "a"}, "has no task with an answer"),
        ({"prompt": "a", "answer": "b", "stop": ""}, "stop not empty"),
        ({"prompt": "a", "answer": "b", "kind": 1}, "kind and stop must be texts"),
    ],
)
def test_tasks_that_cannot_be_used_are_explained(script, task, why, tmp_path, capsys):
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(task))
    assert script.main(["--tasks", str(file)]) == 2
    assert why in capsys.readouterr().err


def test_a_sweep_says_what_changed_and_goes_on(tasks, tmp_path, monkeypatch, capsys):
    servers = [
        server(0),
        server(9),
        server(OTHER_TEXTS, False),
        server(OTHER_TEXTS),
        server(REFUSES),
        server(NO_START),
    ]
    monkeypatch.setattr(layout_sweep, "SETTINGS", servers)
    file = tmp_path / "result.json"
    assert layout_sweep.main(["--tasks", tasks, "--save-result", str(file)]) == 1
    rows = [[cell.strip() for cell in line.split("|")[1:-2]] for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["Server", "Status", "Identical", "Strict match", "Tokens a round"]
    assert [row[:1] + row[2:] for row in rows[2:]] == [
        ["server 0", "1.00", "0.67", ""],
        ["server 9", "1.00", "0.67", ""],
        ["server 3", "0.00", "0.67", ""],
        ["server 3", "0.00", "0.67", ""],
        ["server 4", "0.00", "0.00", ""],
        ["server 5", "0.00", "0.00", ""],
    ]
    passed, same, differs, changed, refused, dead = (row[1] for row in rows[2:])
    assert (passed, same, differs, changed) == ("PASS", "PASS", "differs", "FAIL: texts changed")
    assert refused.startswith("FAIL: 3 tasks were not answered; the first: RequestFailed: 500")
    assert dead.startswith("FAIL: 3 tasks were not answered; the first: the server ended with 1")
    assert len(json.loads(file.read_text())["servers"]) == 6


def test_a_sweep_of_which_nothing_changed_succeeds(tasks, monkeypatch):
    monkeypatch.setattr(layout_sweep, "SETTINGS", [server(0), server(9), server(OTHER_TEXTS, False)])
    assert layout_sweep.main(["--tasks", tasks, "--only", "server"]) == 0


def test_every_axis_of_the_sweep_is_there():
    axes = {setting.axis for setting in layout_sweep.SETTINGS}
    assert axes == {"first", "DCP", "path", "drafts", "records"}
    assert all(setting.exact != (setting.axis == "records") for setting in layout_sweep.SETTINGS)
