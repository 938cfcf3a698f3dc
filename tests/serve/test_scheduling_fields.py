"""Who is first and what is shared: `priority`, `cache_salt`, `cached_tokens`, and the prefix cache's reset."""

from dataclasses import replace

import pytest
from answers import events

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPTS = {COMPLETIONS: {"prompt": "a b"}, CHAT: {"messages": [{"role": "user", "content": "a b"}]}}


@pytest.fixture
def by_priority(engine) -> None:
    """The engine schedules by priority."""
    scheduler = replace(engine.config.scheduler, scheduling_policy="priority")
    engine.config = replace(engine.config, scheduler=scheduler)


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_priority_and_salt_reach_the_engine(by_priority, engine, post, path, stream):
    answer = await post(path, **PROMPTS[path], priority=-3, cache_salt="mine", stream=stream)
    assert answer.status_code == 200 and engine.ranks == [(-3, "mine")]


@pytest.mark.parametrize("path", PROMPTS)
async def test_without_them_all_are_equal(engine, post, path):
    for fields in ({}, {"priority": None, "cache_salt": None}, {"priority": 0}):
        assert (await post(path, **PROMPTS[path], **fields)).status_code == 200
    assert engine.ranks == [(0, "")] * 3


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_first_come_first_served_takes_no_priority(post, path, stream):
    answer = await post(path, **PROMPTS[path], priority=1, stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "priority")
    assert "--scheduling-policy priority" in error["message"]


@pytest.mark.parametrize("path", PROMPTS)
async def test_usage_says_how_much_of_the_prompt_was_cached(engine, post, path):
    engine.cached_tokens = 2
    whole = (await post(path, **PROMPTS[path], n=2, max_tokens=3)).json()["usage"]
    assert whole["prompt_tokens_details"] == {"cached_tokens": 2}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    assert events(await post(path, **PROMPTS[path], n=2, max_tokens=3, **options))[-1]["usage"] == whole


async def test_usage_adds_up_what_was_cached_of_several_prompts(engine, post):
    engine.cached_tokens = 2
    usage = (await post(COMPLETIONS, prompt=[[5, 6, 7], [8, 9, 10]], max_tokens=1)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_the_prefix_cache_can_be_reset(engine, client):
    engine.resets = [False, True]
    answers = [await client.post("/reset_prefix_cache") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [answer.json() for answer in answers] == [{"success": False}, {"success": True}]
    engine.is_dead = True
    assert (await client.post("/reset_prefix_cache")).status_code == 503
