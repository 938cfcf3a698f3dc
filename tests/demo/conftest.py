"""The built-in model, made once for all of its tests in a cache of their own."""

from pathlib import Path

import pytest

from glm_dcp_jax.demo import tiny_model_directory
from glm_dcp_jax.engine.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def directory(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return tiny_model_directory()


@pytest.fixture(scope="session")
def tokenizer(directory) -> Tokenizer:
    return Tokenizer.load(directory)
