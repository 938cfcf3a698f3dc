"""Pages of other origins, and proxies that show the server under a path."""

import pytest

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.serve import flags
from glm_dcp_jax.serve.settings import ServerSettings

pytestmark = pytest.mark.anyio
PAGE = "https://chat.example.org"
COMPLETIONS = "/v1/completions"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.mark.parametrize("origins", [(PAGE,), ("*",)], ids=str)
async def test_a_page_may_ask_without_a_key_whether_it_may_send_one(engine, client_of, origins):
    client = client_of(engine, allowed_origins=origins, api_keys=("key",))
    answer = await client.options(COMPLETIONS, headers=PREFLIGHT)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origins[0]
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"]
    refused = await client.post(COMPLETIONS, json={"prompt": "a"}, headers={"Origin": PAGE})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == origins[0]
    headers = {"Origin": PAGE, "Authorization": "Bearer key"}
    allowed = await client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == origins[0]
    assert "X-Request-Id" in allowed.headers["access-control-expose-headers"]


async def test_a_page_may_read_errors_that_nobody_foresaw(engine, client_of, caplog):
    engine.fails_after = 0
    client = client_of(engine, allowed_origins=(PAGE,))
    answer = await client.post(COMPLETIONS, json={"prompt": "a"}, headers={"Origin": PAGE})
    assert answer.status_code == 500 and answer.headers["access-control-allow-origin"] == PAGE
    assert [record.getMessage() for record in caplog.records if record.exc_info] == ["a request failed"]


async def test_other_pages_may_not(engine, client_of):
    client = client_of(engine, allowed_origins=(PAGE,))
    answer = await client.options(COMPLETIONS, headers={**PREFLIGHT, "Origin": "https://evil.example"})
    assert answer.status_code == 400 and "access-control-allow-origin" not in answer.headers


async def test_methods_headers_and_credentials_are_what_was_said(engine, client_of):
    client = client_of(
        engine,
        allowed_origins=(PAGE,),
        allowed_methods=("GET",),
        allowed_headers=("X-Mine",),
        allow_credentials=True,
    )
    assert (await client.options(COMPLETIONS, headers=PREFLIGHT)).status_code == 400
    asked = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "GET",
        "Access-Control-Request-Headers": "x-mine",
    }
    answer = await client.options(COMPLETIONS, headers=asked)
    assert answer.status_code == 200 and answer.headers["access-control-allow-credentials"] == "true"


async def test_by_default_no_page_may(client):
    answer = await client.get("/v1/models", headers={"Origin": PAGE})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
    assert (await client.options(COMPLETIONS, headers=PREFLIGHT)).status_code == 405


@pytest.mark.parametrize("prefix", ["", "/glm"])
async def test_a_root_path_may_be_there_or_taken_away_and_opens_no_door(engine, client_of, prefix):
    client = client_of(engine, root_path="/glm", api_keys=("key",))
    assert (await client.get(f"{prefix}/health")).status_code == 200
    assert (await client.get(f"{prefix}/v1/models")).status_code == 401
    headers = {"Authorization": "Bearer key"}
    assert (await client.get(f"{prefix}/v1/models", headers=headers)).status_code == 200
    assert (await client.get(f"{prefix}/openapi.json")).json()["servers"][0]["url"] == "/glm"
    page = (await client.get(f"{prefix}/docs")).text
    assert 'fetch("openapi.json")' in page, "beside the page, wherever that is"
    brought = {"do_remote_prefill": True}
    wrong = {"prompt": 5, "kv_transfer_params": brought}
    assert (await client.post(f"{prefix}{COMPLETIONS}", json=wrong, headers=headers)).status_code == 400
    assert engine.dropped == [brought]


def test_they_are_said_on_the_command_line_as_in_vllm():
    argv = ["m", "--allowed-origins", f'["{PAGE}"]', "--allow-credentials", "--allowed-methods", '["GET"]']
    settings = flags.parse([*argv, "--root-path", "/a/b"], has_gpu=False).settings
    assert (settings.allowed_origins, settings.allowed_methods) == ((PAGE,), ("GET",))
    assert settings.allow_credentials and settings.root_path == "/a/b"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"allowed_origins": ("chat.example.org",)}, "allowed_origins must hold origins such as https://"),
        ({"allowed_origins": (PAGE + "/",)}, "allowed_origins must hold origins"),
        ({"allowed_origins": ("https://me@a.example",)}, "allowed_origins must hold origins"),
        ({"allowed_origins": ("http://a:port",)}, "allowed_origins must hold origins"),
        ({"allowed_origins": ("https://*.example",)}, "allowed_origins must hold origins"),
        ({"allowed_origins": ("https://\xe4.example",)}, "allowed_origins must hold origins"),
        ({"allowed_origins": ("https://a.example:443",)}, "allowed_origins must hold origins"),
        ({"allowed_origins": ("*",), "allowed_methods": ("get",)}, "in capitals, as GET, but holds 'get'"),
        ({"allow_credentials": True}, "allow_credentials says nothing without allowed_origins"),
        ({"allowed_methods": ("GET",)}, "allowed_methods says nothing without allowed_origins"),
        (
            {"allowed_origins": ("*",), "allow_credentials": True},
            "allow_credentials must not be given to all",
        ),
        ({"allowed_origins": ("*",), "allowed_headers": ("a b",)}, "allowed_headers must hold names"),
        ({"root_path": "glm"}, "root_path must be a path such as /glm"),
        ({"root_path": "/glm/"}, "root_path must be a path such as /glm"),
        ({"root_path": "/%41"}, "root_path must be a path such as /glm"),
        ({"root_path": "/a/.."}, "root_path must be a path such as /glm"),
        ({"root_path": "/v1"}, "root_path must be a path such as /glm, not one of the server's own"),
        ({"root_path": "/"}, "root_path must be a path such as /glm"),
        ({"sse_keep_alive_interval": -1.0}, "sse_keep_alive_interval must be 0 or more seconds"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(fields, says):
    with pytest.raises(ConfigError, match=says):
        ServerSettings(("m",), **fields)


@pytest.mark.parametrize("text", ["https://a.example", "[1]", "{}", '[["a"]]', "["])
def test_lists_are_json(text):
    with pytest.raises(ConfigError, match="--allowed-origins: must be a JSON list of strings"):
        flags.parse(["m", "--allowed-origins", text], has_gpu=False)
