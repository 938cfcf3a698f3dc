"""Somebody between a consumer and its producer, who sees every request, and can do to it what a fault would do.

A rule is called for each request, in a thread of its connection: with the request, and with a function that asks the
producer and returns its answer, errors included. What the rule returns is what the consumer gets. It may wait, kill
somebody, answer itself, or raise Broken, which ends the connection. Where there is no rule, requests just pass.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from glm_dcp_jax.transfer.wire import Listener, Peer, PeerError, RemoteError, connect

Message = dict[str, Any]
Ask = Callable[[Message], Message]
Rule = Callable[[Message, Ask], Message]
SECONDS = 60.0


class Broken(PeerError):
    """Ends the connection."""

    def __init__(self) -> None:
        super().__init__("lost", "somebody between the two ended it")


def passes(message: Message, ask: Ask) -> Message:
    """Nothing happens."""
    return ask(message)


class Between:
    """Listens where consumers are sent to; `through` sends them there. seen: what has been requested, in order."""

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret
        self.rule: Rule = passes
        self.seen: list[Message] = []
        self._addresses: dict[str, tuple[str, int]] = {}
        self._listener = Listener("127.0.0.1", 0, secret, self._serve, "between")

    def through(self, params: Message) -> Message:
        """The same kv_transfer_params by way of here."""
        self._addresses[params["remote_key"]] = (params["remote_host"], params["remote_port"])
        return params | {"remote_host": "127.0.0.1", "remote_port": self._listener.port}

    @contextlib.contextmanager
    def doing(self, rule: Rule) -> Iterator[None]:
        """With this rule, and what was seen forgotten."""
        self.seen.clear()
        self.rule = rule
        try:
            yield
        finally:
            self.rule = passes

    def count(self, do: str) -> int:
        """How often something was requested."""
        return sum(message.get("do") == do for message in self.seen)

    def close(self) -> None:
        """Ends all connections."""
        self._listener.close()

    def _serve(self, peer: Peer) -> None:
        upstream: list[Peer] = []

        def ask(message: Message) -> Message:
            deadline = time.monotonic() + SECONDS
            if not upstream:
                # All keys of a test lead to one producer, the one that it was told of last.
                host, port = list(self._addresses.values())[-1]
                upstream.append(connect(host, port, self._secret, deadline))
            try:
                return upstream[0].request(message, deadline)
            except RemoteError as error:
                return {"error": {"kind": error.remote_kind, "message": str(error)}}

        try:
            while True:
                message, _ = peer.receive(None)
                self.seen.append(message)
                peer.send(self.rule(message, ask))
        finally:
            for one in upstream:
                one.close()


def at(do: str, act: Rule, number: int = 0) -> Rule:
    """A rule for the one request of that kind with this number, from 0; all others pass."""
    count = [0]

    def rule(message: Message, ask: Ask) -> Message:
        if message.get("do") != do:
            return ask(message)
        count[0] += 1
        return act(message, ask) if count[0] == number + 1 else ask(message)

    return rule


def always(do: str, act: Rule) -> Rule:
    """A rule for all requests of that kind."""
    return lambda message, ask: act(message, ask) if message.get("do") == do else ask(message)


def breaks(message: Message, ask: Ask) -> Message:
    """The connection ends before the producer hears of it."""
    raise Broken


def breaks_after(message: Message, ask: Ask) -> Message:
    """The connection ends when the producer has answered."""
    ask(message)
    raise Broken


def answers(answer: Message) -> Rule:
    """Something of its own."""
    return lambda message, ask: answer


def alters(change: Callable[[Message], Message]) -> Rule:
    """The producer's answer, changed."""
    return lambda message, ask: change(ask(message))
