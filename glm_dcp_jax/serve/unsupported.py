"""Request fields of OpenAI's and vLLM's APIs that this engine does not have: refused by name, never ignored."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from pydantic_core import PydanticCustomError

NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})

_HARMLESS: dict[str, tuple[Any, ...]] = {
    "audio": NOTHING,
    "best_of": (None, 1),
    "bootstrap_host": (None,),
    "bootstrap_room": (None,),
    "chat_template": NOTHING,
    "continue_final_message": NOTHING,
    "continuous_usage_stats": NOTHING,
    "data_parallel_rank": (None,),
    "documents": NOTHING,
    "early_stopping": (None, False),
    "echo": NOTHING,
    "function_call": (None, "none", "auto"),
    "functions": NOTHING,
    "guided_choice": NOTHING,
    "guided_decoding_backend": (*NOTHING, "auto", "guidance"),
    "guided_grammar": NOTHING,
    "guided_json": (None,),
    "guided_regex": NOTHING,
    "guided_whitespace_pattern": NOTHING,
    "kv_transfer_params": NOTHING,
    "length_penalty": (None, 1),
    "logits_processors": NOTHING,
    "mm_processor_kwargs": NOTHING,
    "modalities": (None, [], ["text"]),
    "prediction": NOTHING,
    "prompt_embeds": NOTHING,
    "response_format": (None, {"type": "text"}),
    "return_tokens_as_token_ids": NOTHING,
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "structural_tag": NOTHING,
    "structured_outputs": NOTHING,
    "suffix": NOTHING,
    "thinking_token_budget": (None,),
    "tool_call_id": NOTHING,
    "tool_calls": NOTHING,
    "tool_choice": (None, "none", "auto"),
    "tools": NOTHING,
    "truncate_prompt_tokens": (None,),
    "use_beam_search": NOTHING,
    "verbosity": (None, "medium"),
    "vllm_xargs": NOTHING,
    "web_search_options": (None,),
}
"""Each field with the values that ask for nothing, which clients do send."""


def refuse_unsupported(
    fields: Any, supported: Collection[str], more: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
) -> None:
    """Raise PydanticCustomError, with the field as `param`, if an object asks for something without support.

    supported: fields that this object has, though others of the API do not. more: other fields that only it is asked
    for, with the values that ask for nothing.
    """
    if isinstance(fields, Mapping):
        harmless = {**_HARMLESS, **more} if more else _HARMLESS
        for name in (fields.keys() & harmless.keys()).difference(supported):
            if fields[name] not in harmless[name]:
                raise PydanticCustomError(
                    "unsupported", "is not supported by this server; leave it out", {"param": name}
                )
