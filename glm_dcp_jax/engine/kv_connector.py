"""An engine's part in prefill/decode disaggregation: which of its pages others read, and what it reads from others.

Only the engine's thread calls this, and only between two steps; threads of the transfer package do the waiting.

What a consumer reads of a prompt of T tokens are the rows 0 .. T - 2, in every cache. Row T - 1 it computes itself: it
needs that row's logits to draw the first token, and its hidden state for the first draft. The MTP layer's rows lag one
token: row T - 2 is the last that the prompt decides, and row T - 1 depends on the token that the consumer draws. So no
row is written twice, in no cache.
"""

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from glm_dcp_jax.cache.allocator import PageTable
from glm_dcp_jax.config import EngineConfig, ModelConfig
from glm_dcp_jax.config.transfer import TransferConfig
from glm_dcp_jax.engine.pool_access import PoolAccess
from glm_dcp_jax.engine.runner import Runner
from glm_dcp_jax.engine.sampling_params import ParameterError, SamplingParams
from glm_dcp_jax.engine.sequence import Request, Sequence
from glm_dcp_jax.model.converted import ConvertedCheckpoint
from glm_dcp_jax.model.safetensors_reader import Checkpoint
from glm_dcp_jax.transfer.consumer import Consumer
from glm_dcp_jax.transfer.fingerprint import PROTOCOL, Fingerprint, model_id, record_id
from glm_dcp_jax.transfer.loads import Landed, Load, LoadFailed, token_digest
from glm_dcp_jax.transfer.offers import Held
from glm_dcp_jax.transfer.packing import PARTS
from glm_dcp_jax.transfer.pieces import piece_tokens
from glm_dcp_jax.transfer.producer import Producer, ProducerStats
from glm_dcp_jax.transfer.references import BadReference, Reference, Wish
from glm_dcp_jax.transfer.transfer_stats import Received
from glm_dcp_jax.transfer.transports import make_transport

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TransferStats:
    """Counts since the start; None for a role that the engine does not have."""

    sent: ProducerStats | None
    received: Received | None


@dataclass(eq=False)
class Remote:
    """A sequence's cache elsewhere, as the scheduler knows it."""

    load: Load
    consumer: Consumer
    forget: Callable[[Load], object]

    def begin(self, start: int, end: int) -> None:
        """The sequence has pages, and holds what is before `start`."""
        self.consumer.begin(self.load, start, end)

    def abandon(self) -> None:
        """It is not wanted any more."""
        self.consumer.cancel(self.load)
        self.forget(self.load)


class KVConnector:
    """What --kv-transfer-config makes of an engine."""

    def __init__(self, config: TransferConfig, fingerprint: Fingerprint, access: PoolAccess) -> None:
        """Raises ConfigError for a transport that there is not here, or an address that cannot be listened on."""
        self.config, self._access = config, access
        self.engine_id = config.engine_id or uuid.uuid4().hex
        self._events = threading.Event()
        self.on_event: Callable[[], None] = lambda: None
        self._returned: deque[PageTable] = deque()
        self._sequences: dict[Load, Sequence] = {}
        options = {"slab_bytes": config.integer("slab_bytes")} if config.kv_connector == "nixl" else {}
        self._transport = make_transport(
            config.kv_connector, host=config.kv_ip, secret=config.secret, options=options
        )
        lease, caches = config.number("lease_seconds"), access.caches
        self._producer = self._consumer = None
        if config.produces:
            self._producer = Producer(
                fingerprint,
                # A name may stay the same from start to start; what was offered by another start must not be found.
                f"{self.engine_id}/{uuid.uuid4().hex[:8]}",
                self._transport,
                access.pack,
                config.kv_ip,
                config.kv_port,
                config.secret,
                lease,
            )
        if config.consumes:
            self._consumer = Consumer(
                fingerprint,
                caches.row_bytes,
                self._transport,
                config.secret,
                lease,
                config.number("handshake_seconds"),
                config.number("transfer_seconds"),
                config.integer("loads"),
                self._wake,
            )

    # ---- requests

    def wish(self, params: SamplingParams) -> Wish:
        """What a request asks for. Raises ParameterError for what this engine has no part in."""
        field = "kv_transfer_params"
        try:
            wish = Wish.of_params(params.kv_transfer_params)
        except BadReference as error:
            raise ParameterError(field, f"{field}: {error}") from None
        if wish.leaves and self._producer is None:
            raise ParameterError(
                field, f"{field}: this engine is a kv_consumer, and leaves its cache to nobody"
            )
        reference = wish.brings
        if reference is not None and self._consumer is None:
            raise ParameterError(field, f"{field}: this engine is a kv_producer, and takes nobody's cache")
        if reference is not None and reference.connector != self.config.kv_connector:
            raise ParameterError(
                field,
                f"{field}: the cache is offered by connector {reference.connector!r}, and this engine has "
                f"{self.config.kv_connector}",
            )
        if reference is not None and self.config.on_loopback and not reference.is_on_loopback:
            raise ParameterError(
                field,
                f"{field}: remote_host {reference.host!r} is another machine, and this engine talks to its own only; "
                "start it with a kv_ip that others reach, and a secret_file",
            )
        return wish

    def bring(self, request: Request, reference: Reference) -> None:
        """A request has come whose prompt's cache is elsewhere: its first sequence brings it, for all of them."""
        assert self._consumer is not None
        sequence = request.sequences[0]
        if sequence.reports_prompt or sequence.prompt_length < 2:
            self.drop(reference)  # every row of the prompt is computed here
            return
        load = Load(request.request_id, reference, token_digest(sequence.tokens))
        self._sequences[load] = sequence
        self._consumer.expect(load)
        sequence.remote = Remote(load, self._consumer, self._forget)

    def keep(self, request_id: str, sequence: Sequence, table: PageTable) -> dict[str, Any]:
        """A prompt is computed: hold its pages for a consumer. Returns the kv_transfer_params for it."""
        assert self._producer is not None
        prompt = sequence.tokens[: sequence.prompt_length]
        _log.info(
            "request %s: its cache of %d tokens is kept for a consumer",
            request_id,
            len(prompt),
            extra={"request_id": request_id},
        )
        return self._producer.offer(
            Held(
                request_id,
                len(prompt),
                token_digest(prompt),
                tuple(table.pages),
                lambda: self._return(table),
                self._access.generation,
            )
        )

    def release(self, params: Any) -> bool:
        """Nobody will come for a cache. Returns whether this engine held it; raises ParameterError for nonsense."""
        try:
            reference = Reference.of_params(params)
        except BadReference as error:
            raise ParameterError("kv_transfer_params", f"kv_transfer_params: {error}") from None
        return self._producer is not None and self._producer.release(reference)

    def drop(self, reference: Reference) -> None:
        """A request that brought this was refused: its producer need not wait."""
        if self._consumer is not None:
            self._consumer.drop(reference)

    # ---- between steps

    @property
    def has_events(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._returned) or (self._consumer is not None and self._consumer.has_events)

    def wait(self, seconds: float) -> None:
        """Until there may be something to take, or the time is over."""
        self._events.wait(seconds)
        self._events.clear()

    def wake(self) -> None:
        """End a `wait`."""
        self._events.set()

    def lose_caches(self) -> None:
        """A failed step took the pools: what is held for others is gone."""
        if self._producer is not None:
            self._producer.drop_all()

    def returned(self) -> list[PageTable]:
        """Pages that nobody will read any more, to be given back."""
        return [self._returned.popleft() for _ in range(len(self._returned))]

    def arrivals(self) -> list[tuple[Sequence, LoadFailed | None]]:
        """Unpack what has landed. Returns the sequences whose cache is there, or will not come, and why."""
        if self._consumer is None:
            return []
        ended = []
        for event in self._consumer.events():
            if event.load.is_cancelled():
                continue
            if isinstance(event, Landed):
                self._unpack(event)
            else:
                ended.append((self._sequences.pop(event.load), event.failure))
        return ended

    def _unpack(self, landed: Landed) -> None:
        pages = self._sequences[landed.load].pages
        for part, given in landed.given.items():
            slots, rows = landed.piece.to_unpack(part, pages, given, self._access.caches.row_bytes(part))
            self._access.unpack(part, slots, rows)
        landed.load.unpacked()

    # ---- the rest

    def stats(self) -> TransferStats:
        """The counts at this moment."""
        return TransferStats(
            None if self._producer is None else self._producer.stats(),
            None if self._consumer is None else self._consumer.stats.now(),
        )

    def usage(self) -> dict[str, int]:
        """What is held for others, and on its way: all 0 when nothing goes on."""
        held = 0 if self._producer is None or self._producer.stats().offers is None else self._producer.held
        loads = 0 if self._consumer is None else self._consumer.loads
        return {"held": held, "loads": loads, **self._transport.usage()}

    def drain(self, seconds: float) -> None:
        """Let others read what was promised them, for so long."""
        if self._producer is not None:
            self._producer.drain(seconds)

    def close(self) -> None:
        """End all that goes on."""
        if self._consumer is not None:
            self._consumer.close()
        if self._producer is not None:
            self._producer.close()
        self._transport.close()

    def _forget(self, load: Load) -> None:
        self._sequences.pop(load, None)

    def _return(self, table: PageTable) -> None:
        self._returned.append(table)
        self._wake()

    def _wake(self) -> None:
        self._events.set()
        self.on_event()


def make_connector(
    config: EngineConfig,
    model: ModelConfig,
    runner: Runner,
    checkpoint: Checkpoint | ConvertedCheckpoint | None,
) -> KVConnector | None:
    """An engine's connector, whose programs the runner compiles too; None if its configuration has none.

    Raises ConfigError as KVConnector does.
    """
    transfer = config.transfer
    if transfer is None:
        return None
    caches, layout = runner.caches(), runner.layout
    row_bytes = sum(caches.row_bytes(part) for part in PARTS)
    tokens = piece_tokens(transfer.integer("piece_bytes"), row_bytes, runner.max_model_len)
    layers, full_layers = caches.layers
    weights = "" if checkpoint is None or not transfer.check_model else model_id(model, checkpoint)
    fingerprint = Fingerprint(
        protocol=PROTOCOL,
        connector=transfer.kv_connector,
        model=weights,
        record=record_id(runner.record, runner.blueprint.formats.latent_scales),
        layers=layers,
        full_layers=full_layers,
        mtp=caches.mtp is not None,
        tp=config.parallel.tensor_parallel_size,
        dcp=layout.world,
        block_size=layout.block_size,
        interleave=layout.interleave,
        index_shards=layout.index_shards,
        piece_tokens=tokens,
    )
    _log.info(
        "KV transfers: %s over %s, %d bytes a token, pieces of %d tokens",
        transfer.kv_role,
        transfer.kv_connector,
        row_bytes,
        tokens,
    )
    access = PoolAccess(caches, runner, tokens)
    runner.compile_too(access.compilations(transfer.produces, transfer.consumes))
    return KVConnector(transfer, fingerprint, access)


def wish_of(params: SamplingParams, connector: KVConnector | None) -> Wish:
    """What a request asks for. Raises ParameterError for what this engine has no part in."""
    if not params.kv_transfer_params:
        return Wish()
    if connector is None:
        raise ParameterError(
            "kv_transfer_params",
            "kv_transfer_params: this engine takes no part in prefill/decode disaggregation; start it with "
            "--kv-transfer-config",
        )
    return connector.wish(params)
