"""Which server is picked, and what the router says about its servers."""

import pytest
from fake_backend import Script, answer, stream
from live import wait_until

from glm_dcp_jax.serve.router.backends import Pool

HANG = Script(hang_at=-1)


def pool(policy: str, last_resort: bool = False, count: int = 3) -> Pool:
    return Pool("decode", [f"http://s{place}" for place in range(count)], policy, last_resort)


def picked(pool: Pool, times: int) -> str:
    return " ".join(pool.pick().url[-1] for _ in range(times))


def test_round_robin_takes_turns():
    assert picked(pool("round_robin"), 7) == "0 1 2 0 1 2 0"


def test_round_robin_passes_over_what_is_unhealthy_and_goes_on_behind_it():
    servers = pool("round_robin")
    servers.backends[1].observe(False)
    assert picked(servers, 4) == "0 2 0 2"
    servers.backends[1].observe(True)
    assert picked(servers, 4) == "0 1 2 0"


def test_least_loaded_counts_what_is_in_flight_and_ties_go_in_order():
    servers = pool("least_loaded")
    first, second, third = servers.backends
    assert servers.pick() is first
    with first.busy(), first.busy(), second.busy():
        assert servers.pick() is third
        with third.busy(), third.busy():
            assert servers.pick() is second
    assert servers.pick() is first


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded"])
def test_no_server_is_picked_twice_for_one_request(policy):
    servers = pool(policy)
    tried = []
    while found := servers.pick(tried):
        tried.append(found)
    assert sorted(each.url[-1] for each in tried) == ["0", "1", "2"]


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded"])
def test_an_unhealthy_server_is_a_last_resort_or_none(policy):
    for last_resort in (True, False):
        servers = pool(policy, last_resort)
        for each in servers.backends:
            each.observe(False)
        assert (servers.pick() is not None) == last_resort
        servers.backends[2].observe(True)
        assert picked(servers, 2) == "2 2"
        assert (servers.pick([servers.backends[2]]) is not None) == last_resort


def test_round_robin_on_both_legs(router_of, fleet):
    router = router_of(policy="round_robin")
    for _ in range(4):
        router.post()
    assert [len(backend.seen) for backend in fleet.all] == [2, 2, 2, 2]
    pairs = [(seen.body["kv_transfer_params"]["key"]) for each in fleet.decode for seen in each.seen]
    assert pairs == ["of-p0", "of-p0", "of-p1", "of-p1"]


def test_least_loaded_is_the_default_and_counts_streams(router, fleet):
    fleet.decode[0].script = stream(b"data: 1\n\n", b"data: 2\n\n", hang_at=1)
    with router.client.stream("POST", "/v1/completions", json={"stream": True}):
        assert router.metric("in_flight", role="decode", backend=fleet.decode[0].url) == 1
        router.post()
        assert (len(fleet.decode[0].seen), len(fleet.decode[1].seen)) == (1, 1)
        assert (len(fleet.prefill[0].seen), len(fleet.prefill[1].seen)) == (2, 0)
    wait_until(lambda: router.metric("in_flight", role="decode", backend=fleet.decode[0].url) == 0)
    fleet.decode[0].script = answer({})
    router.post()
    assert len(fleet.decode[0].seen) == 2


def test_an_unhealthy_server_is_not_picked_until_it_is_well_again(router_of, fleet):
    fleet.prefill[0].health = fleet.decode[0].health = Script(status=503)
    router = router_of(health_interval=0.05)
    router.post()
    assert fleet.prefill[0].seen == fleet.decode[0].seen == []
    assert len(fleet.prefill[1].seen) == len(fleet.decode[1].seen) == 1
    assert router.metric("healthy", role="prefill", backend=fleet.prefill[0].url) == 0
    assert router.client.get("/health").status_code == 200
    fleet.prefill[0].health = fleet.decode[0].health = Script()
    wait_until(lambda: all(each.healthy for each in router.context.backends))
    router.post()
    assert len(fleet.prefill[0].seen) == len(fleet.decode[0].seen) == 1


COUNT = {"prefill_instances": 2, "decode_instances": 2}


def test_health_needs_a_decode_server(router_of, fleet):
    for backend in fleet.decode:
        backend.health = Script(status=503)
    router = router_of(health_interval=0.05)
    got = router.client.get("/health")
    assert got.status_code == 503 and got.json()["error"]["message"] == "no decode server is healthy"
    assert router.client.get("/healthcheck").json() == {"status": "unhealthy", **COUNT}
    fleet.decode[1].health = Script()
    wait_until(lambda: router.client.get("/health").status_code == 200)
    assert router.client.get("/healthcheck").json() == {"status": "ok", **COUNT}


def test_without_a_prefill_server_requests_are_served_and_healthcheck_says_so(router_of, fleet):
    for backend in fleet.prefill:
        backend.health = Script(status=503)
    router = router_of(health_interval=0.05)
    wait_until(lambda: router.client.get("/health").status_code == 200)
    assert router.client.get("/healthcheck").json() == {"status": "unhealthy", **COUNT}
    assert router.post().status_code == 200


def test_a_server_that_cannot_be_reached_is_unhealthy(router_of, fleet, dead_url):
    router = router_of(prefill=(dead_url,))
    wait_until(lambda: router.client.get("/healthcheck").json()["status"] == "unhealthy")
    assert router.post().status_code == 200, "decode servers can do without"
    assert router.metric("fallbacks_total", reason="unhealthy") == 1


def test_unhealthy_decode_servers_are_asked_where_there_are_no_others(router_of, fleet):
    for backend in fleet.decode:
        backend.health = Script(status=503)
    assert router_of().post().status_code == 200


def test_models_are_those_of_a_decode_server(router_of, fleet, dead_url):
    router = router_of(decode=(dead_url, fleet.decode[1].url))
    fleet.decode[1].script = answer({"object": "list", "data": [{"id": "m"}]})
    got = router.client.get("/v1/models", headers={"Authorization": "Bearer secret"})
    assert got.json()["data"] == [{"id": "m"}] and got.headers["content-type"] == "application/json"
    assert fleet.decode[1].only.headers["authorization"] == "Bearer secret"
    fleet.decode[1].script = answer({"error": "Unauthorized"}, status=401)
    assert router.client.get("/v1/models").status_code == 401


def test_models_without_a_decode_server(router_of, dead_url):
    assert router_of(decode=(dead_url,)).client.get("/v1/models").status_code == 502


def test_legs_are_timed(router, fleet):
    fleet.prefill[0].script = answer({"kv_transfer_params": {"key": "k"}}, delay=0.1)
    fleet.decode[0].script = stream(b"data: 1\n\n", b"data: [DONE]\n\n", delay=0.1, pause=0.2)
    router.post(stream=True)
    wait_until(lambda: router.metric("decode_seconds_count") == 1)
    prefill, first_byte, whole = (
        router.metric(f"{leg}_seconds_sum") for leg in ("prefill", "decode_first_byte", "decode")
    )
    assert (
        prefill >= 0.09 and first_byte >= 0.09 and whole >= first_byte + 0.15
    )  # clocks of several processes
