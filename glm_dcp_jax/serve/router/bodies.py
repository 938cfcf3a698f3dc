"""What clients send, and what becomes of it on its way to a prefill and to a decode server."""

import json
from dataclasses import dataclass
from typing import Any

from glm_dcp_jax.serve.errors import ApiError
from glm_dcp_jax.serve.strict_json import parse_strictly

PARAMS = "kv_transfer_params"
RESPONSES = "/v1/responses"
SKIPS = ("short", "several_prompts", "prompt_logprobs")
"""Why a request is left to a decode server alone."""
CHARS_PER_TOKEN_ID = 4
"""How long a prompt counts that is given as token ids."""
_TEXTS = ("prompt", "messages", "input", "instructions", "tools")
_ASK_FOR_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
_NOT_FOR_PREFILL = (
    "best_of",
    "echo",
    "logprobs",
    "min_completion_tokens",
    "min_tokens",
    "prompt_logprobs",
    "return_token_ids",
    "stream_options",
    "top_logprobs",
)
"""Fields that would contradict an answer of one token, or make it long; nobody reads it."""


@dataclass(frozen=True)
class Body:
    """A request's body: as it came, and understood."""

    raw: bytes
    fields: dict[str, Any]

    def for_prefill(self, path: str) -> bytes:
        """The same prompt and sampling, but one token, not streamed, whose cache is to be kept for a decode server.

        path: of the API that it goes to.
        """
        fields = {name: value for name, value in self.fields.items() if name not in _NOT_FOR_PREFILL}
        if fields.get("max_completion_tokens") is not None:
            fields["max_completion_tokens"] = 1
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        fields |= {"stream": False, limit: 1, "n": 1, PARAMS: _ASK_FOR_PREFILL}
        return json.dumps(fields, separators=(",", ":")).encode()

    def for_decode(self, params: dict[str, Any] | None) -> bytes:
        """The body as it came, to the byte, with `params` as one more field behind the others."""
        if params is None:
            return self.raw
        head = self.raw.rstrip()[:-1]  # without the closing brace
        comma = b"," if self.fields else b""
        return head + comma + json.dumps({PARAMS: params}, separators=(",", ":")).encode()[1:]

    def skip_reason(self, min_chars: int) -> str | None:
        """Which of SKIPS holds, if one does.

        A prefill server hands over one cache, which would not do for several prompts. And where logits of the prompt
        are asked for, a decode server must compute it anyway.
        """
        if _is_several(self.fields.get("prompt")):
            return "several_prompts"
        echoed = self.fields.get("echo") and self.fields.get("logprobs") is not None
        if self.fields.get("prompt_logprobs") is not None or echoed:
            return "prompt_logprobs"
        return "short" if self.prompt_chars < min_chars else None

    @property
    def prompt_chars(self) -> int:
        """Characters of all texts in the prompt, or in the messages, the items of a response's input, and the tools."""
        total = 0
        waiting = [self.fields.get(name) for name in _TEXTS]
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                total += len(value)
            elif isinstance(value, int):
                total += CHARS_PER_TOKEN_ID
            elif isinstance(value, list):
                waiting += value
            elif isinstance(value, dict):
                waiting += value.values()
        return total


def parse_body(raw: bytes) -> Body:
    """Raises ApiError 400 for what no server would take, or would not take from a router's client."""
    try:
        fields = parse_strictly(raw)
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError("the body must be a JSON object")
    if fields.get(PARAMS):  # a decode server would connect to wherever they say
        raise ApiError(f"{PARAMS} is what the router adds; leave it out", param=PARAMS)
    if PARAMS in fields:  # they ask for nothing, but must not be there twice in the end
        del fields[PARAMS]
        raw = json.dumps(fields, separators=(",", ":")).encode()
    return Body(raw, fields)


def _is_several(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], (str, list))
