"""A grammar of tool calls: for calls that must be made, and for answers in a form beside which tools may be called."""

from collections.abc import Mapping, Sequence
from typing import Any

from glm_dcp_jax.engine.grammar_sources import alternatives, json_rule, text, token, whitespace
from glm_dcp_jax.engine.structured_outputs import StructuredOutputs
from glm_dcp_jax.serve.parsing.argument_rules import COMPACT, FREE_TEXTS, ArgumentRules
from glm_dcp_jax.serve.parsing.tags import CALL_TAGS, Tag, TagTable


def forced_calls(tools: Sequence[Mapping[str, Any]], table: TagTable, several: bool, answer: str = "") -> str:
    """A Lark grammar of one call, or of one or `several`, to these tools; arguments come in their schemas' order.

    answer: a rule of what may be said in place of calls; "" for nothing. Raises ValueError where the tags are no
    tokens, and for parameters that cannot be enforced.
    """
    if table.texts:
        missing = ", ".join(tag.value for tag in table.texts)
        raise ValueError(f"the tokenizer has no tokens for {missing}, so calls cannot be forced")
    tags = {tag: token(number) for number, tag in table.tokens.items() if tag in CALL_TAGS}
    start = f"call{'+' if several else ''}{f' | {answer}' if answer else ''}"
    rules = ["%llguidance {}", f"start: {start}", *FREE_TEXTS]
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
    return json_rule(schema, whitespace(wanted) if wanted.whitespace_pattern else COMPACT)


def _tool_rules(rule: str, name: str, schema: Mapping[str, Any], tags: Mapping[Tag, str]) -> list[str]:
    """The rules of one tool's name and arguments."""
    try:
        arguments = ArgumentRules(rule, schema)
        rules, parts = [], []
        for place, key in enumerate(arguments.names):
            argument = f"{rule}_{place}"
            named = f"{tags[Tag.KEY]} {text(key)} {tags[Tag.KEY_END]}"
            value = f"{tags[Tag.VALUE]} {arguments.value(key)} {tags[Tag.VALUE_END]}"
            rules.append(f"{argument}: {named} {value}")
            parts.append(argument if key in arguments.required else f"{argument}?")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"calls of {name} cannot be forced: {error}") from None
    return [f"{rule}: {' '.join([text(name), *parts])}", *rules, *arguments.terminals]
