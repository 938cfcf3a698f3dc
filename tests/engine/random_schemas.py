"""Random JSON schemas that llguidance takes, most of whose values are short."""

import random
from typing import Any

WORDS = "id name kind size color äöü tags at".split()


def random_schema(seed: int) -> dict[str, Any]:
    """An object's schema; the same for a seed."""
    rng = random.Random(seed)
    schema = _object(rng, 0)
    if rng.random() < 0.3:
        schema["$defs"] = {"part": _object(rng, 2)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["required"].append("part")
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    simple = [_integer, _number, _text, _enum, _const, _boolean, _pattern]
    made = rng.choice(simple if depth > 2 else [*simple, _array, _object, _either])
    return made(rng, depth)


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 1000)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "minimum": -1, "exclusiveMaximum": 3}


def _text(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}


def _pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(["^[a-z]{1,4}$", "^(yes|no)$", r"^\d{2}-\d{2}$"])}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["a", "b b", 3, None, True, "ü\n"], rng.randint(1, 4))}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(["x", 7, [1, "y"], {"z": None}])}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "array", "items": _value(rng, depth + 1), "maxItems": rng.randint(0, 3)}


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth + 1), _value(rng, depth + 1)]}
