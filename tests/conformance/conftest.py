"""One server for all clients."""

from collections.abc import Iterator

import httpx
import pytest
from server import served


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    flags = ("-tp", "2", "-dcp", "2", "--max-num-seqs", "8", "--precompile-bs-paddings", "8")
    with served("--api-key", "secret", *flags) as found:
        yield found.url


@pytest.fixture(scope="session")
def model(url) -> str:
    answer = httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer secret"})
    return answer.json()["data"][0]["id"]
