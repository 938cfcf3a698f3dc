"""Logprobs in OpenAI's two shapes: parallel lists for completions, one object per token for chat."""

from typing import Any

from glm_dcp_jax.engine.outputs import Logprob
from glm_dcp_jax.engine.tokenizer import Tokenizer

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot hold (vLLM's value)."""


def completion_logprobs(
    token_ids: list[int], logprobs: list[dict[int, Logprob]], alternatives: int, offset: int
) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/completions. offset: characters of the tokens before these."""
    tokens, values, tops, offsets = [], [], [], []
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        name = _name(token_id, entries[token_id])
        tokens.append(name)
        values.append(_value(entries[token_id]))
        shown = {**_likeliest(entries, alternatives), token_id: entries[token_id]}
        tops.append({_name(id, entry): _value(entry) for id, entry in shown.items()})
        offsets.append(offset)
        offset += len(name)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(
    token_ids: list[int],
    logprobs: list[dict[int, Logprob]],
    alternatives: int,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/chat/completions."""

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        raw = tokenizer.token_to_bytes(token_id)
        return {"token": _name(token_id, logprob), "logprob": _value(logprob), "bytes": list(raw)}

    content = []
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        top = [entry(id, logprob) for id, logprob in _likeliest(entries, alternatives).items()]
        content.append({**entry(token_id, entries[token_id]), "top_logprobs": top})
    return {"content": content}


def _likeliest(entries: dict[int, Logprob], count: int) -> dict[int, Logprob]:
    """The engine reports the sampled token too, which need not be among the likeliest."""
    ordered = sorted(entries.items(), key=lambda item: -item[1].logprob)
    return dict(ordered[:count])


def _name(token_id: int, logprob: Logprob) -> str:
    return f"token_id:{token_id}" if logprob.decoded_token is None else logprob.decoded_token


def _value(logprob: Logprob) -> float:
    return max(logprob.logprob, _LEAST)
