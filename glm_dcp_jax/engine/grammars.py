"""Structured outputs: which tokens may come next, by llguidance, as bits of a row."""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

from glm_dcp_jax.engine.grammar_sources import source_of
from glm_dcp_jax.engine.sampling_params import ParameterError
from glm_dcp_jax.engine.structured_outputs import StructuredOutputs
from glm_dcp_jax.engine.tokenizer import Tokenizer

WORD = 32
"""Tokens of a mask's element."""
_KEPT = 256
"""Compiled grammars that are kept for requests to come."""
_KEPT_BYTES = 8 << 20
"""Of what they were compiled from, in all: one may take a hundred times its length."""
_LONGEST_ERROR = 300
Result = TypeVar("Result")
_LIMITS = LLParserLimits(verbose_errors=False)
_STACK_BYTES = 512 << 20
"""Of the thread that compiles: llguidance recurses as deep as rules refer to one another, and pages that no frame
touches cost nothing."""
_STACK_SIZE = threading.Lock()
"""Held where threads get another stack than the process's others."""


def mask_words(vocab_size: int) -> int:
    """int32 elements of one row's mask: bit b of element w is token 32 w + b."""
    return -(-vocab_size // WORD)


@dataclass
class _Compiled:
    """matcher: at its beginning; its copies share what its lexer has found out. broken: whether one of them failed, as
    the others will then.
    """

    matcher: LLMatcher
    broken: bool = False


class Grammars:
    """Compiles what requests ask for, once each. For any thread."""

    def __init__(self, tokenizer: Tokenizer, eos: Collection[int], vocab_size: int) -> None:
        """eos: what may end an output, and is then no text. vocab_size: the model's, no less than the tokenizer's."""
        self._tokenizer, self._eos, self._vocab_size = tokenizer, sorted(eos), vocab_size
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()

    def compile(self, wanted: StructuredOutputs) -> "Grammar":
        """A grammar at its beginning. Takes up to seconds for what is large and was not compiled before.

        Raises ParameterError for a schema, regex or grammar that llguidance does not take.
        """
        key = wanted.key
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is not None:
                self._compiled.move_to_end(key)
        if compiled is None or compiled.broken:
            compiled = _Compiled(_with_deep_stack(lambda: self._compile(wanted)))
            with self._lock:
                self._compiled[key] = compiled
                while len(self._compiled) > 1 and self._keeps_too_much:
                    self._compiled.popitem(last=False)
        return Grammar(compiled, wanted.after_token, self._eos, self._vocab_size)

    @property
    def _keeps_too_much(self) -> bool:
        return len(self._compiled) > _KEPT or sum(map(len, self._compiled)) > _KEPT_BYTES

    def _compile(self, wanted: StructuredOutputs) -> LLMatcher:
        try:
            source = source_of(wanted, self._tokenizer.added_tokens)
            matcher = LLMatcher(self._tokens, source, log_level=0, limits=_LIMITS)
            error = matcher.get_error() or _first_error(matcher, self._vocab_size)
        except ValueError as refused:
            error = str(refused)
        if error:
            raise ParameterError("structured_outputs", f"{wanted.kind} cannot be used: {_brief(error)}")
        return matcher

    @cached_property
    def _tokens(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size)))


class _Vocabulary:
    """A tokenizer as llguidance asks for it.

    The end is a token of its own, beyond the vocabulary: a model may have ends that are texts as well. Markup like
    <tool_call> is never part of a text, though tokenizers show it.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = vocab_size
        self.tokens = [*map(tokenizer.token_to_bytes, range(vocab_size)), b"<end>"]
        self.special_token_ids = [*tokenizer.added_tokens.values(), vocab_size]
        within = [
            f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})"
            for name in tokenizer.added_tokens
            if len(name) > 1
        ]
        self._within_markup = re.compile("|".join(within) or r"(?!)")

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text; one that spells markup is cut within it, so that none of them is markup."""
        pieces = self._within_markup.split(text.decode(errors="replace"))
        return [
            token for piece in pieces for token in self._tokenizer.encode(piece, add_special_tokens=False)
        ]


class Grammar:
    """What one output may go on with, as it grows. Not for several threads."""

    def __init__(
        self, compiled: _Compiled, after_token: int | None, eos: Sequence[int], vocab_size: int
    ) -> None:
        self._compiled, self._matcher = compiled, compiled.matcher.deep_copy()
        self._after = after_token
        self._free = after_token is not None
        self._eos, self._end = eos, vocab_size
        self.stuck = False
        """Whether its last mask allowed no token."""

    @property
    def error(self) -> str:
        """Why the grammar cannot go on, of one that grew too complex or leads nowhere; empty while it can."""
        if not self._matcher.is_error():
            return "no token may come next, nor may the output end" if self.stuck else ""
        self._compiled.broken = True
        return _brief(self._matcher.get_error())

    def append(self, token: int) -> None:
        """A token has become part of the output."""
        if self._free:
            self._free = token != self._after
        else:
            self._matcher.consume_token(self._end if token in self._eos else token)

    def allow_ends(self, masks: np.ndarray) -> None:
        """Give the tokens that end an output the bit of the end, in these rows."""
        ends = _bit(masks, self._end)
        for token in self._eos:
            _set_bit(masks, token, ends)

    def ask(
        self, row: int, drafts: Sequence[int], into: np.ndarray
    ) -> tuple[LLMatcher, int, list[int]] | None:
        """What to ask an executor, (matcher, its row, drafts), so that row + j gets the mask behind the first j drafts.

        Rows that are free are written to `into`, without the end; None if all are.
        """
        bound = row
        if self._free:
            bound += drafts.index(self._after) + 1 if self._after in drafts else len(drafts) + 1
            _set_bit(into[row:bound], self._end, np.zeros(bound - row, bool))
        count = bound - row
        return (self._matcher, bound, list(drafts[count:])) if count <= len(drafts) else None


def token_masks(
    grammars: Mapping[int, tuple[Grammar, Sequence[int]]], rows: int, vocab_size: int
) -> np.ndarray | None:
    """Which tokens each of `rows` rows may draw, [rows, mask_words] int32; None if all rows may draw all.

    grammars: of the first row of each sequence that has one, and the drafts that its further rows come behind. Behind a
    draft that may not come, any token may: that row's draw does not count. None may in rows of a grammar with an error.
    """
    if not grammars:
        return None
    masks = np.full((rows, mask_words(vocab_size + 1)), -1, np.int32)  # llguidance's end is one more
    asked = [grammar.ask(row, drafts, masks) for row, (grammar, drafts) in grammars.items()]
    plain = [(matcher, row) for matcher, row, drafts in filter(None, asked) if not drafts]
    drafting = [(matcher, row, drafts) for matcher, row, drafts in filter(None, asked) if drafts]
    if plain:
        fill_next_token_bitmask_par(_executor(), plain, masks)
    if drafting:
        fill_next_token_bitmask_par_with_draft_tokens(_executor(), drafting, masks)
    for row, (grammar, drafts) in grammars.items():
        its_rows = masks[row : row + len(drafts) + 1]
        grammar.allow_ends(its_rows)
        if grammar.error:
            its_rows[:] = 0  # llguidance would have the output end there, as if it were whole
        grammar.stuck = not its_rows[0, : mask_words(vocab_size)].any()
    return np.ascontiguousarray(masks[:, : mask_words(vocab_size)])


def _first_error(matcher: LLMatcher, vocab_size: int) -> str:
    """What goes wrong with a grammar's first token, so that no output can begin; empty for nothing."""
    masks = np.zeros((2, mask_words(vocab_size + 1)), np.int32)
    begun, drafting = matcher.deep_copy(), matcher.deep_copy()
    fill_next_token_bitmask_par(_executor(), [(begun, 0)], masks)
    first = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))[:1].tolist()
    # Tells also what broke in the first copy, and whether drafts can be taken back.
    fill_next_token_bitmask_par_with_draft_tokens(_executor(), [(drafting, 0, first)], masks)
    error = next((str(each.get_error()) for each in (begun, drafting) if each.is_error()), "")
    return error or ("" if first else "it allows no output")


def _with_deep_stack(call: Callable[[], Result]) -> Result:
    """Run `call` in a thread that may recurse deep."""
    future: Future[Result] = Future()
    with _STACK_SIZE:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=_run_into, args=(future, call), name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return future.result()


def _run_into(future: "Future[Result]", call: Callable[[], Result]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # whoever waits must hear of it
        future.set_exception(error)


def _bit(masks: np.ndarray, token: int) -> np.ndarray:
    """Whether each row allows a token."""
    return masks.view(np.uint32)[:, token // WORD] >> np.uint32(token % WORD) & 1 != 0


def _set_bit(masks: np.ndarray, token: int, allowed: np.ndarray) -> None:
    words, bit = masks.view(np.uint32)[:, token // WORD], np.uint32(1 << token % WORD)
    words[:] = np.where(allowed, words | bit, words & ~bit)


@cache
def _executor() -> LLExecutor:
    return LLExecutor()


def _brief(error: str) -> str:
    """What llguidance says, in one line of reasonable length."""
    line = " ".join(error.partition("<backtrace>")[0].replace("<non-verbose/>", "").split())
    return line if len(line) <= _LONGEST_ERROR else f"{line[:_LONGEST_ERROR]}..."
