"""Write docs/flags.md from the flags' own definitions: `python scripts/make_flags_doc.py`. A test keeps it current."""

import dataclasses
from pathlib import Path

from glm_dcp_jax.config.flags import FLAGS, REFUSED, Flag, field_of, value_type

DOCUMENT = Path(__file__).parent.parent / "docs" / "flags.md"

OPENING = """# Flags

<!-- Written by scripts/make_flags_doc.py from glm_dcp_jax/config/flags.py; do not edit. -->

The engine's flags: `scripts/serve MODEL --block-size 64` on the command line, and the same with underscores in Python,
`LLM(model, block_size=64)`. Names are vLLM's wherever it has one. `scripts/serve --help` lists the HTTP server's own
flags (host, port, keys, names) as well.

| flag | value | default | what it does |
|---|---|---|---|
"""

REFUSALS = """
## Refused

These are known and not supported. Each is refused by name when it is given, rather than ignored.

| flag | instead |
|---|---|
"""


def row(flag: Flag) -> str:
    """One line of the table of flags."""
    name = f"`{flag.option}`" + (f", `{flag.short}`" if flag.short else "")
    value = " \\| ".join(flag.choices) or value_type(flag.name).__name__
    default = field_of(flag.name).default
    shown = "" if default in (None, (), dataclasses.MISSING) else f"`{default}`"
    return f"| {name} | {value} | {shown} | {flag.help} |\n"


def document() -> str:
    """All of docs/flags.md."""
    refused = (f"| `--{name.replace('_', '-')}` | {why} |\n" for name, why in sorted(REFUSED.items()))
    return OPENING + "".join(map(row, FLAGS)) + REFUSALS + "".join(refused)


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}")
