"""A grammar of tool calls: for calls that must be made, and for answers in a form beside which tools may be called."""

from collections.abc import Mapping, Sequence
from typing import Any

from glm_dcp_jax.engine.grammar_sources import TEXT, alternatives, json_rule, text, token
from glm_dcp_jax.engine.structured_outputs import StructuredOutputs
from glm_dcp_jax.serve.parsing.parameters import Parameters
from glm_dcp_jax.serve.parsing.tags import CALL_TAGS, Tag, TagTable

COMPACT = {"whitespace_flexible": False}
"""JSON of arguments, as models write it."""
_DEFINITIONS = ("$defs", "definitions")


def forced_calls(tools: Sequence[Mapping[str, Any]], table: TagTable, several: bool, answer: str = "") -> str:
    """A Lark grammar of one call, or of one or `several`, to these tools; arguments come in their schemas' order.

    answer: a rule of what may be said in place of calls; "" for nothing. Raises ValueError where the tags are no
    tokens.
    """
    if table.texts:
        missing = ", ".join(tag.value for tag in table.texts)
        raise ValueError(f"the tokenizer has no tokens for {missing}, so calls cannot be forced")
    tags = {tag: token(number) for number, tag in table.tokens.items() if tag in CALL_TAGS}
    start = f"call{'+' if several else ''}{f' | {answer}' if answer else ''}"
    rules = ["%llguidance {}", f"start: {start}", f"TEXT: {TEXT}"]
    names = []
    for place, tool in enumerate(tools):
        function = tool["function"]
        rules += _tool_rules(f"tool_{place}", function["name"], function.get("parameters") or {}, tags)
        names.append(f"tool_{place}")
    rules.append(f"call: {tags[Tag.CALL]} ({alternatives(names)}) {tags[Tag.CALL_END]}")
    return "\n".join(rules)


def json_answer(wanted: StructuredOutputs) -> str:
    """The rule of an answer in JSON. Raises ValueError for an answer of another kind."""
    if wanted.kind not in ("json", "json_object"):
        raise ValueError(
            "only JSON can be asked for beside tools; set tool_choice to none, or leave tools out"
        )
    schema = wanted.json if isinstance(wanted.json, Mapping) else {"type": "object"}
    return json_rule(schema, COMPACT)


def _tool_rules(rule: str, name: str, schema: Mapping[str, Any], tags: Mapping[Tag, str]) -> list[str]:
    """The rules of one tool's name and arguments."""
    properties = schema.get("properties") or {}
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    parameters = Parameters(schema)
    rules, parts = [], []
    for place, (key, described) in enumerate(properties.items()):
        argument = f"{rule}_{place}"
        value = _value(key, described, schema, parameters)
        named = f"{tags[Tag.KEY]} {text(key)} {tags[Tag.KEY_END]}"
        rules.append(f"{argument}: {named} {tags[Tag.VALUE]} {value} {tags[Tag.VALUE_END]}")
        parts.append(argument if key in required else f"{argument}?")
    return [f"{rule}: {' '.join([text(name), *parts])}", *rules]


def _value(key: str, described: Any, schema: Mapping[str, Any], parameters: Parameters) -> str:
    """What may stand as an argument: texts as they are, everything else as JSON."""
    types = parameters.types(key)
    if types is None or "string" in types:
        words = _words(described)
        return f"({alternatives(map(text, words))})" if types == frozenset({"string"}) and words else "TEXT"
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    return json_rule({**definitions, **described}, COMPACT)


def _words(described: Any) -> list[str]:
    """The only texts that a schema allows, if it lists them."""
    if not isinstance(described, Mapping):
        return []
    listed = [described["const"]] if "const" in described else described.get("enum")
    words = listed if isinstance(listed, list) else []
    return words if all(isinstance(word, str) and word.strip() for word in words) else []
