"""The fields of a request that say what its output must look like: OpenAI's `response_format`, and vLLM's."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from glm_dcp_jax.engine.structured_outputs import KINDS, StructuredOutputs, StructuredOutputsError

_OPTIONS = (*KINDS, "disable_any_whitespace", "whitespace_pattern")
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Older names of vLLM's, and what they are in structured_outputs."""
_FORMATS = "text, json_object, json_schema or structural_tag"


def structured_outputs_of(fields: Mapping[str, Any]) -> tuple[StructuredOutputs | None, str]:
    """What a request's fields ask for, and the field that says so; (None, "") if they ask for nothing.

    Raises PydanticCustomError, with the field as `param`, for what cannot be meant, and if several fields ask.
    """
    asked = {
        name: fields[name]
        for name in ("response_format", "structured_outputs", *_GUIDED)
        if fields.get(name) is not None
    }
    if asked.get("response_format") == {"type": "text"}:
        del asked["response_format"]
    if not asked:
        return None, ""
    if len(asked) > 1:
        raise _refused(list(asked)[-1], f"cannot be given with {list(asked)[0]}")
    [(name, value)] = asked.items()
    try:
        if name in _GUIDED:
            return StructuredOutputs(**{_GUIDED[name]: value}), name
        options = _of_format(value) if name == "response_format" else _of_options(value)
        return StructuredOutputs(**options), name
    except StructuredOutputsError as error:
        raise _refused(name, str(error)) from None


def _of_options(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise StructuredOutputsError("json", f"must be an object with one of {', '.join(KINDS)}")
    unknown = sorted(name for name, given in value.items() if name not in _OPTIONS and given)
    if unknown:
        raise StructuredOutputsError("json", f"has no {unknown[0]!r}; use {', '.join(_OPTIONS)}")
    return {name: given for name, given in value.items() if name in _OPTIONS and given is not None}


def _of_format(value: Any) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        described = value.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise StructuredOutputsError("json", "of type json_schema needs json_schema.schema, an object")
        return {"json": schema}
    if kind == "structural_tag":
        return {"structural_tag": {name: value.get(name) for name in ("structures", "triggers")}}
    raise StructuredOutputsError("json", f"must be an object whose type is {_FORMATS}")


def _refused(param: str, reason: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{reason}", {"param": param, "reason": reason})
