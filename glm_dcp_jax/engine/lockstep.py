"""One engine in several processes: process 0 takes requests, all of them take the same steps.

What a step works on follows from the calls the engine got and from what earlier steps brought, which is the same in
every process. So process 0 tells the others its calls, step by step, and nothing else: no page table, no token. With
them goes a digest of its state, which the others compare with their own: a process that has gone another way ends, and
says so, before it computes something else than the others.
"""

import itertools
import logging
import secrets
import threading
import zlib
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple

import numpy as np

from glm_dcp_jax.config import EngineConfig, ProcessConfig
from glm_dcp_jax.engine.engine import Engine
from glm_dcp_jax.engine.waiting import QueueFull
from glm_dcp_jax.parallel import processes

_log = logging.getLogger(__name__)

_KEY_BYTES = 32
CALLS = ("add_request", "abort", "reset_prefix_cache")
"""Methods of Engine that change what it does next."""


class OutOfStep(RuntimeError):
    """This process's engine has gone another way than process 0's, or process 0 is gone."""


class Call(NamedTuple):
    """One of CALLS with its arguments. refusal: the kind of exception it raised in process 0, None for none."""

    name: str
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    refusal: str | None


class Message(NamedTuple):
    """What process 0 did before a step, and where that brought it. digest: see `digest_of`. selection: see
    `ExchangeStats.latest`."""

    calls: tuple[Call, ...]
    digest: tuple[int, ...]
    selection: tuple[int, int]


def digest_of(engine: Engine) -> tuple[int, ...]:
    """Where an engine stands: running and waiting sequences, free pages, tokens so far, and the last ones' checksum."""
    scheduler = engine.scheduler
    known = itertools.chain(scheduler.running, scheduler.waiting)
    last = np.array([sequence.tokens[-1] for sequence in known], np.int32)
    counts = len(scheduler.running), len(scheduler.waiting), scheduler.allocator.num_free
    return (*counts, engine.generation_tokens, zlib.crc32(last.tobytes()))


class Leader:
    """Process 0's side: connections to all others. With one process there are none, and nothing is sent."""

    def __init__(self, config: ProcessConfig) -> None:
        """Waits for the others to connect."""
        self._calls: list[Call] = []
        self._connections = _accept(config) if config.num_processes > 1 else []

    def call(self, engine: Engine, name: str, *arguments: Any, **named: Any) -> Any:
        """Call one of the engine's CALLS, here and, before the next step, everywhere; also one that raises here."""
        assert name in CALLS, name
        refusal = None
        try:
            return getattr(engine, name)(*arguments, **named)
        except Exception as error:
            refusal = type(error).__name__
            raise
        finally:
            if self._connections:
                self._calls.append(Call(name, arguments, named, refusal))

    def before_step(self, engine: Engine) -> None:
        """Tell the others what was called since the last step: they take this one too. Raises OutOfStep."""
        if not self._connections:
            return
        message = Message(tuple(self._calls), digest_of(engine), engine.runner.exchanges.latest)
        self._calls.clear()
        try:
            for connection in self._connections:
                connection.send(message)
        except OSError as error:
            raise OutOfStep(f"a process of this engine is gone ({error}); restart all of them") from error

    def close(self) -> None:
        """Let the others end."""
        for connection in self._connections:
            connection.close()
        self._connections = []


class Follower:
    """The side of every other process."""

    def __init__(self, config: ProcessConfig) -> None:
        """Connects to process 0."""
        port, key = _exchange_address(0, bytes(_KEY_BYTES))
        self._connection: Connection = Client((config.coordinator_host, port), authkey=key)

    def follow(self, engine: Engine) -> None:
        """Take process 0's steps until it ends. Raises OutOfStep when this engine has become another."""
        while True:
            try:
                message: Message = self._connection.recv()
            except (EOFError, OSError):
                return
            for call in message.calls:
                _repeat(engine, call)
            if (own := digest_of(engine)) != message.digest:
                raise OutOfStep(
                    f"this process stands at {own}, process 0 at {message.digest} (running, waiting, free pages, "
                    "tokens, checksum); restart all processes"
                )
            if not engine.runner.exchanges.agrees(message.selection):
                raise OutOfStep(
                    "devices of two processes selected different positions; restart, and check the GPUs"
                )
            engine.step()


def follow(config: EngineConfig) -> None:
    """Load the model, compile, and follow process 0 until it ends. Raises OutOfStep, and ValueError as Engine does."""
    engine = Engine.from_config(config)
    follower = Follower(config.processes)
    engine.runner.warm_up()
    _log.info("process %d follows process 0", config.processes.process_id)
    follower.follow(engine)


def _repeat(engine: Engine, call: Call) -> None:
    """What was refused in process 0 is refused here too. Raises OutOfStep if not, and the other way round."""
    refusal = None
    try:
        getattr(engine, call.name)(*call.arguments, **call.named)
    except (ValueError, QueueFull) as error:
        refusal = type(error).__name__
    if refusal != call.refusal:
        raise OutOfStep(
            f"{call.name} ended with {refusal or 'no error'} here, and with {call.refusal or 'no error'} in process 0; "
            "restart all processes"
        )


def _accept(config: ProcessConfig) -> list[Connection]:
    """Connections to all other processes, which learn from the mesh where to, and with which key."""
    key = secrets.token_bytes(_KEY_BYTES)
    connections: list[Connection] = []
    with Listener((config.coordinator_host, 0), backlog=config.num_processes, authkey=key) as listener:

        def accept() -> None:
            while len(connections) < config.num_processes - 1:
                try:
                    connections.append(listener.accept())
                except (AuthenticationError, EOFError, OSError) as error:
                    _log.warning("a connection to the lockstep port failed: %s", error)

        accepting = threading.Thread(target=accept, name="lockstep", daemon=True)
        accepting.start()
        _exchange_address(listener.address[1], key)
        accepting.join()
    return connections


def _exchange_address(port: int, key: bytes) -> tuple[int, bytes]:
    """Process 0's port and key, in every process."""
    values = processes.of_first(np.array([port, *key], np.int32)).tolist()
    return values[0], bytes(values[1:])
