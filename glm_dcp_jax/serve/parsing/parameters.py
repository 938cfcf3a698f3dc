"""What types a tool's parameters may have, by its JSON schema."""

from collections.abc import Mapping
from typing import Any

Types = frozenset[str] | None
"""JSON type names ("integer" counts as "number"); None: anything."""

_MOST_SCHEMAS = 100
"""Looked at for one parameter; one that is made of more may be anything."""
_NAMES = {
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def type_name(value: Any) -> str:
    """JSON's name for the type of a value that was read from JSON."""
    return _NAMES[type(value)]


class Parameters:
    """The parameters of one tool. schema: as its `parameters` say; None for a tool that has none."""

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        self._root = schema or {}
        self.stated = self._root
        """The schema that says it, behind the references that the tool's may consist of."""
        for _ in range(_MOST_SCHEMAS):
            reference = self.stated.get("$ref")
            found = self.resolve(reference) if isinstance(reference, str) else None
            if "properties" in self.stated or not isinstance(found, dict):
                break
            self.stated = found
        self._known: dict[str, Types] = {}

    @property
    def required(self) -> list[str]:
        """Names that the schema requires."""
        names = self.stated.get("required")
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    def has(self, name: str) -> bool:
        """Whether the schema names such a parameter."""
        properties = self.stated.get("properties")
        return (isinstance(properties, dict) and name in properties) or name in self.required

    def types(self, name: str) -> Types:
        """What a parameter may be. None for one that the schema does not name."""
        if name not in self._known:
            properties = self.stated.get("properties")
            named = properties.get(name) if isinstance(properties, dict) else None
            schema = self.stated.get("additionalProperties") if named is None else named
            self._known[name] = self._types_of(schema, set())
        return self._known[name]

    def _types_of(self, schema: Any, seen: set[int]) -> Types:
        """seen: schemas that are looked at already; one that refers to itself adds nothing to what it may be."""
        if not isinstance(schema, dict):
            return None
        if id(schema) in seen:
            return frozenset()
        if len(seen) == _MOST_SCHEMAS:
            return None
        seen.add(id(schema))
        found = self._stated(schema, seen)
        return found | {"null"} if found is not None and schema.get("nullable") is True else found

    def _stated(self, schema: dict[str, Any], seen: set[int]) -> Types:
        if isinstance(reference := schema.get("$ref"), str):
            return self._types_of(self.resolve(reference), seen)
        if "type" in schema:
            kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            named = frozenset("number" if kind == "integer" else str(kind) for kind in kinds)
            listed = _listed(schema)
            return named if listed is None else named & listed
        if (listed := _listed(schema)) is not None:
            return listed
        for choice in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(choice), list):
                each = [self._types_of(option, seen) for option in options]
                known = [types for types in each if types is not None]
                return frozenset().union(*known) if len(known) == len(each) else None
        if isinstance(parts := schema.get("allOf"), list):
            stated = [types for part in parts if (types := self._types_of(part, seen))]
            return frozenset.intersection(*stated) if stated else None
        if "properties" in schema:
            return frozenset({"object"})
        return frozenset({"array"}) if "items" in schema else None

    def resolve(self, reference: str) -> Any:
        """What `#/$defs/name` and its like point to; None for other documents and for nothing."""
        head, *steps = reference.split("/")
        found: Any = self._root if head == "#" else None
        for step in steps:
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found


def _listed(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The types of the values that a schema lists; None for one that does not."""
    if "const" in schema:
        return frozenset({type_name(schema["const"])})
    values = schema.get("enum")
    return frozenset(map(type_name, values)) if isinstance(values, list) else None
