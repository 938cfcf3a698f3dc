"""What may stand as an argument of a forced call, as Lark: what its schema allows, as the parser will read it."""

import json
from collections.abc import Mapping
from typing import Any

from glm_dcp_jax.engine.grammar_sources import alternatives, json_rule, text
from glm_dcp_jax.serve.parsing.arguments import reads_as_text
from glm_dcp_jax.serve.parsing.parameters import Parameters, type_name

COMPACT = {"whitespace_flexible": False}
"""JSON of arguments, as models write it."""
FREE_TEXTS = (r"TEXT: /(?s:.*)/", r"PLAIN: /(?s:[ \t\r\n]*([^ \t\r\n\[{].*)?)/")
"""Any text, and any that is no array and no object."""
_ROOT = "#/$defs/root"
_DEFINITIONS = ("$defs", "definitions")
_DEEPEST = 32
_UNENFORCED = (
    "allOf anyOf oneOf not if then else enum const dependencies dependentRequired dependentSchemas minProperties "
    "maxProperties patternProperties propertyNames unevaluatedProperties"
).split()


class ArgumentRules:
    """The arguments of one tool. schema: as its `parameters` say.

    Raises ValueError for what cannot be enforced of it.
    """

    def __init__(self, rule: str, schema: Mapping[str, Any]) -> None:
        """rule: what the names of its terminals begin with."""
        self._rule, self._root = rule, schema
        self._parameters = Parameters(schema)
        stated = self._parameters.stated
        if odd := next((keyword for keyword in _UNENFORCED if stated.get(keyword)), None):
            raise ValueError(
                f"its parameters have {odd}, which holds for no single argument; say what they are by properties, "
                "required and additionalProperties"
            )
        properties = stated.get("properties")
        self._properties = dict(properties) if isinstance(properties, dict) else {}
        self.required = self._parameters.required
        for name in self.required:
            self._properties.setdefault(name, stated.get("additionalProperties", True))
        for name in [name for name, schema in self._properties.items() if schema is False or not name]:
            if name in self.required:
                raise ValueError(f"its parameter {name!r} is required, but cannot be given")
            del self._properties[name]
        self.terminals: list[str] = []
        """Rules that the values need."""

    @property
    def names(self) -> list[str]:
        """Of arguments that may come, in the schema's order."""
        return list(self._properties)

    def value(self, name: str) -> str:
        """What may stand as an argument: texts as they are, everything else as JSON."""
        described = self._properties[name]
        described = described if isinstance(described, dict) else {}
        types = self._parameters.types(name)
        if types is None:
            return "TEXT"
        if "string" not in types:
            return json_rule(self._standalone(described), COMPACT)
        made = sorted(types & {"array", "object"})
        strings = self._strings(described, 0)
        parts = ["PLAIN" if made else "TEXT"] if strings is None else []
        words = [word for word in strings or () if reads_as_text(word, types)]
        if any(words):
            terminal = f"{self._rule.upper()}_{len(self.terminals)}"
            self.terminals.append(f"{terminal}: {alternatives(map(text, filter(None, words)))}")
            parts.append(terminal)
        if "null" in types and strings is not None:
            parts.append(text("null"))
        if made:
            told = {key: value for key, value in described.items() if key != "nullable"}
            parts.append(json_rule({**self._standalone(told), "type": made}, COMPACT))
        if not parts and "" not in words:
            raise ValueError(f"its parameter {name!r} allows nothing that can be written as an argument")
        return f"({alternatives(parts)}){'?' if '' in words else ''}" if parts else ""

    def _strings(self, schema: Any, depth: int) -> list[str] | None:
        """The only strings that a schema allows; None for any."""
        if not isinstance(schema, dict) or depth == _DEEPEST:
            return None
        limits: list[list[str] | None] = []
        if isinstance(reference := schema.get("$ref"), str):
            limits.append(self._strings(self._parameters.resolve(reference), depth + 1))
        if "const" in schema:
            limits.append(_texts([schema["const"]]))
        if isinstance(listed := schema.get("enum"), list):
            limits.append(_texts(listed))
        kinds = schema.get("type", "string")
        if "string" not in (kinds if isinstance(kinds, list) else [kinds]):
            limits.append([])
        for choice in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(choice), list):
                each = [self._strings(option, depth + 1) for option in options]
                known = [strings for strings in each if strings is not None]
                every = list(dict.fromkeys(word for strings in known for word in strings))
                limits.append(every if len(known) == len(each) else None)
        if isinstance(parts := schema.get("allOf"), list):
            limits += [self._strings(part, depth + 1) for part in parts]
        stated = [set(limit) for limit in limits if limit is not None]
        first = next((limit for limit in limits if limit is not None), None)
        return None if first is None else [word for word in first if all(word in limit for limit in stated)]

    def _standalone(self, described: Mapping[str, Any]) -> dict[str, Any]:
        """The same schema, as a document of its own: what it refers to comes along."""
        own = {key: value for key, value in described.items() if key not in _DEFINITIONS}
        if '"$ref"' not in json.dumps(own):
            return own
        return {**_moved(own), "$defs": {"root": _moved(dict(self._root))}}


def _texts(values: list[Any]) -> list[str]:
    return [value for value in values if type_name(value) == "string"]


def _moved(schema: Any) -> Any:
    """A schema whose references into its document are those into the one that has the document among its $defs."""
    if isinstance(schema, list):
        return [_moved(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _ROOT + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value)
        for key, value in schema.items()
    }
