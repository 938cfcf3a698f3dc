"""Write docs/flags.md from the flags' own definitions: `python scripts/make_flags_doc.py`. A test keeps it current."""

import argparse
from pathlib import Path

from glm_dcp_jax.config import FLAGS, REFUSED, Flag
from glm_dcp_jax.config.flags import field_of, option_of, value_type
from glm_dcp_jax.serve import flags as server
from glm_dcp_jax.serve import foreign_flags

DOCUMENT = Path(__file__).parent.parent / "docs" / "flags.md"

OPENING = """# Flags

<!-- Written by scripts/make_flags_doc.py from the flags' definitions; do not edit. -->

Names are vLLM's wherever it has one. `scripts/serve --help` prints the first two tables.

Without MODEL and without a GPU, `-tp` is 4, `-dcp` is `-tp`, `--max-num-batched-tokens` 128, `--max-num-seqs` 8,
the cache 32 MiB, and steps are compiled for 128 tokens and for 1 and 8 rows, so that the built-in model answers soon.
The same flags (`--precompile-token-paddings 128 --precompile-bs-paddings 1,8`) let another model start sooner.

## Engine

`scripts/serve MODEL --block-size 64` on the command line, and with underscores in Python: `LLM(model, block_size=64)`.

- `auto` among the values: the engine chooses, as the last column says.
- Where the default is (unset), the last column says what that means.
- A length takes a number, also as 4k (4000), 4K (4096) or 25.6k; `auto` and `-1` are as if the flag were not given. In
  Python it is an int, and `None` leaves any flag unset.
- A switch that is on is turned off by `--no-` before its name.

"""

SERVER = """
## Server

On the command line only. [server.md](server.md) says what the server answers.

"""

REFUSED_FLAGS = """
## Refused

Known, and not supported. Each is refused by name when it is given, rather than ignored. The last column says in which
form it may be given, since what it then asks for is so anyway; that changes nothing.

"""


def engine_row(flag: Flag) -> tuple[str, ...]:
    """An engine flag: its spellings, what it takes, its default, what it does."""
    kind, default = value_type(flag.name), field_of(flag.name).default
    value = " or ".join(flag.choices) or kind.__name__
    shown = f"`{default}`" if isinstance(default, int | float | str) else "(unset)"
    if kind is bool:
        value, shown = "switch", "on" if default else "off"
    elif flag.name in server.LENGTHS:
        value = "length, `auto` or `-1`"
    return ", ".join(f"`{name}`" for name in (flag.option, flag.short) if name), value, shown, flag.help


def server_rows() -> list[tuple[str, ...]]:
    """The flags that the server adds to the engine's; argparse has no public way to list them."""
    engine = {flag.option for flag in FLAGS}
    own = [
        action
        for action in server.make_parser()._actions
        if action.option_strings
        and not engine & set(action.option_strings)
        and action.default is not argparse.SUPPRESS
    ]
    return [(f"`{action.option_strings[0]}`", action.help or "") for action in own]


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in [heads, ("---",) * len(heads), *rows])


def document() -> str:
    """All of docs/flags.md."""
    refused = [
        (f"`{option_of(name)}`", why, ", ".join(f"`{form}`" for form in foreign_flags.forms_taken(name)))
        for name, why in (REFUSED | foreign_flags.REFUSED_HERE).items()
    ]
    return "".join(
        [
            OPENING + table(("flag", "value", "default", "what it does"), [engine_row(f) for f in FLAGS]),
            SERVER + table(("flag", "what it does"), server_rows()),
            REFUSED_FLAGS + table(("flag", "instead", "taken"), sorted(refused)),
        ]
    )


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}")
