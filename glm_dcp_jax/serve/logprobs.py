"""Logprobs in OpenAI's two shapes: parallel lists for completions, one object per token for chats."""

from collections.abc import Sequence
from typing import Any

from glm_dcp_jax.engine.outputs import Logprob
from glm_dcp_jax.engine.tokenizer import Tokenizer

PromptLogprobs = list[dict[int, Logprob] | None]
"""Of each token, itself and the likeliest ones; None for the first, which nothing precedes."""
_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot hold (vLLM's value)."""


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[dict[int, Logprob] | None],
    alternatives: int,
    offset: int,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/completions, with nulls for the first token of an echoed prompt.

    offset: characters of the tokens before these.
    """
    tokens, values, tops, offsets = [], [], [], []
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        name = _unscored(token_id, tokenizer) if entries is None else _name(token_id, entries[token_id])
        tokens.append(name)
        values.append(None if entries is None else _value(entries[token_id]))
        tops.append(None if entries is None else _top(entries, token_id, alternatives))
        offsets.append(offset)
        offset += len(name)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def prompt_logprobs_body(logprobs: PromptLogprobs) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per prompt token, objects by token id; null for the first."""
    return [
        None
        if entries is None
        else {
            str(id): {"logprob": _value(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for id, entry in entries.items()
        }
        for entries in logprobs
    ]


def token_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[dict[int, Logprob]],
    alternatives: int,
    tokenizer: Tokenizer,
) -> list[dict[str, Any]]:
    """`choices[].logprobs.content` of /v1/chat/completions, and `logprobs` of a message's text in /v1/responses."""

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        raw = tokenizer.token_to_bytes(token_id)
        return {"token": _name(token_id, logprob), "logprob": _value(logprob), "bytes": list(raw)}

    content = []
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        top = [entry(id, logprob) for id, logprob in _likeliest(entries, alternatives).items()]
        content.append({**entry(token_id, entries[token_id]), "top_logprobs": top})
    return content


def _likeliest(entries: dict[int, Logprob], count: int) -> dict[int, Logprob]:
    """The engine reports the sampled token too, which need not be among the likeliest."""
    ordered = sorted(entries.items(), key=lambda item: -item[1].logprob)
    return dict(ordered[:count])


def _top(entries: dict[int, Logprob], token_id: int, alternatives: int) -> dict[str, float]:
    shown = {**_likeliest(entries, alternatives), token_id: entries[token_id]}
    return {_name(id, entry): _value(entry) for id, entry in shown.items()}


def _unscored(token_id: int, tokenizer: Tokenizer | None) -> str:
    return _name(token_id, Logprob(0, None, None if tokenizer is None else tokenizer.token_to_str(token_id)))


def _name(token_id: int, logprob: Logprob) -> str:
    return f"token_id:{token_id}" if logprob.decoded_token is None else logprob.decoded_token


def _value(logprob: Logprob) -> float:
    return max(logprob.logprob, _LEAST)
