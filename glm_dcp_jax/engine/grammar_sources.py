"""What llguidance is told for what a request asks for: a JSON schema, a regex, or a grammar in its variant of Lark."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from glm_dcp_jax.engine.structured_outputs import StructuredOutputs

_WHITESPACE = r"[ \t\r\n]{1,64}"
"""Enough to indent any JSON, and not without end: small models like to go on with blanks."""
TEXT = r"/(?s:.*)/"
"""Any text. Tokens that no text is cut into are not in it."""


def source_of(wanted: StructuredOutputs, added_tokens: Mapping[str, int]) -> str:
    """For LLMatcher. added_tokens: those that a text in a structural tag stands for, where it holds their text.

    Raises ValueError for what cannot even be written down as a grammar.
    """
    if wanted.kind == "regex":
        return str(LLMatcher.grammar_from_regex(wanted.regex or ""))
    if wanted.kind == "choice":
        # A terminal: rules with thousands of alternatives are too much.
        return lark(f"start: CHOICE\nCHOICE: {alternatives(map(text, wanted.choice or ()))}")
    if wanted.kind == "grammar":
        return lark(_as_lark(wanted.grammar or ""))
    options = whitespace(wanted)
    if wanted.kind == "structural_tag":
        assert isinstance(wanted.structural_tag, Mapping)
        return lark(structural_tags(wanted.structural_tag, options, added_tokens))
    schema = wanted.json if isinstance(wanted.json, Mapping) else {"type": "object"}
    return str(LLMatcher.grammar_from_json_schema(dict(schema), overrides=options))  # type: ignore[arg-type]


def _as_lark(grammar: str) -> str:
    """Lark as it is, llama.cpp's GBNF translated."""
    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(str(error)) from None


def lark(source: str) -> str:
    """A grammar, or parts of one by their names, as LLMatcher takes it."""
    return str(LLMatcher.grammar_from_lark(source))


def alternatives(parts: Iterable[str]) -> str:
    """Any one of them."""
    return " | ".join(parts)


def text(literal: str) -> str:
    """A text, all of it."""
    return json.dumps(literal, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )  # which Lark does not take as it is


def token(number: int) -> str:
    """One token by its id."""
    return f"<[{number}]>"


def marked(literal: str, added_tokens: Mapping[str, int]) -> str:
    """A text in which the texts of added tokens mean these tokens; empty for an empty one."""
    if not literal:
        return ""
    names = sorted(filter(None, added_tokens), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, names))})", literal) if names else [literal]
    return " ".join(
        token(added_tokens[piece]) if piece in added_tokens else text(piece) for piece in pieces if piece
    )


def whitespace(wanted: StructuredOutputs) -> dict[str, Any]:
    """llguidance's options for what may be between the parts of JSON."""
    if wanted.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": wanted.whitespace_pattern or _WHITESPACE}


def json_rule(schema: Any, options: Mapping[str, Any]) -> str:
    """A JSON value inside a Lark grammar."""
    inner = dict(schema) if isinstance(schema, Mapping) else {}
    return f"%json {json.dumps(inner | {'x-guidance': dict(options)})}"


def structural_tags(
    tag: Mapping[str, Any], options: Mapping[str, Any], added_tokens: Mapping[str, int]
) -> str:
    """Free text in which each trigger begins one of the structures that begin with it."""
    rules, names = [], []
    for number, structure in enumerate(tag["structures"]):
        begin = structure["begin"]
        trigger = max(filter(begin.startswith, tag["triggers"]), key=len)
        rest = marked(begin[len(trigger) :], added_tokens)
        body = f"{rest} {json_rule(structure['schema'], options)} {marked(structure['end'], added_tokens)}"
        if trigger in added_tokens:
            rules.append(f"tag_{number}: FREE {token(added_tokens[trigger])} {body}")
        else:
            rules.append(f"begin_{number}[lazy]: FREE {text(trigger)}")
            rules.append(f"tag_{number}: begin_{number} {body}")
        names.append(f"tag_{number}")
    return "\n".join([f"start: ({alternatives(names)})* rest", "rest: FREE", f"FREE: {TEXT}", *rules])
