"""The router's settings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.serve.draining import check_patience
from glm_dcp_jax.serve.settings import LOG_LEVELS

POLICIES = ("least_loaded", "round_robin")
MOST_BODY_BYTES = 2**26
"""Of a request: as much as the largest engine takes."""


def server_url(text: str, flag: str) -> str:
    """A server's URL without a slash at its end. Raises ConfigError for what is no plain http(s) URL."""
    example = "give it as http://host:port"
    try:
        parts = urlsplit(text)
        port = parts.port
        httpx.URL(text).host.encode("idna")  # refuses names that nothing could look up
    except (ValueError, httpx.InvalidURL) as error:
        raise ConfigError(f"{flag} {text!r} is not a URL ({error}); {example}") from None
    if parts.scheme not in ("http", "https"):
        raise ConfigError(f"{flag} {text!r} must begin with http:// or https://; {example}")
    if (
        not parts.hostname
        or port == 0
        or any(letter.isspace() or not letter.isprintable() for letter in text)
    ):
        raise ConfigError(f"{flag} {text!r} does not name a host and a port that can be reached; {example}")
    if "@" in parts.netloc:
        raise ConfigError(f"{flag} must not hold a user or password; clients send an Authorization header")
    if parts.query or parts.fragment:
        raise ConfigError(f"{flag} {text!r} must end before its ? or #; {example}")
    return text.rstrip("/")


@dataclass(frozen=True)
class RouterSettings:
    """Raises ConfigError for a value that cannot work.

    prefill, decode: URLs of the servers, as server_url() makes them. min_prefill_chars: a shorter prompt is left to the
    decode server alone. The rest are seconds. prefill_timeout: for the whole prefill leg, all tries together.
    decode_timeout: until the decode server's first byte, and again between its bytes. health_interval: between two
    looks at a server. shutdown_timeout: how long running requests may go on after a signal to stop.
    """

    prefill: Sequence[str]
    decode: Sequence[str]
    policy: str = "least_loaded"
    host: str = "127.0.0.1"
    port: int = 8100
    log_level: str = "info"
    min_prefill_chars: int = 0
    prefill_timeout: float = 300.0
    decode_timeout: float = 600.0
    health_interval: float = 5.0
    shutdown_timeout: float = 30.0

    def __post_init__(self) -> None:
        for flag, urls in (("--prefill", self.prefill), ("--decode", self.decode)):
            if not urls:
                raise ConfigError(f"{flag} is missing; name at least one server, as {flag} http://host:port")
            repeated = next((url for url in urls if urls.count(url) > 1), None)
            if repeated:
                raise ConfigError(f"{flag} names {repeated} twice; name each server once")
        if self.policy not in POLICIES:
            raise ConfigError(f"--policy must be one of {', '.join(POLICIES)}, but is {self.policy!r}")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(
                f"--log-level must be one of {', '.join(LOG_LEVELS)}, but is {self.log_level!r}"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be from 0 (any free one) to 65535, but is {self.port}")
        if self.min_prefill_chars < 0:
            raise ConfigError(f"--min-prefill-chars must be 0 (off) or more, but is {self.min_prefill_chars}")
        for name in ("prefill_timeout", "decode_timeout", "health_interval"):
            _require_seconds(name, getattr(self, name))
        check_patience("--shutdown-timeout", self.shutdown_timeout)


def _require_seconds(name: str, seconds: float) -> None:
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ConfigError(f"--{name.replace('_', '-')} must be more than 0 seconds, but is {seconds:g}")
