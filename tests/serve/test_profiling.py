"""Traces of a running server, one at a time, and the load that it has."""

import asyncio
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from glm_dcp_jax.serve import tracing
from glm_dcp_jax.serve.field_texts import FIELD_TEXTS
from glm_dcp_jax.serve.tracing import Profiler

pytestmark = pytest.mark.anyio
START, STOP = "/start_profile", "/stop_profile"


@pytest.fixture
def traces(monkeypatch) -> list[str]:
    """Traces that were begun and ended, without jax."""
    seen: list[str] = []

    def stop(directory: Path, before: object) -> Path:
        seen.append("stop")
        return directory / "run"

    monkeypatch.setattr(tracing, "_stop", stop)
    monkeypatch.setattr(tracing, "_start", lambda directory: seen.append("start") or set())
    return seen


async def test_a_trace_is_begun_and_ended_and_the_answer_says_where_it_lies(
    engine, client_of, traces, tmp_path
):
    client = client_of(engine, profiler_dir=str(tmp_path))
    for _ in range(2):
        begun = await client.post(START)
        assert (begun.status_code, begun.json()) == (200, {"profiling": True, "profiler_dir": str(tmp_path)})
        ended = await client.post(STOP)
        assert (ended.status_code, ended.json()) == (
            200,
            {"profiling": False, "trace": str(tmp_path / "run")},
        )
    assert traces == ["start", "stop"] * 2


async def test_one_at_a_time(engine, client_of, traces, tmp_path):
    client = client_of(engine, profiler_dir=str(tmp_path))
    early = await client.post(STOP)
    assert (
        early.status_code == 400 and "begin one with POST /start_profile" in early.json()["error"]["message"]
    )
    answers = await asyncio.gather(*(client.post(START) for _ in range(3)))
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409]
    assert traces == ["start"]
    again = next(answer for answer in answers if answer.status_code == 409)
    assert (
        again.json()["error"]["message"] == "a trace is being taken already; end it with POST /stop_profile"
    )


@pytest.mark.parametrize("path", [START, STOP])
async def test_without_a_directory_there_is_none(client, path):
    answer = await client.post(path)
    assert answer.status_code == 404 and "--profiler-dir DIR" in answer.json()["error"]["message"]


async def test_they_want_the_api_key(engine, client_of, tmp_path):
    client = client_of(engine, api_keys=("key",), profiler_dir=str(tmp_path))
    assert [(await client.post(path)).status_code for path in (START, STOP)] == [401, 401]


async def test_a_directory_that_cannot_be_written_is_named_and_changes_nothing(engine, client_of, tmp_path):
    (tmp_path / "file").touch()
    client = client_of(engine, profiler_dir=str(tmp_path / "file"))
    answer = await client.post(START)
    assert (
        answer.status_code == 500 and f"--profiler-dir {tmp_path}/file" in answer.json()["error"]["message"]
    )
    assert (await client.post(STOP)).status_code == 400
    assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_a_trace_that_is_being_taken_is_not_lost_with_the_server(traces, tmp_path):
    profiler = Profiler(str(tmp_path))
    await profiler.start()
    profiler.close()
    Profiler(None).close()
    assert traces == ["start", "stop"]


async def test_a_trace_that_cannot_be_written_is_said_and_the_server_goes_on(
    engine, client_of, traces, tmp_path, monkeypatch
):
    def stop(directory: Path, before: object) -> Path:
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(tracing, "_stop", stop)
    client = client_of(engine, profiler_dir=str(tmp_path))
    assert (await client.post(START)).status_code == 200
    answer = await client.post(STOP)
    assert answer.status_code == 500 and "no space left" in answer.json()["error"]["message"]
    assert (await client.post(START)).status_code == 409, "it goes on"
    monkeypatch.setattr(tracing, "_stop", lambda directory, before: directory / "late")
    assert (await client.post(STOP)).json()["trace"] == str(tmp_path / "late")


async def test_a_trace_that_cannot_be_written_at_the_end_keeps_nothing_from_ending(
    traces, tmp_path, monkeypatch, caplog
):
    def stop(directory: Path, before: object) -> Path:
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(tracing, "_stop", stop)
    profiler = Profiler(str(tmp_path))
    await profiler.start()
    profiler.close()
    assert f"the trace is lost, {tmp_path} cannot be written" in caplog.text


async def test_the_load_is_what_is_being_answered(client_of):
    engine = FakeEngine(delay=0.05)
    client = client_of(engine)
    assert (await client.get("/load")).json() == {"server_load": 0}
    bodies = [{"prompt": "a", "max_tokens": 8, "stream": stream} for stream in (False, True)]
    running = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for body in bodies]
    while len(engine.running) < 2:
        await asyncio.sleep(0.01)
    assert (await client.get("/load")).json() == {"server_load": 2}
    await asyncio.gather(*running)
    assert (await client.get("/load")).json() == {"server_load": 0}


async def test_openapi_says_what_errors_look_like(client):
    described = (await client.get("/openapi.json")).json()
    assert described["info"]["title"] == "glm_dcp_jax" and described["info"]["description"]
    for path, methods in described["paths"].items():
        for method, about in methods.items():
            assert about["summary"] and about["description"], (method, path)
            assert "422" not in about["responses"], (method, path)
            for status in ("4XX", "5XX"):
                schema = about["responses"][status]["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorAnswer"}
    detail = described["components"]["schemas"]["ErrorDetail"]
    assert set(detail["required"]) == {"message", "type", "param", "code"}


async def test_openapi_says_what_every_field_of_a_request_means(client):
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    bodies = [schema for name, schema in schemas.items() if not name.startswith("Error")]
    fields = [
        (schema["title"], name, field) for schema in bodies for name, field in schema["properties"].items()
    ]
    assert len(fields) > 100
    assert not [(title, name) for title, name, field in fields if not field.get("description")]
    known = {name for _, name, _ in fields}
    assert set(FIELD_TEXTS) <= known, set(FIELD_TEXTS) - known
