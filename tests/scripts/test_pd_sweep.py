"""scripts/pd_sweep.py: its pairs, its tasks and what they are worth, and runs with servers that have no model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from stub_texts import DOES_ALL, NO_START, OTHER_TEXTS, REFUSES

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import pd_sweep  # noqa: E402
from lib import own_server  # noqa: E402
from lib.sweep_pairs import MORE, SEVEN, ServerPair  # noqa: E402
from lib.sweep_tasks import Answers, BadTasks, Task, identical, load_tasks, strict_match  # noqa: E402

from glm_dcp_jax.serve.pair import flags as pair_flags  # noqa: E402
from glm_dcp_jax.serve.router.metrics import Metrics  # noqa: E402

STUB = (sys.executable, str(Path(__file__).with_name("stub_texts.py")))

# ---- pairs


def test_a_pair_is_flags_of_its_servers():
    pair = ServerPair.parse("p tp4/dcp2/block16 -> D TP6/DCP3/INTERLEAVE8/SHARDS3")
    assert pair.name == "P TP4/DCP2/BLOCK16 → D TP6/DCP3/INTERLEAVE8/SHARDS3"
    assert pair.prefill == ("-tp", "4", "-dcp", "2", "--block-size", "16")
    assert pair.decode == (
        *("-tp", "6", "-dcp", "3", "--cp-kv-cache-interleave-size", "8"),
        *("--dcp-indexer-shards", "3"),
    )
    assert ServerPair.parse(pair.name) == pair


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("P TP4", "one arrow"),
        ("P TP4 -> D TP2 -> D TP1", "one arrow"),
        ("D TP4 -> P TP2", "a side is P and its sizes"),
        ("P TP4 DCP2 -> D TP2", "a side is P and its sizes"),
        ("P TP4/PP2 -> D TP2", "'PP2' is no size"),
        ("P TP0 -> D TP2", "'TP0' is no size"),
        ("P TP4/TP2 -> D TP2", "TP is there twice"),
    ],
)
def test_what_is_no_pair_is_explained(text, why, capsys):
    with pytest.raises(SystemExit, match="2"):
        pd_sweep.parse(["--config", text])
    said = capsys.readouterr().err
    assert why in said and "write for instance" in said


@pytest.mark.parametrize("pair", [*SEVEN, *MORE], ids=lambda pair: pair.name)
def test_servers_can_have_the_flags_of_every_pair(pair):
    given = [f"--prefill={' '.join(pair.prefill)}", f"--decode={' '.join(pair.decode)}"]
    servers = pair_flags.parse(given, has_gpu=False).servers
    assert all(flag in servers["prefill"] for flag in pair.prefill)
    assert all(flag in servers["decode"] for flag in pair.decode)


def test_which_pairs_are_run(capsys):
    assert pd_sweep.parse([]).pairs == SEVEN and len(SEVEN) == 7
    assert pd_sweep.parse(["--all"]).pairs == SEVEN + MORE
    one = "P TP4/DCP4 -> D TP2/DCP2"
    given = pd_sweep.parse(["--config", one, "--config", one, "--", "--dtype", "float32"])
    assert given.pairs == [ServerPair.parse(one)] * 2 and given.server_flags == ["--dtype", "float32"]
    with pytest.raises(SystemExit, match="2"):
        pd_sweep.parse(["--all", "--config", one])
    assert "give one of them" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        pd_sweep.parse(["--save-result", "nowhere/result.json"])
    assert "nowhere is no directory" in capsys.readouterr().err


# ---- tasks


def test_the_tasks_that_come_with_it_are_short_ones_and_one_of_token_ids():
    tasks = load_tasks(pd_sweep._TASKS)
    assert 15 <= len(tasks) <= 30 and any(isinstance(task.prompt, list) for task in tasks)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "has no tasks"),
        ("{", "line 1: no JSON"),
        ('\n["a"]', "line 2: a task is an object with a prompt"),
        ('{"answer": "a"}', "with a prompt"),
        ('{"prompt": "a", "anwser": "b"}', "there is no key 'anwser'"),
        ('{"prompt": ""}', "and not empty"),
        ('{"prompt": [1, -1]}', "token ids"),
        ('{"prompt": "a", "answer": 5}', "in quotes"),
        ('{"prompt": "a", "max_tokens": 0}', "from 1 on"),
    ],
)
def test_tasks_that_cannot_be_used_are_explained(content, why, tmp_path, capsys):
    file = tmp_path / "tasks.jsonl"
    file.write_text(content)
    with pytest.raises(BadTasks, match=why):
        load_tasks(file)
    assert pd_sweep.main(["--tasks", str(file)]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "text", "is_right"),
    [
        ("42", "6 * 7 = 42. That is it", True),
        ("42", "42 and no, 43", False),
        ("1,000", "so 1000.00", True),
        ("-3", "it is -3", True),
        ("100", "it is 10", False),
        ("42", "no number", False),
        ("Paris", " Paris\n", True),
        ("Paris", "It is Paris", False),
    ],
)
def test_when_a_text_is_right(answer, text, is_right):
    assert Task("?", answer).is_right(text) is is_right


def test_shares():
    tasks = [Task("a", "1"), Task("b"), Task("c", "3"), Task("d", "4")]
    plain = Answers(["1", "x", "2", "4"])
    assert identical(Answers(["1", "y", "2", None], "gone"), plain) == 0.5
    assert strict_match(tasks, Answers(["1", "y", "2", None], "gone")) == pytest.approx(1 / 3)
    assert strict_match([Task("a")], Answers(["1"])) is None


# ---- runs


@pytest.fixture
def stubs(monkeypatch) -> None:
    monkeypatch.setattr(own_server, "COMMAND", STUB)
    monkeypatch.setattr(pd_sweep, "_PAIR", STUB)


def config(block: int) -> list[str]:
    return ["--config", f"P TP2 -> D TP4/BLOCK{block}"]


def test_a_table_of_pairs_that_do_what_they_should(stubs, capsys, tmp_path):
    file = tmp_path / "result.json"
    wanted = ["--config", "P TP2/DCP1 -> D TP4/DCP4", *config(16), "--save-result", str(file)]
    assert pd_sweep.main(wanted) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| Configuration | Status | Identical |",
        "| --- | --- | --- |",
        "| P TP2/DCP1 → D TP4/DCP4 | PASS | 1.0000 |",
        "| P TP2 → D TP4/BLOCK16 | PASS | 1.0000 |",
    ]
    saved = json.loads(file.read_text())
    assert [row["status"] for row in saved["pairs"]] == ["PASS", "PASS"]
    assert saved["pairs"][0]["texts"] == saved["plain"] and len(saved["plain"]) == saved["tasks"]


def test_answers_that_are_known_have_a_column_of_their_own(stubs, capsys, tmp_path):
    tasks = [{"prompt": "abc", "answer": "3"}, {"prompt": "ab", "answer": "7"}, {"prompt": "a"}]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(map(json.dumps, tasks)))
    assert pd_sweep.main([*config(16), "--tasks", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| one server, TP1 |  |  | 0.5000 |",
        "| P TP2 → D TP4/BLOCK16 | PASS | 1.0000 | 0.5000 |",
    ]


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        (DOES_ALL, "FAIL: the decode server did it alone: 21 timeout"),
        (OTHER_TEXTS, "FAIL: too few texts are the plain server's"),
        (REFUSES, "FAIL: 21 of 21 tasks were not answered; the first: RequestFailed: 500 "),
        (NO_START, "FAIL: the server ended with 1; the end of its log:"),
    ],
)
def test_what_is_wrong_with_a_pair_is_said_and_the_others_are_run(stubs, wrong, status, capsys):
    assert pd_sweep.main([*config(wrong), *config(16)]) == 1
    bad, good = capsys.readouterr().out.splitlines()[2:]
    assert bad.startswith(f"| P TP2 → D TP4/BLOCK{wrong} | {status}"), bad
    assert good == "| P TP2 → D TP4/BLOCK16 | PASS | 1.0000 |"


def test_texts_may_differ_as_far_as_one_says(stubs, capsys):
    assert pd_sweep.main([*config(OTHER_TEXTS), "--least-identical", "0"]) == 0
    assert "| PASS | 0.0000 |" in capsys.readouterr().out


def test_what_the_router_counts_has_the_names_that_are_looked_for():
    metrics = Metrics([])
    metrics.fell_back("timeout")
    metrics.skipped("short")
    shown = metrics.exposition().decode()
    assert 'glm_dcp_router:fallbacks_total{reason="timeout"} 1.0' in shown
    assert 'glm_dcp_router:prefill_skips_total{reason="short"} 1.0' in shown


def test_it_starts_without_jax():
    script = "import sys; import pd_sweep, lib.sweep_client; print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT / "scripts", capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
