"""POST /tokenize and /detokenize: the model's tokenizer, without generating anything."""

import asyncio

from fastapi import APIRouter, Request, Response

from glm_dcp_jax.engine.tokenizer import Tokenizer
from glm_dcp_jax.serve.chat_prompt import chat_token_ids
from glm_dcp_jax.serve.context import Context, context_of
from glm_dcp_jax.serve.errors import ApiError, json_response
from glm_dcp_jax.serve.limits import encode_within
from glm_dcp_jax.serve.protocol import DetokenizeRequest, TokenizeRequest
from glm_dcp_jax.serve.strict_json import StrictRoute

router = APIRouter(route_class=StrictRoute)


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Token ids of a text, or of the prompt that a conversation becomes."""
    context = context_of(request)
    context.model(body.model)
    tokenizer = context.tokenizer("/tokenize")
    ids = await _token_ids(context, tokenizer, body)
    strings = [tokenizer.token_to_str(id) for id in ids] if body.return_token_strs else None
    answer = {
        "count": len(ids),
        "max_model_len": context.engine.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }
    return json_response(answer)


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """The text of token ids, special tokens included."""
    context = context_of(request)
    context.model(body.model)
    tokenizer = context.tokenizer("/detokenize")
    unknown = next((id for id in body.tokens if id >= tokenizer.vocab_size), None)
    if unknown is not None:
        raise ApiError(
            f"token id {unknown} is not in the vocabulary, which ends at {tokenizer.vocab_size - 1}",
            param="tokens",
        )
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})


async def _token_ids(context: Context, tokenizer: Tokenizer, body: TokenizeRequest) -> list[int]:
    longest = context.engine.max_model_len
    if body.prompt is None:
        template = context.settings.chat_template
        return await chat_token_ids(tokenizer, body, template, bool(body.add_special_tokens), longest)
    add_special_tokens = True if body.add_special_tokens is None else body.add_special_tokens
    return await asyncio.to_thread(
        encode_within, tokenizer, body.prompt, add_special_tokens, longest, "prompt"
    )
