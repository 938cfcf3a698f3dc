"""kv_transfer_params: there and back, and what cannot be meant."""

import json

import pytest

from glm_dcp_jax.transfer.references import BadReference, Reference, Wish

REFERENCE = Reference("engine/1", "cmpl-7", "127.0.0.1", 5600, "0f" * 16, 40, "tcp")
PARAMS = REFERENCE.as_params([3, 1, 2], tp=4, dcp=2)


def test_what_a_producer_says_a_consumer_understands():
    assert Wish.of_params(json.loads(json.dumps(PARAMS))) == Wish(brings=REFERENCE)
    assert REFERENCE.address == ("127.0.0.1", 5600)


def test_names_are_vllms():
    wanted = (
        "do_remote_prefill do_remote_decode remote_engine_id remote_request_id remote_block_ids remote_host "
        "remote_port remote_num_tokens tp_size dcp_size pp_size"
    )
    assert set(wanted.split()) <= set(PARAMS)
    assert PARAMS["remote_block_ids"] == [[3, 1, 2]] and (PARAMS["tp_size"], PARAMS["dcp_size"]) == (4, 2)


def test_nothing_is_asked_for_by_default():
    for params in (None, {}, {"do_remote_prefill": False, "do_remote_decode": False, "remote_host": None}):
        assert Wish.of_params(params) == Wish()


def test_a_router_asks_to_keep_a_cache_with_two_words():
    wish = Wish.of_params({"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None})
    assert wish == Wish(leaves=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"remote_key": "xyz"}, "remote_key must be 32 hex digits"),
        ({"remote_key": "0F" * 16}, "remote_key must be 32 hex digits"),
        ({"remote_key": None}, "remote_key must be a text"),
        ({"remote_host": ""}, "remote_host must be a text"),
        ({"remote_host": 7}, "remote_host must be a text"),
        ({"remote_host": "a\0b"}, "remote_host must be a text of 1 to 256 printable characters"),
        ({"remote_request_id": "two\nlines"}, "remote_request_id must be a text"),
        ({"remote_host": "\ud800"}, r"printable characters, but is '.ud800'"),
        ({"remote_lease_seconds": -1}, "remote_lease_seconds must be a number from 0"),
        ({"remote_lease_seconds": True}, "remote_lease_seconds must be a number"),
        ({"remote_port": 0}, "remote_port must be an integer from 1 to 65535"),
        ({"remote_port": True}, "remote_port must be an integer"),
        ({"remote_port": "5600"}, "remote_port must be an integer"),
        ({"remote_num_tokens": -1}, "remote_num_tokens must be an integer from 1"),
        ({"remote_engine_id": "x" * 257}, "remote_engine_id must be a text of 1 to 256"),
        ({"do_remote_decode": True}, "cannot both be true"),
        ({"do_remote_decode": "yes"}, "do_remote_decode must be true or false"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(change, said):
    with pytest.raises(BadReference, match=said):
        Wish.of_params(PARAMS | change)


def test_who_is_on_this_machine():
    hosts = ["127.0.0.1", "127.8.8.8", "::1", "localhost", "10.0.0.1", "example.org"]
    here = [Reference("e", "r", host, 1, "00" * 16, 1, "tcp").is_on_loopback for host in hosts]
    assert here == [True, True, True, True, False, False]
