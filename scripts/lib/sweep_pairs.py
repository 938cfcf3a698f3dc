"""Pairs of a prefill and a decode server, as people write them: "P TP4/DCP1 -> D TP2/DCP2/BLOCK16"."""

import re
from dataclasses import dataclass

_FLAGS = {
    "TP": "-tp",
    "DCP": "-dcp",
    "BLOCK": "--block-size",
    "INTERLEAVE": "--cp-kv-cache-interleave-size",
    "SHARDS": "--dcp-indexer-shards",
}
_SIZE = re.compile(r"([A-Z]+)([1-9][0-9]{0,5})")


@dataclass(frozen=True)
class ServerPair:
    """name: in the one way of writing it. prefill, decode: flags of the servers."""

    name: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> "ServerPair":
        """Raises ValueError, with what is allowed, for what cannot be read."""
        sides = re.split(r"->|→", text)
        if len(sides) != 2:
            raise _wrong(text, "it needs one arrow between the two sides")
        names, flags = [], []
        for side, letter in zip(sides, "PD", strict=True):
            words = side.upper().split()
            if len(words) != 2 or words[0] != letter:
                raise _wrong(text, f"a side is {letter} and its sizes, but this is {side.strip()!r}")
            names.append(f"{letter} {words[1]}")
            flags.append(_flags(text, words[1]))
        return ServerPair(" → ".join(names), *flags)


def _flags(text: str, sizes: str) -> tuple[str, ...]:
    flags: dict[str, str] = {}
    for size in sizes.split("/"):
        found = _SIZE.fullmatch(size)
        if found is None or found[1] not in _FLAGS:
            raise _wrong(text, f"{size!r} is no size")
        if _FLAGS[found[1]] in flags:
            raise _wrong(text, f"{found[1]} is there twice")
        flags[_FLAGS[found[1]]] = found[2]
    return tuple(word for flag in flags.items() for word in flag)


def _wrong(text: str, why: str) -> ValueError:
    return ValueError(
        f'{text!r} is no pair: {why}; write for instance "P TP4/DCP1 -> D TP2/DCP2", with any of '
        f"{', '.join(_FLAGS)} on either side"
    )


SEVEN = [
    ServerPair.parse(text)
    for text in (
        "P TP4/DCP1 -> D TP4/DCP1",
        "P TP2/DCP1 -> D TP4/DCP1",
        "P TP4/DCP4 -> D TP4/DCP4",
        "P TP4/DCP1 -> D TP4/DCP4",
        "P TP4/DCP4 -> D TP4/DCP1",
        "P TP2/DCP2 -> D TP4/DCP4",
        "P TP2/DCP1 -> D TP4/DCP4",
    )
]
"""Those that others have published figures of."""
MORE = [
    ServerPair.parse(text)
    for text in (
        "P TP8/DCP8 -> D TP4/DCP1",
        "P TP4/DCP1 -> D TP8/DCP8",
        "P TP4/DCP4 -> D TP6/DCP6",
        "P TP4/DCP4 -> D TP6/DCP3",
        "P TP4/DCP2 -> D TP4/DCP4",
        "P TP4/DCP4 -> D TP4/DCP2",
        "P TP2/DCP2/BLOCK16 -> D TP2/DCP2/BLOCK64",
        "P TP4/DCP4/INTERLEAVE1 -> D TP4/DCP4/INTERLEAVE64",
        "P TP4/DCP4/SHARDS2 -> D TP4/DCP4/SHARDS4",
    )
]
"""Sizes that do not divide one another, parts of a mesh, and everything else that may differ."""
