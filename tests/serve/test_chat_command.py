"""`python -m glm_dcp_jax.chat`: a conversation with a server, typed or piped in."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine
from live import live_server

from glm_dcp_jax.chat.__main__ import main
from glm_dcp_jax.chat.client import Client, ServerError
from glm_dcp_jax.chat.conversation import Conversation
from glm_dcp_jax.chat.flags import parse
from glm_dcp_jax.chat.terminal import Terminal
from glm_dcp_jax.config import ConfigError

ROOT = Path(__file__).parents[2]
DONE = b"data: [DONE]\n\n"


def chunk(finish_reason: str | None = None, **delta: str) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"


class Script(httpx.SyncByteStream):
    """A server's answers, one after the other: bytes to send, and exceptions that come meanwhile."""

    def __init__(self, *answers: list[bytes | BaseException]) -> None:
        self.answers, self.asked, self.closed = list(answers), [], 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(json.loads(request.content))
        return httpx.Response(200, stream=self)

    def __iter__(self):
        for part in self.answers.pop(0):
            if isinstance(part, BaseException):
                raise part
            yield part

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def talk(monkeypatch, capsys):
    """Type lines to a terminal whose server follows a script; what is shown, and what is noted beside it."""

    def run(script: Script, *lines: str | BaseException, system: str | None = None) -> tuple[str, str]:
        typed = iter(lines)

        def read(prompt: str) -> str:
            line = next(typed, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        client = Client("http://test", transport=httpx.MockTransport(script))
        Terminal(Conversation(client, {"model": "m", "top_p": 0.5}, system)).run("m at test")
        return tuple(capsys.readouterr())

    return run


def test_a_conversation_goes_on_until_it_is_reset(talk):
    script = Script(
        *[[chunk(role="assistant", content=""), chunk(content=word), chunk("stop"), DONE] for word in "abcd"]
    )
    shown, _ = talk(
        script, "one", "two", "/system be brief", "three", "/reset", "  ", "four", "/quit", "never"
    )
    assert shown == "a\nb\nc\nd\n"
    said = [[message["content"] for message in body["messages"]] for body in script.asked]
    assert said == [
        ["one"],
        ["one", "a", "two"],
        ["be brief", "one", "a", "two", "b", "three"],
        ["be brief", "four"],
    ]
    assert script.asked[0] == {
        "model": "m",
        "top_p": 0.5,
        "messages": [{"role": "user", "content": "one"}],
        "stream": True,
    }
    assert [message["role"] for message in script.asked[2]["messages"]][:3] == ["system", "user", "assistant"]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_dimmed_and_not_sent_back(talk, field, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    script = Script(
        [chunk(**{field: "hm"}), chunk(**{field: "m"}), chunk(content="yes"), chunk("stop"), DONE], [DONE]
    )
    shown, _ = talk(script, "well?", "again")
    assert shown.startswith("\x1b[2mhm\x1b[0m\x1b[2mm\x1b[0m\n\nyes\n")
    assert script.asked[1]["messages"][1] == {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("TERM", "")])
def test_nothing_is_dimmed_where_nobody_wants_it(talk, name, value, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    shown, _ = talk(Script([chunk(reasoning="hm"), chunk(content="yes"), chunk("stop"), DONE]), "well?")
    assert shown.startswith("hm\n\nyes\n")


def test_ctrl_c_stops_the_answer_and_not_the_program(talk):
    script = Script(
        [chunk(content="half"), KeyboardInterrupt()], [KeyboardInterrupt()], [chunk(content="ok"), DONE]
    )
    shown, noted = talk(script, "one", KeyboardInterrupt(), "two", "three", "/quit")
    assert "half" in shown and shown.endswith("ok\n") and noted.count("(stopped)") == 2 and "/quit" in noted
    assert script.closed == 3, "the server hears of it"
    said = [message["content"] for message in script.asked[2]["messages"]]
    assert said == ["one", "half", "three"], "what was said stays, a question without an answer does not"


def test_an_error_ends_the_answer_and_leaves_the_conversation_as_it_was(talk):
    failure = b'data: {"error": {"message": "no such luck", "code": 500}}\n\n'
    script = Script(
        [chunk(content="a"), failure, DONE], [chunk(content="b")], [b"data: {]\n"], [chunk(content="c"), DONE]
    )
    shown, noted = talk(script, "one", "two", "three", "four", "/quit")
    assert "error: no such luck" in noted and "ended the answer before it was complete" in noted
    assert "what is no chunk of an answer" in noted and shown.endswith("c\n")
    assert script.asked[3]["messages"] == [{"role": "user", "content": "four"}]


def test_what_a_terminal_would_obey_is_not_shown_and_other_lines_are_whole(talk):
    text = "a\x1b]0;title\x07\u2028b\x85\tc\nd"
    shown, _ = talk(
        Script([chunk(content=text)[:30], chunk(content=text)[30:], b": keep-alive\n\n", DONE]),
        "one",
        "/quit",
    )
    assert shown == "a\ufffd]0;title\ufffd\u2028b\ufffd\tc\nd\n"


def test_commands_that_are_none_and_answers_that_are_cut_off_are_explained(talk):
    script = Script([chunk("length", content="a"), DONE])
    _, noted = talk(script, "/help", "/nothing", "/system", "one", system="be kind")
    assert "there is no /nothing; /reset forgets" in noted and "be kind" in noted and "--max-tokens" in noted


def test_what_is_typed_wrong_is_not_sent(talk):
    script = Script([chunk(content="a"), DONE])
    _, noted = talk(script, "one", "\udcff", "/reset all", "/quit now", "/quit")
    assert "not UTF-8" in noted and "/reset stands alone" in noted and "/quit stands alone" in noted
    assert "(forgotten)" not in noted and len(script.asked) == 1


def piped(monkeypatch, text: str | bytes, *flags: str) -> int:
    raw = io.BytesIO(text.encode() if isinstance(text, str) else text)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw, encoding="utf-8"))
    return main(flags)


def test_what_is_piped_in_is_one_message_and_the_answer_alone_comes_out(monkeypatch, capsys):
    engine = FakeEngine()
    with live_server(engine, api_keys=("key",)) as url:
        flags = ("--base-url", f"{url}/v1/", "--api-key", "key", "--max-tokens", "3", "--temperature", "0")
        assert piped(monkeypatch, "hi\nthere\n", *flags) == 0
        shown, noted = capsys.readouterr()
        assert shown == "<user>\n" and "--max-tokens" in noted
        assert (engine.params[0].max_tokens, engine.params[0].temperature) == (3, 0.0)
        assert piped(monkeypatch, "hi", "--base-url", url) == 1
        assert (
            capsys.readouterr().err
            == "error: the server wants another API key than it got; give it with --api-key\n"
        )
        assert piped(monkeypatch, "hi", *flags, "--model", "other") == 1
        assert "error: the server answered 404: The model `other` does not exist" in capsys.readouterr().err
        assert piped(monkeypatch, "hi", *flags, "--temperature", "nan") == 1
        assert "400: temperature" in capsys.readouterr().err
        for text, says in (" \n", "there is no message"), (b"\xff", "is not UTF-8"):
            assert piped(monkeypatch, text, *flags) == 1
            assert says in capsys.readouterr().err


def test_where_nothing_can_be_read_or_written_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert main([]) == 1 and "no message on standard input" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdout", None)
    assert main([]) == 1 and "standard output is closed" in capsys.readouterr().err


def test_a_disk_that_is_full_is_said_in_one_line(monkeypatch, capsys):
    with live_server(FakeEngine()) as url:
        monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115 (main closes it)
        assert piped(monkeypatch, "hi", "--base-url", url, "--max-tokens", "2") == 1
        monkeypatch.undo()
    assert capsys.readouterr().err == "error: standard output cannot be written: No space left on device\n"


def test_an_answer_that_the_output_cannot_encode_is_shown_all_the_same(monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with live_server(FakeEngine()) as url:
        monkeypatch.setattr(sys, "stdout", output)
        assert piped(monkeypatch, "h\u00e9", "--base-url", url, "--max-tokens", "8") == 0
    assert b"h?" in output.buffer.getvalue()


def test_as_a_process_without_jax(tmp_path):
    with live_server(FakeEngine()) as url:
        code = (
            "import sys; from glm_dcp_jax.chat.__main__ import main; code = main(sys.argv[1:]); "
            "assert 'jax' not in sys.modules; sys.exit(code)"
        )
        command = [sys.executable, "-c", code, "--base-url", url, "--max-tokens", "2"]
        environment = {**os.environ, "HTTP_PROXY": "http://127.0.0.1:9", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, input="hi", capture_output=True, text=True, env=environment, timeout=60
        )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_a_server_that_is_not_there_is_said_in_one_line(monkeypatch, capsys):
    assert piped(monkeypatch, "hi", "--base-url", "http://127.0.0.1:9") == 1
    said = capsys.readouterr().err
    assert said.startswith("error: no server answers at http://127.0.0.1:9 (") and said.count("\n") == 1
    assert "start one with scripts/serve, or name it with --base-url" in said


@pytest.mark.parametrize(
    ("content", "says"), [(b"{}", "does not list models"), (b"<html>", "does not list models")]
)
def test_what_is_no_such_server(content, says):
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=content))
    with pytest.raises(ServerError, match=says):
        Client("http://test", transport=transport).first_model()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--base-url", "localhost"], "--base-url must be a URL such as http://127.0.0.1:8000"),
        (["--base-url", "ftp://a"], "--base-url must be a URL"),
        (["--base-url", "http://a:port"], "--base-url must be a URL"),
        (["--base-url", "http://a..b"], "--base-url must be a URL"),
        (["--base-url", "http://xn--a"], "--base-url must be a URL"),
        (["--base-url", "http://" + "a" * 64], "--base-url must be a URL"),
        (["--base-url", "http://\u00e4" + "a" * 80], "--base-url must be a URL"),
        (["--base-url", "http://a?b=1"], "must end before its \\? or #"),
        (["--api-key", "schl\u00fcssel"], "--api-key must be ASCII"),
        (["--temperature", "hot"], "--temperature: invalid float value: 'hot'"),
        (["--nothing"], "unrecognized arguments: --nothing"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(argv, says, capsys):
    with pytest.raises(ConfigError, match=says):
        parse(argv)
    assert main(argv) == 2
    assert capsys.readouterr().err.count("\n") == 1
