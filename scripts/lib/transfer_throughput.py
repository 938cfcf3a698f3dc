"""How fast a request's rows get from one engine's pools into another's, beside a plain copy of as many bytes."""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from lib.transfer_child import Child
from lib.transfer_ends import PoolConsumer, PoolProducer, Received
from lib.transfer_failures import TransferFailed
from lib.transfer_pools import BareCaches, CacheSizes

Row = dict[str, Any]
Offer = Callable[[int], dict[str, Any]]
"""Tokens to kv_transfer_params."""


class Copies:
    """A plain copy of as many bytes, from and to memory that was used before."""

    def __init__(self, size: int) -> None:
        self._source, self._target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        self.seconds()

    def seconds(self) -> float:
        """One copy."""
        began = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - began


class Producers:
    """The producers of a run: one in a child process, for inproc one here; made when they are first needed."""

    def __init__(self, given: argparse.Namespace, sizes: CacheSizes, environ: Mapping[str, str]) -> None:
        self._given, self._sizes, self._environ = given, sizes, environ
        self._child: Child | None = None
        self._here: BareCaches | None = None

    @contextlib.contextmanager
    def over(self, transport: str) -> Iterator[Offer]:
        """Offers over one transport."""
        if transport == "inproc":
            if self._here is None:
                self._here = BareCaches(self._given.producer, self._sizes)
                self._here.fill()
            with contextlib.closing(PoolProducer(self._here, transport)) as producer:
                yield producer.offer
            return
        if self._child is None:
            sizes = json.dumps(asdict(self._sizes))
            self._child = Child("pools", str(self._given.producer), sizes, environ=self._environ)
            self._child.ready()
        child = self._child
        child.ask("produce", connector=transport)
        yield lambda tokens: child.ask("offer", tokens=tokens)["params"]

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.close()


def measure(
    given: argparse.Namespace,
    transports: list[str],
    environ: Mapping[str, str],
    report: Callable[[Row], None],
    failed: Callable[[str, TransferFailed], None],
) -> None:
    """A row for each record format, transport and number of tokens. environ: of the producer's process.

    failed: told of a transport that failed; the others go on. Raises ConfigError for what the machine cannot hold, and
    MeasurementFailed.
    """
    for dtype in given.kv_cache_dtype:
        sizes = CacheSizes(given.layers, given.full_layers, dtype, given.piece_bytes, max(given.tokens))
        with contextlib.closing(Producers(given, sizes, environ)) as producers:
            for transport in transports:
                try:
                    with producers.over(transport) as offer:
                        caches = BareCaches(given.consumer, sizes)
                        with contextlib.closing(PoolConsumer(caches, transport)) as consumer:
                            for tokens in given.tokens:
                                row = _repeat(offer, consumer, caches, tokens, given.repeat)
                                report(
                                    {"transport": transport, "kv_cache_dtype": dtype, "tokens": tokens} | row
                                )
                except TransferFailed as error:
                    failed(transport, error)


def _repeat(offer: Offer, consumer: PoolConsumer, caches: BareCaches, tokens: int, repeats: int) -> Row:
    """The transfer of median length. The last one goes into empty pools, and is compared with what was sent."""
    consumer.receive(offer(tokens))  # compiles, connects
    size = tokens * caches.row_bytes
    copies = Copies(size)
    received: list[Received] = []
    copied: list[float] = []
    for number in range(repeats):
        if number == repeats - 1:
            caches.clear()
        copied.append(copies.seconds())
        received.append(consumer.receive(offer(tokens)))
        if received[-1].bytes != size:
            raise TransferFailed(f"{received[-1].bytes} bytes came instead of {size}")
    caches.check(tokens)
    middle = sorted(received, key=lambda one: one.seconds)[len(received) // 2]
    rate, plain = size / middle.seconds / 1e9, size / statistics.median(copied) / 1e9
    every = [one.seconds for one in received]
    rates = {"gb_per_second": rate, "memcpy_gb_per_second": plain, "share": rate / plain}
    return asdict(middle) | rates | {"every_seconds": every}


def table(rows: list[Row]) -> str:
    """Markdown: milliseconds, gigabytes (10^9) per second."""
    heads = ["records", "transport", "tokens", "MB", "all, ms", "handshakes", "reading", "behind"]
    heads += ["busy: pack", "move", "unpack", "GB/s", "memcpy GB/s", "share"]
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * (len(heads) - 2)]
    for row in rows:
        parts = ("seconds", "handshakes", "reading", "behind", "pack", "move", "unpack")
        cells = [row["kv_cache_dtype"], row["transport"], f"{row['tokens']:,}", f"{row['bytes'] / 1e6:,.1f}"]
        cells += [f"{1e3 * row[part]:,.1f}" for part in parts]
        cells += [f"{row['gb_per_second']:.2f}", f"{row['memcpy_gb_per_second']:.2f}", f"{row['share']:.1%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
