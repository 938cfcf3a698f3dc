"""What a tool's JSON schema says about the types of its parameters."""

import json

import pytest

from glm_dcp_jax.serve.parsing.parameters import Parameters

STRING, NUMBER = {"type": "string"}, {"type": "number"}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"number"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [STRING, {"$ref": "#/$defs/row"}]}, {"string", "array"}),
        ({"oneOf": [NUMBER, {"enum": ["all", None]}]}, {"number", "string", "null"}),
        ({"allOf": [{"$ref": "#/$defs/row"}, {"description": "a row"}]}, {"array"}),
        ({"const": True}, {"boolean"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"$ref": "#/$defs/loop"}, {"string"}),
        ({"$ref": "#/$defs/nowhere"}, None),
        ({"$ref": "http://else.where/"}, None),
        ({"anyOf": [STRING, {}]}, None),
        ({"description": "anything"}, None),
        (True, None),
        ({"anyOf": [{"type": "string"} for _ in range(300)]}, None),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)
def test_what_a_schema_allows(schema, types):
    defs = {"row": {"type": "array"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, STRING]}}
    parameters = Parameters({"properties": {"x": schema}, "$defs": defs})
    assert parameters.types("x") == types
    assert parameters.types("y") is None


def test_schemas_of_other_parameters_hold_for_those_without_a_name():
    assert Parameters({"additionalProperties": STRING}).types("x") == {"string"}
    assert Parameters({"additionalProperties": False}).types("x") is None


def test_a_chain_of_references_ends():
    chain = {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(5000)}
    assert Parameters({"properties": {"x": {"$ref": "#/$defs/0"}}, "$defs": chain}).types("x") is None
