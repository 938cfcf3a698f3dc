"""Bytes that collectives put on a link, how long these take, and links by name."""

import pytest

from glm_dcp_jax import plan
from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.parallel.link import NVLINK, PCIE5
from glm_dcp_jax.plan.link import LINKS, default_link, parse_link, wire_bytes
from glm_dcp_jax.plan.schedule import Collective


def collective(kind: str, operand: int, result: int, ranks: int = 4) -> Collective:
    return Collective("c", kind, "main", 1, 0, 1, ranks, operand, result, ())


@pytest.mark.parametrize(
    ("kind", "operand", "result", "sent"),
    [
        ("all-gather", 100, 400, 300),
        ("reduce-scatter", 400, 100, 300),
        ("all-reduce", 400, 400, 600),
        ("all-to-all", 400, 400, 300),
        ("ragged-all-to-all", 400, 400, 300),
        ("collective-permute", 400, 400, 400),
    ],
)
def test_each_kind_has_its_formula(kind, operand, result, sent):
    assert wire_bytes(collective(kind, operand, result)) == sent


def test_more_ranks_send_a_larger_part():
    assert wire_bytes(collective("all-gather", 100, 800, ranks=8)) == 700


def test_a_permute_needs_no_ranks_but_a_gather_does():
    assert wire_bytes(collective("collective-permute", 400, 400, ranks=0)) == 400
    with pytest.raises(ValueError, match="does not say how many GPUs"):
        wire_bytes(collective("all-gather", 100, 400, ranks=0))


def test_a_kind_without_a_formula_is_refused():
    with pytest.raises(ValueError, match="no formula for collective-broadcast"):
        wire_bytes(collective("collective-broadcast", 400, 400))


def test_the_stated_links():
    assert (PCIE5.bandwidth, PCIE5.latency) == (50e9, 10e-6)
    assert (NVLINK.bandwidth, NVLINK.latency) == (400e9, 5e-6)
    assert parse_link("pcie5") is PCIE5
    assert parse_link("nvlink") is NVLINK
    assert PCIE5.seconds(500_000) == pytest.approx(20e-6)


def test_a_link_of_two_numbers():
    link = parse_link("25e9, 3e-6")
    assert (link.bandwidth, link.latency) == (25e9, 3e-6)


@pytest.mark.parametrize("text", ["pcie4", "", "50e9", "50e9,1e-6,2", "fast,1e-6"])
def test_an_unknown_link_is_refused_with_what_there_is(text):
    with pytest.raises(ConfigError, match="use pcie5, nvlink, or BANDWIDTH,LATENCY"):
        parse_link(text)


@pytest.mark.parametrize(
    "text",
    "0,1e-6 -1,1e-6 nan,1e-6 inf,1e-6 1e-300,1e-6 1e308,1e-6 50e9,-1 50e9,nan 50e9,1e300".split(),
)
def test_a_link_that_cannot_be_is_refused(text):
    with pytest.raises(
        ConfigError, match="bandwidth is from 1000 to 1e\\+15 bytes/s and its latency from 0 to 10 s"
    ):
        parse_link(text)


def test_every_known_gpu_has_the_link_of_its_kind():
    links = {gpu: default_link(gpu) for gpu in plan.known_gpus()}
    assert links == {"B200": LINKS["nvlink"], "H200": LINKS["nvlink"], "RTX-PRO-6000": LINKS["pcie5"]}
