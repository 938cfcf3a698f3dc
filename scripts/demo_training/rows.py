"""Rows of token ids for the network, with what each token counts in the loss."""

import queue
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import tokenizers

from demo_training import documents
from demo_training.documents import Document
from demo_training.words import World

SAID, READ = 1.0, 0.03
"""What a token counts as a target."""

MAKERS: dict[str, Callable[[World, int], Document]] = {
    "pairs": documents.pairs,
    "equations": documents.equations,
    "reading": documents.reading,
    "word problems": documents.word_problems,
    "small talk": documents.small_talk,
    "tool call": documents.tool_call,
}
_END = "<|endoftext|>"


class Batch(NamedTuple):
    """ids: [B, L + 1] int32. weights: [B, L + 1] float32, of each id as a target (the first one is none)."""

    ids: np.ndarray
    weights: np.ndarray


class Rows:
    """Endless rows of one mixture and length. mixture: what -> share; "copying" is random tokens, twice.

    The same step always gives the same batch. A document that is longer than the rest of its row goes on beyond it.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, mixture: Mapping[str, float], length: int, batch: int
    ) -> None:
        self._tokenizer, self._length, self._batch = tokenizer, length, batch
        self._kinds, self._shares = list(mixture), list(mixture.values())
        self._end = tokenizer.token_to_id(_END)
        self._plain = min(tokenizer.get_added_tokens_decoder())  # the special tokens come last

    def batch(self, seed: str) -> Batch:
        """The batch of this name."""
        rng = random.Random(seed)
        rows = [self._row(rng) for _ in range(self._batch)]
        return Batch(np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows]))

    def ahead(self, name: str, first: int, last: int) -> Iterator[Batch]:
        """The batches of steps first .. last - 1, made by a thread of their own."""
        made: queue.Queue[Batch] = queue.Queue(maxsize=4)

        def make() -> None:
            for step in range(first, last):
                made.put(self.batch(f"{name} {step}"))

        threading.Thread(target=make, daemon=True).start()
        for _ in range(first, last):
            yield made.get()

    def _row(self, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) <= self._length:
            (kind,) = rng.choices(self._kinds, self._shares)
            room = self._length + 1 - len(ids)
            copies = kind == "copying"
            more = self._copying(rng, room) if copies else self.encode(MAKERS[kind](World(rng), room))
            ids += more[0]
            weights += more[1]
        end = self._length + 1
        return np.array(ids[:end], np.int32), np.array(weights[:end], np.float32)

    def _copying(self, rng: random.Random, room: int) -> tuple[list[int], list[float]]:
        half = rng.randint(min(4, room), max(4, min(room // 2, 64)))
        ids = [rng.randrange(self._plain) for _ in range(half)]
        return ids + ids + [self._end], [0.0] * (half + 1) + [SAID] * (half - 1) + [0.0]

    def encode(self, document: Document) -> tuple[list[int], list[float]]:
        """Its ids, with the end of the text behind them, and what each counts."""
        ids: list[int] = []
        weights: list[float] = []
        for text, said in (*document, documents.Piece(_END, True)):
            piece = self._tokenizer.encode(text).ids
            ids += piece
            weights += [SAID if said else READ] * len(piece)
        return ids, weights
