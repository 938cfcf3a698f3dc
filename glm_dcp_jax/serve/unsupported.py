"""Request fields of OpenAI's and vLLM's APIs that this engine does not have: refused by name, never ignored."""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})

_HARMLESS: dict[str, tuple[Any, ...]] = {
    "audio": _NOTHING,
    "best_of": (None, 1),
    "chat_template": _NOTHING,
    "continue_final_message": _NOTHING,
    "continuous_usage_stats": _NOTHING,
    "documents": _NOTHING,
    "echo": _NOTHING,
    "function_call": (None, "none", "auto"),
    "functions": _NOTHING,
    "guided_choice": _NOTHING,
    "guided_decoding_backend": (*_NOTHING, "auto", "guidance"),
    "guided_grammar": _NOTHING,
    "guided_json": (None,),
    "guided_regex": _NOTHING,
    "guided_whitespace_pattern": _NOTHING,
    "kv_transfer_params": _NOTHING,
    "length_penalty": (None, 1),
    "logits_processors": _NOTHING,
    "mm_processor_kwargs": _NOTHING,
    "modalities": (None, [], ["text"]),
    "prediction": _NOTHING,
    "prompt_embeds": _NOTHING,
    "response_format": (None, {"type": "text"}),
    "return_tokens_as_token_ids": _NOTHING,
    "structural_tag": _NOTHING,
    "structured_outputs": _NOTHING,
    "suffix": _NOTHING,
    "thinking_token_budget": (None,),
    "tool_call_id": _NOTHING,
    "tool_calls": _NOTHING,
    "tool_choice": (None, "none", "auto"),
    "tools": _NOTHING,
    "truncate_prompt_tokens": (None,),
    "use_beam_search": _NOTHING,
    "vllm_xargs": _NOTHING,
    "web_search_options": (None,),
}
"""Each field with the values that ask for nothing, which clients do send."""


def refuse_unsupported(fields: Any, supported: Collection[str]) -> None:
    """Raise PydanticCustomError, with the field as `param`, if an object asks for something without support.

    supported: fields that this object has, though others of the API do not.
    """
    if isinstance(fields, Mapping):
        for name in (fields.keys() & _HARMLESS.keys()).difference(supported):
            if fields[name] not in _HARMLESS[name]:
                raise PydanticCustomError(
                    "unsupported", "is not supported by this server; leave it out", {"param": name}
                )
