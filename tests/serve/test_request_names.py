"""Requests are called what their client calls them."""

import re

import pytest
from starlette.requests import Request

from glm_dcp_jax.serve.errors import ApiError
from glm_dcp_jax.serve.request_names import names_of


def request(name: str | None) -> Request:
    headers = [] if name is None else [(b"x-request-id", name.encode())]
    return Request({"type": "http", "headers": headers})


def test_answers_have_the_clients_name_and_engines_one_that_nobody_else_has():
    one, other = names_of(request("mine-1"), "cmpl-"), names_of(request("mine-1"), "cmpl-")
    assert one.answer == other.answer == "cmpl-mine-1"
    assert one.engine != other.engine
    assert re.fullmatch("cmpl-mine-1-[0-9a-f]{8}", one.engine)


def test_a_body_may_say_the_name_where_no_header_does():
    assert names_of(request(None), "cmpl-", "mine-2").answer == "cmpl-mine-2"
    assert names_of(request("mine-1"), "cmpl-", "mine-2").answer == "cmpl-mine-1"
    with pytest.raises(ApiError, match="request_id must be 1 to 128 visible ASCII characters") as refused:
        names_of(request(None), "cmpl-", "two words")
    assert refused.value.param == "request_id"


@pytest.mark.parametrize("name", [None, "", "two words", "line\nbreak", "x" * 129, "h\u00e9"], ids=repr)
def test_without_one_that_can_stand_in_a_log_a_name_is_made(name):
    names = names_of(request(name), "chatcmpl-")
    assert names.answer == names.engine and re.fullmatch("chatcmpl-[0-9a-f]{32}", names.answer)
