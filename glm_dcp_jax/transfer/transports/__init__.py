"""How packed rows get from a producer's devices into a consumer's host memory: four transports behind one interface.

inproc   both sides in one process
tcp      plain sockets, authenticated; no dependency; the default
jax      jax.experimental.transfer
nixl     NVIDIA's NIXL (RDMA, shared memory or TCP by UCX)
"""

from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Any

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.transfer.transports.interface import Ticket, Transport, TransportError

__all__ = ["NAMES", "Ticket", "Transport", "TransportError", "available", "make_transport"]


def _inproc(host: str, secret: bytes, **options: Any) -> Transport:
    from glm_dcp_jax.transfer.transports.inproc import InprocTransport

    return InprocTransport(**options)


def _tcp(host: str, secret: bytes, **options: Any) -> Transport:
    from glm_dcp_jax.transfer.transports.tcp import TcpTransport

    return TcpTransport(host, secret, **options)


def _jax(host: str, secret: bytes, **options: Any) -> Transport:
    from glm_dcp_jax.transfer.transports.jax_pull import JaxTransport

    return JaxTransport(host, **options)


def _nixl(host: str, secret: bytes, **options: Any) -> Transport:
    from glm_dcp_jax.transfer.transports.nixl import NixlTransport

    return NixlTransport(host, **options)


_MAKERS: dict[str, tuple[Callable[..., Transport], dict[str, type]]] = {
    "inproc": (_inproc, {}),
    "tcp": (_tcp, {"port": int, "advertise": str}),
    "jax": (_jax, {"port": int, "advertise": str}),
    "nixl": (_nixl, {"slab_bytes": int, "grace_seconds": float}),
}
NAMES = tuple(_MAKERS)


def available() -> list[str]:
    """The transports that can be made here: all, but nixl only where a NIXL wheel is installed."""
    from glm_dcp_jax.transfer.transports.nixl_agent import installed

    return [name for name in NAMES if name != "nixl" or installed()]


def make_transport(name: str, *, host: str, secret: bytes, options: Mapping[str, Any]) -> Transport:
    """The transport of this process.

    host: the address of this machine that consumers reach it by, and that it listens on. secret: what both engines
    know; only tcp asks for it, the others carry no proof of who fetches and belong on loopback or a private network.
    options: `port` (tcp, jax), `advertise` (tcp, jax: the host that consumers are told, where it is another),
    `slab_bytes`, `grace_seconds` (nixl).

    Raises ConfigError for an unknown name or option, a host that cannot be reached by others, or a missing NIXL.
    """
    if name not in _MAKERS:
        raise ConfigError(f"there is no transport {name!r}; use {', '.join(NAMES)}")
    make, allowed = _MAKERS[name]
    for option, value in options.items():
        if option not in allowed:
            known = ", ".join(allowed) or "none"
            raise ConfigError(f"transport {name} has no option {option!r}; its options: {known}")
        wanted = (int, float) if allowed[option] is float else allowed[option]
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ConfigError(
                f"option {option} of transport {name} is {value!r}; give a value of type {allowed[option].__name__}"
            )
    if name != "inproc" and _is_wildcard(host) and not options.get("advertise"):
        hint = "or say which by option `advertise`" if "advertise" in allowed else "not all of them"
        raise ConfigError(
            f"transport {name} on {host}: others cannot connect to that; give one address, {hint}"
        )
    return make(host, secret, **options)


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return not host
