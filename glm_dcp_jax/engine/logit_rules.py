"""What a request's parameters do to its logits: penalties, biases and forbidden tokens, row by row, on the host."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from glm_dcp_jax.engine.grammars import Grammar
from glm_dcp_jax.engine.sampling_params import ParameterError, SamplingParams
from glm_dcp_jax.engine.tokenizer import Tokenizer

_SIZES = (16, 256, 4096, 32768)


class Adjustments(NamedTuple):
    """Changes to some logits of each row, of numpy or jax; `sampling.adjust` says how they apply.

    tokens: [M, U] int32, distinct within a row; places without an entry point beyond the vocabulary.
    bias: [M, U] float32, added first; -inf forbids. seen: [M, U] bool, whether the repetition penalty applies.
    penalty: [M, U] float32, subtracted last. repetition: [M] float32, 1 for none. only_listed: [M] bool, whether
    tokens without an entry are forbidden.
    """

    tokens: Any
    bias: Any
    seen: Any
    penalty: Any
    repetition: Any
    only_listed: Any


def adjustment_sizes(vocab_size: int) -> tuple[int, ...]:
    """The sizes U that Adjustments come in, each of which is a compiled program: the last one holds any row."""
    return (*(size for size in _SIZES if size < vocab_size), vocab_size)


def no_adjustments(rows: int, size: int, vocab_size: int) -> Adjustments:
    """numpy arrays that change nothing: M = rows, U = size."""
    beyond = np.arange(vocab_size, vocab_size + size, dtype=np.int32)
    return Adjustments(
        tokens=np.tile(beyond, (rows, 1)),
        bias=np.zeros((rows, size), np.float32),
        seen=np.zeros((rows, size), bool),
        penalty=np.zeros((rows, size), np.float32),
        repetition=np.ones(rows, np.float32),
        only_listed=np.zeros(rows, bool),
    )


class LogitRules:
    """What one sequence's parameters do to its logits, as its output grows.

    Work and memory per token do not depend on the length of the history; copying the entries into a row does, up to
    one entry for each distinct token of prompt and output.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        eos: Collection[int],
        bad_words: Sequence[Sequence[int]] = (),
        vocab_size: int | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        """eos: the model's end-of-sequence tokens. bad_words: as `bad_word_tokens` gives them. grammar: told of every
        token; what it allows is masked beside these rules.

        All tokens must be in the vocabulary. Raises ParameterError if every token is forbidden that is allowed, or,
        where vocab_size is given, that there is.
        """
        self._params, self.grammar = params, grammar
        self._stops = frozenset(eos) | frozenset(params.stop_token_ids or ())
        self._allowed = None if params.allowed_token_ids is None else frozenset(params.allowed_token_ids)
        self._output: list[int] = []
        self._endings = _endings(bad_words)
        self._entries = _Entries()
        never = {word[0] for word in bad_words if len(word) == 1}
        self._require_choice(never, vocab_size)
        self._list_fixed(prompt, never)
        self._fixed = len(self._entries)

    def _require_choice(self, never: Collection[int], vocab_size: int | None) -> None:
        """Refuse what forbids every token from the start. What bad words do later, `sample` reports."""
        allowed = self._allowed
        if allowed is None:
            if vocab_size is None or len(self._stops) + len(never) < vocab_size:
                return  # far from it, as nearly always
            allowed = frozenset(range(vocab_size))
        whose = "the vocabulary" if self._allowed is None else "allowed_token_ids"
        if not allowed.difference(never):
            raise ParameterError("bad_words", f"bad_words forbid every token of {whose}")
        if self._params.min_tokens and not allowed.difference(never, self._stops):
            raise ParameterError(
                "min_tokens",
                f"min_tokens forbids stop tokens at first, and {whose} has no other token; allow one more, or set "
                "min_tokens to 0",
            )

    def _list_fixed(self, prompt: Sequence[int], never: Collection[int]) -> None:
        """Entries for every token that the parameters themselves name, and for the prompt's if they count."""
        for token in self._allowed or ():
            self._entries.place(token)
        for key, bias in (self._params.logit_bias or {}).items():
            self._set(int(key), "bias", bias)
        for token in never:
            self._set(token, "bias", -np.inf)
        if self._params.repetition_penalty != 1:
            for token in dict.fromkeys(prompt):
                self._set(token, "in_prompt", True)
        later = self._stops if self._params.min_tokens else frozenset()
        for token in later.union(last for endings in self._endings.values() for _, last in endings):
            if self._may_come(token):
                self._entries.place(token)

    @property
    def needs_history(self) -> bool:
        """Whether the next row can only be sampled when all tokens before it were appended."""
        below_minimum = len(self._output) < self._params.min_tokens
        is_bound = self.grammar is not None
        return self._params.counts_tokens or bool(self._endings) or below_minimum or is_bound

    @property
    def failure(self) -> str | None:
        """Why nothing can follow, where that is known: its grammar grew too complex."""
        error = "" if self.grammar is None else self.grammar.error
        return f"the output's grammar could not go on: {error}" if error else None

    @property
    def adjusts(self) -> bool:
        """Whether it changes logits, now or later, beside what its grammar forbids."""
        params = self._params
        later = bool(self._endings) or params.min_tokens > 0 or self._allowed is not None
        return params.counts_tokens or bool(params.logit_bias) or later or len(self._entries) > 0

    def append(self, token: int) -> None:
        """A token has become part of the output."""
        if self.grammar is not None:
            self.grammar.append(token)
        self._take(token)

    def _take(self, token: int) -> None:
        self._output.append(token)
        if self._params.counts_tokens and self._may_come(token):
            self._entries.count(token, 1)

    def most_entries(self, drafts: Sequence[int]) -> int:
        """No fewer than `write` writes."""
        return len(self._entries) + len(drafts)

    def write(self, into: Adjustments, row: int, drafts: Sequence[int] = ()) -> None:
        """Fill one row, which changes nothing yet, of numpy arrays. drafts: tokens between the output and this row."""
        for token in drafts:
            self._take(token)
        entries = self._entries.all()
        count = len(entries)
        into.tokens[row, :count] = entries["token"]
        into.bias[row, :count] = entries["bias"]
        into.seen[row, :count] = entries["in_prompt"] | (entries["count"] > 0)
        into.penalty[row, :count] = self._params.frequency_penalty * entries["count"]
        into.penalty[row, :count] += self._params.presence_penalty * (entries["count"] > 0)
        into.repetition[row] = self._params.repetition_penalty
        into.only_listed[row] = self._allowed is not None
        for token in self._forbidden_now():
            if self._may_come(token):
                into.bias[row, self._entries.place(token)] = -np.inf
        for token in reversed(drafts):
            self._take_back(token)

    def _take_back(self, token: int) -> None:
        self._output.pop()
        if self._params.counts_tokens and self._may_come(token):
            self._entries.count(token, -1)
            self._entries.drop_last_unless_used(self._fixed)

    def _forbidden_now(self) -> Iterator[int]:
        """Tokens that may not follow this output, but may follow others."""
        if len(self._output) < self._params.min_tokens:
            yield from self._stops
        if self._output:
            for start, last in self._endings.get(self._output[-1], ()):
                if tuple(self._output[-len(start) :]) == start:
                    yield last

    def _may_come(self, token: int) -> bool:
        return self._allowed is None or token in self._allowed

    def _set(self, token: int, name: str, value: float) -> None:
        if self._may_come(token):
            self._entries.set(token, name, value)


def adjustments(
    rules: Sequence[tuple[LogitRules, Sequence[int]] | None], rows: int, vocab_size: int
) -> Adjustments | None:
    """numpy arrays for `rows` rows of a step, those behind the given ones unchanged; None if no row has rules.

    rules: for each row, its sequence's rules and the drafts before the row; None for a row without rules.
    """
    ruled = [(row, *rule) for row, rule in enumerate(rules) if rule is not None]
    if not ruled:
        return None
    most = max(rule.most_entries(drafts) for _, rule, drafts in ruled)
    size = next((size for size in adjustment_sizes(vocab_size) if size >= most), vocab_size)
    made = no_adjustments(rows, size, vocab_size)
    for row, rule, drafts in ruled:
        rule.write(made, row, drafts)
    return made


def bad_word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Token sequences that must not be completed: each word, and, as in vLLM, the word behind a space.

    Unlike vLLM, which leaves the second out when it is longer or shorter, only one that ends with the first is left
    out: forbidding the first covers it. Raises ParameterError for a word that is no token at all, or no Unicode.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        try:
            plain, spaced = (
                tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
                for space in ("", " ")
            )
        except ValueError as error:
            raise ParameterError("bad_words", f"bad_words must be Unicode text: {error}") from None
        if not plain:
            raise ParameterError(
                "bad_words", f"bad_words must be words, but hold {word!r}, which is no token"
            )
        found[plain] = None
        if spaced[-len(plain) :] != plain:
            found[spaced] = None
    return list(found)


def _endings(bad_words: Sequence[Sequence[int]]) -> dict[int, list[tuple[tuple[int, ...], int]]]:
    """Bad words of several tokens as (start, last token), by the token before the last."""
    endings: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for word in bad_words:
        if len(word) > 1:
            endings.setdefault(word[-2], []).append((tuple(word[:-1]), word[-1]))
    return endings


class _Entries:
    """Tokens with a place each in one growing array: their bias, whether the prompt has them, their output count."""

    def __init__(self) -> None:
        kinds = [("token", np.int32), ("bias", np.float32), ("in_prompt", bool), ("count", np.int32)]
        self._array = np.zeros(_SIZES[0], kinds)
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def all(self) -> np.ndarray:
        """A view of what is there."""
        return self._array[: len(self)]

    def place(self, token: int) -> int:
        """Where a token is; it is added if need be."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._array):
            self._array = np.concatenate([self._array, np.zeros_like(self._array)])
        self._array["token"][place] = token
        return place

    def set(self, token: int, name: str, value: float) -> None:
        """Set one field of a token."""
        place = self.place(token)
        self._array[name][place] = value

    def count(self, token: int, by: int) -> None:
        """Add to a token's count."""
        place = self.place(token)
        self._array["count"][place] += by

    def drop_last_unless_used(self, fixed: int) -> None:
        """Forget the token that came last, if it is not one of the first `fixed` and its count is back at 0."""
        last = len(self) - 1
        if last >= fixed and self._array["count"][last] == 0:
            token, _ = self._places.popitem()
            self._array[last] = np.zeros((), self._array.dtype)
