"""The response object: what was asked for, and what has come of it."""

import time
from collections.abc import Mapping
from typing import Any

from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.serve.errors import ApiError
from glm_dcp_jax.serve.responses.request import ResponsesRequest

_NOT_HERE = (
    "access_programs",
    "conversation",
    "image",
    "input_transformations",
    "moderation",
    "previous_response_id",
    "prompt",
    "prompt_cache_diagnostics",
    "prompt_cache_options",
    "prompt_cache_retention",
    "tool_usage",
)
"""Fields of OpenAI's that say nothing here."""


class ResponseBody:
    """One response, at any time of its life."""

    def __init__(self, id: str, model: str, body: ResponsesRequest, params: SamplingParams) -> None:
        """model: as the client calls it. params: what the request came to."""
        self._fields: dict[str, Any] = {
            "id": id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata,
            "parallel_tool_calls": body.parallel_tool_calls,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "background": False,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": body.text.format, "verbosity": body.text.verbosity},
            "tool_choice": body.tool_choice,
            "tools": body.tools,
            "top_logprobs": body.top_logprobs,
            "top_p": params.top_p,
            "truncation": body.truncation,
            "user": body.user,
        } | dict.fromkeys(_NOT_HERE)

    def begun(self) -> dict[str, Any]:
        """As long as it is written."""
        return self._at("in_progress")

    def ended(
        self,
        output: list[dict[str, Any]],
        usage: Mapping[str, Any],
        finish_reason: str | None,
        kv_transfer_params: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Once its turn has ended. usage: see usage_body. kv_transfer_params: for another engine to go on from."""
        known = {"usage": usage, "kv_transfer_params": kv_transfer_params}
        if finish_reason == "length":
            return self._at("incomplete", output, incomplete_details={"reason": "max_output_tokens"}, **known)
        return self._at("completed", output, completed_at=int(time.time()), **known)

    def failed(self, output: list[dict[str, Any]], error: ApiError) -> dict[str, Any]:
        """Once it is known that it comes to no good end."""
        return self._at("failed", output, error={"code": "server_error", "message": error.message})

    def _at(self, status: str, output: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
        nothing = dict.fromkeys(("error", "incomplete_details", "usage", "completed_at"))
        return {**self._fields, "status": status, "output": output or [], **nothing, **fields}


def usage_body(usage: Mapping[str, Any], thought: int) -> dict[str, Any]:
    """`usage` of a response. usage: as other answers have it. thought: tokens of reasoning.

    Writing to the cache costs nothing, and is not counted.
    """
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage["total_tokens"],
    }
