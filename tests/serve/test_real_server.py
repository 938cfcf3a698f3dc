"""The real thing: `python -m glm_dcp_jax.serve` as a process, TP4/DCP4, spoken to by the openai client."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import jax
import openai
import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "glm_dcp_jax.serve"]
GREEDY = {"temperature": 0, "max_tokens": 8}


class Server:
    """A server process; its log is read along, so that it never blocks on a full pipe."""

    def __init__(self, *flags: str) -> None:
        # As many virtual devices as the server asks for, not what this test run has.
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        self.process = subprocess.Popen(
            [*COMMAND, "--port", "0", *flags], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        self.log: list[str] = []
        self.url = next(
            (found[1] for line in self._lines() if (found := re.search(r"ready at (http://\S+)/v1", line))),
            None,
        )
        assert self.url, "".join(self.log)
        threading.Thread(target=lambda: list(self._lines()), daemon=True).start()

    def _lines(self) -> Iterator[str]:
        for line in self.process.stderr:
            self.log.append(line)
            yield line

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def server(devices, tmp_path_factory) -> Iterator[Server]:
    devices(4)
    few_programs = ("--max-num-seqs", "4", "--precompile-bs-paddings", "4")
    traces = ("--profiler-dir", str(tmp_path_factory.mktemp("traces")))
    running = Server("--api-key", "secret", "-tp", "4", "-dcp", "4", *few_programs, *traces)
    yield running
    assert running.process.poll() is None, "the server died"
    assert running.stop() == 0


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


@pytest.fixture(scope="module")
def model(client) -> str:
    return client.models.list().data[0].id


def metrics(server: Server) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics").text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name.split("{")[0]: float(value) for name, value in lines}


def test_the_log_tells_the_capacity_as_vllm_does(server):
    log = "".join(server.log)
    assert re.search(r"GPU KV cache size: [\d,]+ tokens", log)
    assert re.search(r"Maximum concurrency for 4,096 tokens per request: [\d.]+x", log)
    assert (
        "serving the built-in model, whose weights are random: tensor parallel size 4, decode context " in log
    )


def test_a_completion_and_its_stream_are_the_same(client, model):
    whole = client.completions.create(model=model, prompt="Once upon a time", **GREEDY)
    stream = client.completions.create(model=model, prompt="Once upon a time", stream=True, **GREEDY)
    pieces = [chunk.choices[0] for chunk in stream]
    assert "".join(piece.text for piece in pieces) == whole.choices[0].text != ""
    assert pieces[-1].finish_reason == whole.choices[0].finish_reason


def test_chat_and_its_stream_are_the_same(client, model):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    whole = client.chat.completions.create(model=model, messages=messages, **GREEDY)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model=model, messages=messages, **options, **GREEDY))
    thought = [getattr(chunk.choices[0].delta, "reasoning", None) for chunk in chunks if chunk.choices]
    assert "".join(filter(None, thought)) == whole.choices[0].message.reasoning != ""  # the prompt opens it
    of_stream, usage = chunks[-1].usage, whole.usage
    assert (of_stream.prompt_tokens, of_stream.completion_tokens) == (
        usage.prompt_tokens,
        usage.completion_tokens,
    )
    assert usage.completion_tokens > 0
    assert (
        of_stream.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    )  # what the first request computed


def test_a_response_and_its_stream_are_the_same(client, model):
    asked = {"model": model, "input": "Who?", "temperature": 0, "max_output_tokens": 8}
    whole = client.responses.create(**asked)
    *_, last = client.responses.create(**asked, stream=True)
    assert last.type == "response.incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert last.response.output[0].content == whole.output[0].content
    answers = {"type": "json_schema", "name": "answer", "schema": {"enum": ["yes", "no"]}}
    asked |= {"text": {"format": answers}, "reasoning": {"effort": "none"}}
    assert json.loads(client.responses.create(**asked).output_text) in ("yes", "no")


def test_structured_outputs_are_what_was_asked_for(client, model):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"enum": [1, 22]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answers = {"enum": ["yes", "no"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": answers, "strict": True}}
    messages = [{"role": "user", "content": "Who?"}]
    options = {"model": model, "messages": messages, "max_tokens": 60, "temperature": 1.2, "seed": 3}
    no_thoughts = {"chat_template_kwargs": {"enable_thinking": False}}
    compact = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
    whole = client.chat.completions.create(extra_body=no_thoughts | compact, **options).choices[0]
    assert whole.finish_reason == "stop"
    person = json.loads(whole.message.content)
    assert set(person) == {"name", "age"} and person["age"] in (1, 22) and len(person["name"]) <= 5
    options |= {"extra_body": no_thoughts}
    whole = client.chat.completions.create(response_format=form, **options).choices[0]
    assert json.loads(whole.message.content) in ("yes", "no") and whole.finish_reason == "stop"
    streamed = client.chat.completions.create(response_format=form, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole.message.content
    completed = client.completions.create(
        model=model, prompt="Yes or no?", extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert completed.choices[0].text in ("yes", "no")
    with pytest.raises(openai.BadRequestError, match="json cannot be used: Invalid type: foo") as refused:
        form["json_schema"]["schema"] = {"type": "foo"}
        client.chat.completions.create(response_format=form, **options)
    assert refused.value.body["param"] == "response_format"


def test_tokens_in_are_tokens_out_and_text_goes_through_tokenize(server, client, model):
    header = {"Authorization": "Bearer secret"}
    body = {"model": model, "prompt": "Hello, world"}
    tokens = httpx.post(f"{server.url}/tokenize", json=body, headers=header).json()["tokens"]
    back = httpx.post(f"{server.url}/detokenize", json={"model": model, "tokens": tokens}, headers=header)
    assert back.json()["prompt"] == "Hello, world"
    by_text = client.completions.create(model=model, prompt="Hello, world", **GREEDY)
    by_tokens = client.completions.create(model=model, prompt=tokens, **GREEDY)
    assert by_text.choices[0].text == by_tokens.choices[0].text


def test_what_is_wrong_is_said_and_the_server_lives_on(server, client, model):
    before = metrics(server)
    with pytest.raises(openai.NotFoundError, match="`nobody` does not exist"):
        client.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens"):
        client.completions.create(model=model, prompt=[1] * 5000)
    with pytest.raises(openai.BadRequestError, match="not in the vocabulary"):
        client.completions.create(model=model, prompt=[10**6])
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()
    bad = httpx.post(f"{server.url}/v1/completions", content="{", headers={"Authorization": "Bearer secret"})
    assert bad.status_code == 400 and bad.json()["error"]["type"] == "BadRequestError"
    assert httpx.get(f"{server.url}/health").status_code == 200
    after = metrics(server)
    assert after["vllm:prompt_tokens_total"] == before["vllm:prompt_tokens_total"]
    assert client.completions.create(model=model, prompt="still there?", **GREEDY).choices[0].text


def test_metrics_count_tokens_and_no_page_is_kept(server, client, model):
    before = metrics(server)
    usage = client.completions.create(
        model=model, prompt=[5] * 100, max_tokens=7, extra_body={"ignore_eos": True}
    ).usage
    after = metrics(server)
    assert usage.completion_tokens == 7
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == 100
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 7
    assert after["vllm:kv_cache_usage_perc"] == 0 and after["vllm:num_requests_running"] == 0


def test_an_echoed_text_has_the_logprobs_it_was_sampled_with(client, model):
    extra = {"ignore_eos": True, "return_token_ids": True}
    asked = {"model": model, "logprobs": 2, "echo": True, "temperature": 0, "extra_body": extra}
    said = client.completions.create(prompt=[7, 8, 9], max_tokens=5, **asked).choices[0]
    whole = [7, 8, 9, *said.token_ids]
    read = client.completions.create(prompt=whole, max_tokens=0, **asked).choices[0].logprobs
    assert read.tokens == said.logprobs.tokens and len(read.tokens) == 8
    assert read.token_logprobs[0] is None and said.logprobs.token_logprobs[0] is None
    assert read.token_logprobs[1:] == pytest.approx(said.logprobs.token_logprobs[1:], abs=1e-3)
    scored = client.completions.create(
        model=model, prompt=whole, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    first, *scores = scored.choices[0].prompt_logprobs
    assert first is None and [list(entry) for entry in scores] == [[str(token)] for token in whole[1:]]
    assert [entry[str(token)]["logprob"] for token, entry in zip(whole[1:], scores, strict=True)] == (
        pytest.approx(read.token_logprobs[1:], abs=1e-6)
    )


def test_a_prompt_is_computed_once_until_the_prefix_cache_is_reset(server, client, model):
    def cached(salt: str) -> int:  # a full block of 4 ranks x 64 tokens, and a part of the next
        made = client.completions.create(
            model=model, prompt=list(range(100, 400)), max_tokens=1, extra_body={"cache_salt": salt}
        )
        return made.usage.prompt_tokens_details.cached_tokens

    def reset() -> httpx.Response:
        return httpx.post(f"{server.url}/reset_prefix_cache", headers={"Authorization": "Bearer secret"})

    before = metrics(server)
    assert [cached(salt) for salt in ("a", "b", "a")] == [0, 0, 299]
    assert httpx.post(f"{server.url}/reset_prefix_cache").status_code == 401
    assert (reset().status_code, reset().json()) == (200, {"success": True})
    assert cached("a") == 0
    after = metrics(server)
    assert (
        after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"]
        == after["vllm:prompt_tokens_cached_total"] - before["vllm:prompt_tokens_cached_total"]
        == 299
    )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--no-such-flag"], 2, "unknown flag --no-such-flag"),
        (["--enable-lora"], 2, "--enable-lora is not supported"),
        (
            ["model", "-tp", "4", "-dcp", "3"],
            2,
            "does not divide --tensor-parallel-size 4; use one of 1, 2, 4",
        ),
        (["/does/not/exist"], 1, "/does/not/exist"),
        ([str(ROOT / "docs")], 1, "config.json"),
    ],
)
def test_a_start_that_cannot_work_says_why(arguments, code, words):
    ended = subprocess.run(
        [*COMMAND, "--port", "0", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == code
    assert words in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_trace_of_the_running_engine_can_be_read_back(server, client, model):
    secret = {"Authorization": "Bearer secret"}
    begun = httpx.post(f"{server.url}/start_profile", headers=secret, timeout=60)
    assert begun.status_code == 200, begun.text
    assert httpx.post(f"{server.url}/start_profile", headers=secret).status_code == 409
    client.completions.create(model=model, prompt="What takes how long?", **GREEDY)
    ended = httpx.post(f"{server.url}/stop_profile", headers=secret, timeout=120)
    assert ended.status_code == 200, ended.text
    [file] = Path(ended.json()["trace"]).glob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(file))
    events = [event.name for plane in profile.planes for line in plane.lines for event in line.events]
    assert any("all-gather" in name or "all_gather" in name for name in events), sorted(set(events))[:200]
