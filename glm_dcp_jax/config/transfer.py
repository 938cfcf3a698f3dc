"""Prefill/decode disaggregation: who hands caches over to whom, and how, in vLLM's words."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from glm_dcp_jax.config.errors import ConfigError

CONNECTORS = ("tcp", "inproc", "nixl", "jax")
ROLES = ("kv_producer", "kv_consumer", "kv_both")
LOAD_FAILURE_POLICIES = ("fail", "recompute")
_NUMBERS = {"lease_seconds": 30.0, "handshake_seconds": 5.0, "transfer_seconds": 120.0}
_INTEGERS = {"piece_bytes": 64 * 2**20, "loads": 4, "slab_bytes": 256 * 2**20}
_JAX_PIECE = 16 * 2**20
"""A quarter of what jax.experimental.transfer is given room to publish."""
_MOST_SECONDS = 86_400
_LEAST_PIECE, _MOST_BYTES = 4096, 2**40
_ELSEWHERE = {
    "kv_buffer_device": "caches are staged in host memory",
    "kv_buffer_size": "set piece_bytes in kv_connector_extra_config",
    "kv_connector_module_path": "the connectors are " + ", ".join(CONNECTORS),
    "kv_parallel_size": "any number of producers and consumers may talk to one another",
    "kv_rank": "any number of producers and consumers may talk to one another",
    "enable_permute_local_kv": "records are the same in every layout",
}
"""Keys of vLLM's that mean nothing here."""


@dataclass(frozen=True)
class TransferConfig:
    """What --kv-transfer-config says. kv_ip, kv_port: where a producer listens for consumers, and where they find it; 0
    takes a free port. kv_load_failure_policy: what becomes of a request whose cache does not arrive.

    kv_connector_extra_config: lease_seconds, how long a producer holds pages that nobody asks after; handshake_seconds
    and transfer_seconds, what a consumer waits for an answer, and for all of a request's cache; piece_bytes, what
    travels at once; loads, requests whose caches travel at the same time; slab_bytes, nixl's registered memory;
    secret_file, whose content both sides must share; check_model, false for sides with other weights.
    """

    kv_connector: str
    kv_role: str = "kv_both"
    engine_id: str | None = None
    kv_ip: str = "127.0.0.1"
    kv_port: int = 0
    kv_load_failure_policy: str = "fail"
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.kv_connector == "NixlConnector":
            raise _error('kv_connector "NixlConnector" is called nixl here')
        _one_of("kv_connector", self.kv_connector, CONNECTORS)
        _one_of("kv_role", self.kv_role, ROLES)
        _one_of("kv_load_failure_policy", self.kv_load_failure_policy, LOAD_FAILURE_POLICIES)
        if self.engine_id is not None and not (
            isinstance(self.engine_id, str) and 0 < len(self.engine_id) <= 128
        ):
            raise _error("engine_id must be a text of 1 to 128 characters, or left out")
        if type(self.kv_port) is not int or not 0 <= self.kv_port <= 65535:
            raise _error(f"kv_port must be an integer from 0 to 65535, but is {self.kv_port!r}")
        if not isinstance(self.kv_ip, str) or not self.kv_ip:
            raise _error(f"kv_ip must be an address or a host's name, but is {self.kv_ip!r}")
        self._check_extra()
        if not self.on_loopback and not self.secret:
            raise _error(
                f"kv_ip {self.kv_ip} can be reached from other machines, so both sides must share a secret: name a "
                'file with one, {"kv_connector_extra_config": {"secret_file": PATH}}'
            )

    @staticmethod
    def from_object(given: Mapping[str, Any]) -> "TransferConfig":
        """From a flag's JSON object. Raises ConfigError for keys that are missing or unknown, and for their values."""
        known = [each.name for each in fields(TransferConfig)]
        for key in given:
            if key in _ELSEWHERE:
                raise _error(f"{key} is not supported: {_ELSEWHERE[key]}")
            if key not in known:
                raise _error(f"there is no key {key!r}; known are {', '.join(known)}")
        if "kv_connector" not in given:
            raise _error(f"kv_connector is missing; use one of {', '.join(CONNECTORS)}")
        return TransferConfig(**given)

    @property
    def produces(self) -> bool:
        """Whether requests may leave their caches for others."""
        return self.kv_role != "kv_consumer"

    @property
    def consumes(self) -> bool:
        """Whether requests may bring others' caches."""
        return self.kv_role != "kv_producer"

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach kv_ip."""
        if self.kv_ip == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.kv_ip).is_loopback
        except ValueError:
            return False

    @property
    def secret(self) -> bytes:
        """What both sides share; empty for none."""
        path = self.kv_connector_extra_config.get("secret_file")
        return b"" if path is None else Path(path).read_bytes().strip()

    def number(self, name: str) -> float:
        """One of the extra config's numbers of seconds."""
        return float(self.kv_connector_extra_config.get(name, _NUMBERS[name]))

    def integer(self, name: str) -> int:
        """One of the extra config's integers."""
        default = _JAX_PIECE if (name, self.kv_connector) == ("piece_bytes", "jax") else _INTEGERS[name]
        return int(self.kv_connector_extra_config.get(name, default))

    @property
    def check_model(self) -> bool:
        """Whether both sides must have the same weights."""
        return bool(self.kv_connector_extra_config.get("check_model", True))

    def _check_extra(self) -> None:
        extra = self.kv_connector_extra_config
        if not isinstance(extra, Mapping):
            raise _error(f"kv_connector_extra_config must be an object, but is {extra!r}")
        known = (*_NUMBERS, *_INTEGERS, "secret_file", "check_model")
        for key, value in extra.items():
            if key not in known:
                raise _error(f"kv_connector_extra_config has no key {key!r}; known are {', '.join(known)}")
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if key in _NUMBERS and not (is_number and 0 < value <= _MOST_SECONDS):
                raise _error(
                    f"{key} must be a number of seconds above 0 and at most {_MOST_SECONDS}, but is {value!r}"
                )
            least = 1 if key == "loads" else _LEAST_PIECE
            most = 1024 if key == "loads" else _MOST_BYTES
            if key in _INTEGERS and not (type(value) is int and least <= value <= most):
                raise _error(f"{key} must be an integer from {least} to {most}, but is {value!r}")
        if not isinstance(extra.get("check_model", True), bool):
            raise _error(f"check_model must be true or false, but is {extra['check_model']!r}")
        self._check_secret(extra.get("secret_file"))

    def _check_secret(self, path: object) -> None:
        if path is None:
            return
        if not isinstance(path, str) or not Path(path).is_file():
            raise _error(f"secret_file {path!r} is no file")
        try:
            content = Path(path).read_bytes().strip()
        except OSError as error:
            raise _error(f"secret_file {path} cannot be read: {error.strerror}") from None
        if len(content) < 16:
            raise _error(f"secret_file {path} has fewer than 16 bytes; use a longer secret")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise _error(f"{name} {value!r} is unknown; use one of {', '.join(allowed)}")


def _error(message: str) -> ConfigError:
    return ConfigError(f"kv_transfer_config: {message}")
