"""Several processes that drive one mesh, each with its part of the devices."""

import re
from dataclasses import dataclass

from glm_dcp_jax.config.errors import ConfigError

MAX_PROCESSES = 64
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^\s:/]+):(?P<port>\d{1,5})")


@dataclass(frozen=True)
class ProcessConfig:
    """num_processes: of which this is process_id, from 0. coordinator_address: host:port of process 0, for all of them.

    Raises ConfigError for a number without an address, an address without a port, or an id that is not one of them.
    """

    num_processes: int = 1
    process_id: int = 0
    coordinator_address: str | None = None

    def __post_init__(self) -> None:
        count, own = self.num_processes, self.process_id
        if type(count) is not int or not 1 <= count <= MAX_PROCESSES:
            raise ConfigError(f"num_processes must be an integer from 1 to {MAX_PROCESSES}, but is {count!r}")
        if type(own) is not int or not 0 <= own < count:
            raise ConfigError(
                f"process_id must be from 0 to {count - 1}, as num_processes is {count}, but is {own!r}"
            )
        if count > 1 and self.coordinator_address is None:
            raise ConfigError(
                f"num_processes {count} needs coordinator_address: host:port, where process 0 listens for the others"
            )
        if count == 1 and self.coordinator_address is not None:
            raise ConfigError(
                "coordinator_address is for several processes; give num_processes too, or leave it out"
            )
        if self.coordinator_address is not None:
            self._check_address(self.coordinator_address)

    @property
    def coordinator_host(self) -> str:
        """Where process 0 is, without brackets around an IPv6 address."""
        assert self.coordinator_address is not None, "one process needs no coordinator"
        return self.coordinator_address.rpartition(":")[0].strip("[]")

    @staticmethod
    def _check_address(address: str) -> None:
        found = _ADDRESS.fullmatch(address)
        if found is None or not 1 <= int(found["port"]) <= 65535:
            raise ConfigError(
                f"coordinator_address must be host:port with a port from 1 to 65535, but is {address!r}"
            )
