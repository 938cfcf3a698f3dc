"""The page of faults names tests that there are, and leaves out none of the 40."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "disaggregation-faults.md").read_text()


def test_every_number_has_a_row():
    rows = re.findall(r"^\| (\d+) \|.*\|.*\S.*\|$", PAGE, re.MULTILINE)
    assert rows == [str(number) for number in range(1, 41)]


def test_every_test_that_is_named_is_there():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 40
    missing = [(file, name) for file, name in named if f"def {name}(" not in (TESTS / file).read_text()]
    assert missing == []
