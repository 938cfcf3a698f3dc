"""Engines on the very small checkpoint, made once. A test that leaves a request or a page behind in one fails."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import CONFIG, PROMPT, check_idle, only, tiny_llm, write_drafting, write_tiny

from glm_dcp_jax import LLM


@pytest.fixture(scope="session")
def directory(tmp_path_factory) -> Path:
    """The checkpoint."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def drafting(tmp_path_factory) -> Path:
    """A checkpoint with an MTP layer whose guesses are often right."""
    return write_drafting(tmp_path_factory.mktemp("drafting"))


@pytest.fixture(scope="session")
def shared_llm(directory) -> LLM:
    return tiny_llm(directory)


@pytest.fixture
def llm(shared_llm) -> Iterator[LLM]:
    """An engine on one device."""
    yield shared_llm
    check_idle(shared_llm)


@pytest.fixture(scope="session")
def greedy(shared_llm) -> list[int]:
    """How PROMPT goes on, greedily."""
    return only(shared_llm, PROMPT).token_ids


@pytest.fixture(scope="session")
def shared_bare(directory, greedy) -> LLM:
    overrides = {"eos_token_id": [CONFIG["vocab_size"] - 1, greedy[3]]}
    return tiny_llm(directory, skip_tokenizer_init=True, hf_overrides=overrides)


@pytest.fixture
def bare(shared_bare) -> Iterator[LLM]:
    """Without a tokenizer, and with PROMPT's fourth greedy token as one of two end-of-sequence tokens."""
    yield shared_bare
    check_idle(shared_bare)
