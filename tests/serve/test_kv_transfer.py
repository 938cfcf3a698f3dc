"""kv_transfer_params through the API: passed on and answered, and no cache held in vain, however a request ends."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest
from answers import events
from fake_engine import FakeEngine
from live import live_server, wait_until
from test_disconnect import begin

from glm_dcp_jax.config.transfer import TransferConfig
from glm_dcp_jax.engine.waiting import QueueFull
from glm_dcp_jax.serve.handover import Handover

pytestmark = pytest.mark.anyio
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
RELEASE = "/v1/kv_transfer/release"
PROMPTS = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
    RESPONSES: {"input": "a"},
}
EVERY = pytest.mark.parametrize("path", PROMPTS)
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
BROUGHT = {"do_remote_prefill": True, "remote_key": "k", "remote_block_ids": [[1, 2]]}
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
OFFERED = {"do_remote_prefill": True, "remote_key": "offered"}


def asking(path: str, tokens: int) -> dict:
    """A prompt, and how long the answer may be."""
    return {**PROMPTS[path], "max_output_tokens" if path == RESPONSES else "max_tokens": tokens}


@pytest.fixture
def engine() -> FakeEngine:
    made = FakeEngine()
    made.offered = OFFERED
    made.config = replace(made.config, transfer=TransferConfig("tcp"))
    return made


class TestParams:
    @EVERY
    @STREAM
    async def test_reach_the_engine_as_they_came(self, post, engine, path, stream):
        answer = await post(path, **asking(path, 2), stream=stream, kv_transfer_params=BROUGHT)
        assert answer.status_code == 200
        assert engine.params[0].kv_transfer_params == BROUGHT
        assert engine.dropped == engine.released == []

    @EVERY
    async def test_come_back_at_the_top_of_the_answer(self, post, path):
        asked = await post(path, **asking(path, 1), kv_transfer_params=ASKED)
        assert asked.json()["kv_transfer_params"] == OFFERED
        plain = await post(path, **asking(path, 1))
        assert plain.json()["kv_transfer_params"] is None

    async def test_come_back_with_the_event_that_ends_a_response(self, post):
        answer = await post(RESPONSES, **asking(RESPONSES, 3), stream=True, kv_transfer_params=ASKED)
        *before, last = [
            json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")
        ]
        assert last["response"]["kv_transfer_params"] == OFFERED
        assert not any("kv_transfer_params" in event.get("response", {}) for event in before)

    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    async def test_come_back_with_the_chunk_that_ends_a_stream(self, post, path):
        body = {**PROMPTS[path], "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
        chunks = events(await post(path, **body, kv_transfer_params=ASKED))
        ends = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["finish_reason"]]
        assert [chunk for chunk in chunks if "kv_transfer_params" in chunk] == ends
        assert [chunk["kv_transfer_params"] for chunk in ends] == [OFFERED]

    @EVERY
    @pytest.mark.parametrize("nothing", [None, {}])
    async def test_may_ask_for_nothing(self, post, engine, path, nothing):
        answer = await post(path, **PROMPTS[path], kv_transfer_params=nothing)
        assert answer.status_code == 200 and engine.params[0].kv_transfer_params is None

    async def test_are_for_one_prompt(self, post, engine):
        answer = await post(COMPLETIONS, prompt=["a", "b"], kv_transfer_params=BROUGHT)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "kv_transfer_params"
        assert "one prompt" in answer.json()["error"]["message"]
        assert engine.dropped == [BROUGHT]
        assert (await post(COMPLETIONS, prompt=["a"], kv_transfer_params=BROUGHT)).status_code == 200

    @pytest.mark.parametrize("wrong", [[1], "text", 5, True])
    async def test_are_an_object(self, post, wrong):
        answer = await post(COMPLETIONS, prompt="a", kv_transfer_params=wrong)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "kv_transfer_params"


REFUSALS = {
    "a field of a wrong type": ({"temperature": "hot"}, 400),
    "a field without support": ({"tools": [{"type": "function"}]}, 400),
    "a value out of range": ({"top_p": 7}, 400),
    "an unknown model": ({"model": "other"}, 404),
    "too many logprobs": ({"prompt_logprobs": 21}, 400),
    "more than fits": ({"max_tokens": 1000, "max_output_tokens": 1000}, 400),
}


class TestRefused:
    """Nothing of these requests reached the engine, so the server tells the producer, once."""

    @EVERY
    @STREAM
    @pytest.mark.parametrize("why", REFUSALS)
    async def test_for_what_it_asks(self, post, engine, path, stream, why):
        fields, status = REFUSALS[why]
        body = {**PROMPTS[path], "stream": stream, "kv_transfer_params": BROUGHT, **fields}
        assert (await post(path, **body)).status_code == status
        assert engine.dropped == [BROUGHT] and engine.params == []

    @EVERY
    @pytest.mark.parametrize("state", [{"is_ready": False}, {"is_dead": True}], ids=str)
    async def test_for_the_state_of_the_engine(self, post, engine, path, state):
        vars(engine).update(state)
        answer = await post(path, **PROMPTS[path], kv_transfer_params=BROUGHT)
        assert answer.status_code == 503 and engine.dropped == [BROUGHT]

    async def test_for_a_long_prompt(self, post, engine):
        answer = await post(COMPLETIONS, prompt=[5] * 100, kv_transfer_params=BROUGHT)
        assert answer.status_code == 400 and engine.dropped == [BROUGHT]

    async def test_for_a_chat_template_that_fails(self, client_of, engine):
        client = client_of(engine, chat_template="{{ raise_exception('no') }}")
        answer = await client.post(CHAT, json={**PROMPTS[CHAT], "kv_transfer_params": BROUGHT})
        assert answer.status_code == 400 and engine.dropped == [BROUGHT]

    async def test_while_the_server_stops(self, engine, client_of):
        client = client_of(engine)
        client._transport.app.state.context.stopping.set()
        engine.delay = 5.0
        answer = await client.post(COMPLETIONS, json={"prompt": "a", "kv_transfer_params": BROUGHT})
        assert answer.status_code == 503
        assert len(engine.dropped) + len(engine.aborted) == 1, "told here, or by the engine"

    async def test_without_a_key_nobody_is_told(self, client_of, engine):
        client = client_of(engine, api_keys=("secret",))
        answer = await client.post(COMPLETIONS, json={"prompt": "a", "kv_transfer_params": BROUGHT})
        assert answer.status_code == 401 and engine.dropped == []

    async def test_on_other_paths_nobody_is_told(self, post, engine):
        assert (await post("/tokenize", kv_transfer_params=BROUGHT)).status_code == 400
        assert engine.dropped == []

    @STREAM
    async def test_by_the_engine_the_engine_tells(self, post, engine, stream):
        engine.full = QueueFull("max_num_queued_reqs", "full")
        answer = await post(COMPLETIONS, prompt="a", stream=stream, kv_transfer_params=BROUGHT)
        assert answer.status_code == 503 and engine.dropped == []


class Slow:
    """A tokenizer that takes its time."""

    def __init__(self, inner: object, begun: list[str], go_on: Callable[[], bool]) -> None:
        self._inner, self._begun, self._go_on = inner, begun, go_on

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self._begun.append(text)
        wait_until(self._go_on)
        return self._inner.encode(text, add_special_tokens)


@STREAM
def test_a_client_that_leaves_before_the_engine_knows_takes_its_cache_along(engine, stream):
    begun: list[str] = []
    engine.tokenizer = Slow(engine.tokenizer, begun, lambda: bool(engine.dropped))
    with live_server(engine) as url:
        connection = begin(url, prompt="long text", stream=stream, kv_transfer_params=BROUGHT)
        wait_until(lambda: bool(begun))
        connection.close()
        wait_until(lambda: engine.dropped == [BROUGHT])
    assert engine.params == []


def test_an_offer_that_is_not_yet_on_its_way_is_taken_back_when_the_client_leaves(engine):
    engine.lingers = 30.0
    with live_server(engine) as url:
        connection = begin(url, prompt=[5], max_tokens=1, kv_transfer_params=ASKED)
        wait_until(lambda: bool(engine.generation_tokens))
        connection.close()
        wait_until(lambda: engine.released == [OFFERED])


def test_an_offer_that_the_client_has_read_is_its_concern(engine):
    engine.lingers = 30.0
    with live_server(engine) as url:
        connection = begin(url, prompt=[5], max_tokens=1, stream=True, kv_transfer_params=ASKED)
        said = b""
        while b"kv_transfer_params" not in said:
            said += connection.recv(4096)
        connection.close()
        wait_until(lambda: not engine.running)
    assert engine.released == []


def test_a_handover_is_called_off_once_and_only_for_what_is_the_servers(engine):
    handover = Handover(engine, BROUGHT)
    with pytest.raises(asyncio.CancelledError), handover.guarded():
        handover.taken()
        handover.left(OFFERED)
        raise asyncio.CancelledError
    handover.call_off()
    assert (engine.dropped, engine.released) == ([], [OFFERED])


class TestFailed:
    """The cache did not arrive: never 200 with a token."""

    WHY = "the KV cache of its prompt did not arrive (lost)"

    @EVERY
    @STREAM
    async def test_is_an_error_that_says_so(self, post, engine, path, stream):
        engine.error = self.WHY
        answer = await post(path, **PROMPTS[path], stream=stream, kv_transfer_params=BROUGHT)
        assert answer.status_code == 500
        assert answer.json()["error"] == {
            "message": self.WHY,
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
        assert engine.dropped == []  # the engine has told

    async def test_counts_as_an_error(self, post, client, engine):
        engine.error = self.WHY
        await post(COMPLETIONS, prompt="a", n=2)
        metrics = (await client.get("/metrics")).text
        assert 'finished_reason="error",model_name="fake"} 2.0' in metrics


class TestRelease:
    async def test_says_whether_it_was_held(self, post, engine):
        answer = await post(RELEASE, kv_transfer_params=OFFERED)
        assert (answer.status_code, answer.json()) == (200, {"released": True})
        other = await post(RELEASE, kv_transfer_params={**OFFERED, "remote_key": "other"})
        assert (other.status_code, other.json()) == (200, {"released": False})

    @pytest.mark.parametrize(
        "body", [{}, {"kv_transfer_params": None}, {"kv_transfer_params": 5}, {"kv_transfer_params": {}}]
    )
    async def test_of_nonsense_is_a_bad_request(self, post, engine, body):
        answer = await post(RELEASE, **body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "kv_transfer_params"
        assert engine.released == []

    @pytest.mark.parametrize("transfer", [None, TransferConfig("tcp", "kv_consumer")])
    async def test_needs_a_producer(self, post, engine, transfer):
        engine.config = replace(engine.config, transfer=transfer)
        answer = await post(RELEASE, kv_transfer_params=OFFERED)
        assert answer.status_code == 404 and "kv_producer" in answer.json()["error"]["message"]

    async def test_wants_the_api_key(self, client_of, engine):
        client: httpx.AsyncClient = client_of(engine, api_keys=("secret",))
        body = {"kv_transfer_params": OFFERED}
        assert (await client.post(RELEASE, json=body)).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert (await client.post(RELEASE, json=body, headers=headers)).json() == {"released": True}
        assert engine.released == [OFFERED]

    async def test_works_although_requests_cannot(self, post, engine):
        engine.is_dead = True
        assert (await post(RELEASE, kv_transfer_params=OFFERED)).json() == {"released": True}
