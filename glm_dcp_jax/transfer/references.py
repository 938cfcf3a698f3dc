"""`kv_transfer_params`: what a producer's answer says of the cache it holds, and a consumer's request brings along.

Names are vLLM's where it has them; `remote_key` is what a consumer proves its right by.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KEY = re.compile(r"[0-9a-f]{32}")
_MOST_CHARACTERS = 256
_MOST_SECONDS = 86_400


class BadReference(ValueError):
    """kv_transfer_params that cannot be used; the message says why."""


@dataclass(frozen=True)
class Reference:
    """Where a request's cache is. num_tokens: of its prompt. lease: seconds for which it is held; 0 for unknown."""

    engine_id: str
    request_id: str
    host: str
    port: int
    key: str
    num_tokens: int
    connector: str
    lease: float = 0.0

    @property
    def address(self) -> tuple[str, int]:
        """Where its producer listens."""
        return self.host, self.port

    def as_params(self, pages: list[int], tp: int, dcp: int) -> dict[str, Any]:
        """For the answer of the producer; whoever gets it hands it to a consumer unchanged."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_block_ids": [pages],
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_key": self.key,
            "remote_num_tokens": self.num_tokens,
            "remote_lease_seconds": self.lease,
            "kv_connector": self.connector,
            "tp_size": tp,
            "dcp_size": dcp,
            "pp_size": 1,
            "transfer_mode": "pull",
        }

    @staticmethod
    def of_params(params: Mapping[str, Any]) -> "Reference":
        """As a request brought it. Raises BadReference for fields that are missing or cannot be."""
        found = Reference(
            engine_id=_text(params, "remote_engine_id"),
            request_id=_text(params, "remote_request_id"),
            host=_text(params, "remote_host"),
            port=_integer(params, "remote_port", 65535),
            key=_text(params, "remote_key"),
            num_tokens=_integer(params, "remote_num_tokens", 2**31 - 1),
            connector=_text(params, "kv_connector"),
            lease=_seconds(params, "remote_lease_seconds"),
        )
        if not _KEY.fullmatch(found.key):
            raise BadReference("remote_key must be 32 hex digits, as the producer's answer has them")
        return found

    @property
    def is_on_loopback(self) -> bool:
        """Whether it leads to this machine only."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True)
class Wish:
    """What a request's kv_transfer_params ask for. leaves: to keep its cache for a consumer. brings: whose to use."""

    leaves: bool = False
    brings: Reference | None = None

    @staticmethod
    def of_params(params: Mapping[str, Any] | None) -> "Wish":
        """Raises BadReference for what cannot be meant."""
        if not params:
            return Wish()
        for name in ("do_remote_decode", "do_remote_prefill"):
            if not isinstance(params.get(name, False), bool):
                raise BadReference(f"{name} must be true or false, but is {params[name]!r:.100}")
        leaves, brings = params.get("do_remote_decode", False), params.get("do_remote_prefill", False)
        if leaves and brings:
            raise BadReference("do_remote_decode and do_remote_prefill cannot both be true")
        return Wish(leaves, Reference.of_params(params) if brings else None)


def _text(params: Mapping[str, Any], name: str) -> str:
    value = params.get(name)
    # What cannot be printed would stand in logs.
    if not isinstance(value, str) or not 0 < len(value) <= _MOST_CHARACTERS or not value.isprintable():
        raise BadReference(
            f"{name} must be a text of 1 to {_MOST_CHARACTERS} printable characters, but is {ascii(value):.100}"
        )
    return value


def _seconds(params: Mapping[str, Any], name: str) -> float:
    value = params.get(name, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_SECONDS:
        raise BadReference(f"{name} must be a number from 0 to {_MOST_SECONDS}, but is {value!r:.100}")
    return float(value)


def _integer(params: Mapping[str, Any], name: str, most: int) -> int:
    value = params.get(name)
    if type(value) is not int or not 1 <= value <= most:
        raise BadReference(f"{name} must be an integer from 1 to {most}, but is {value!r:.100}")
    return value
