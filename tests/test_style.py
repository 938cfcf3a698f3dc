"""Formatting, lint and types, by the tools that pyproject.toml configures and the extra `test` installs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "command",
    ["ruff format --check --diff .", "ruff check .", "mypy"],
    ids=["ruff format", "ruff check", "mypy"],
)
def test_the_tool_has_nothing_to_say(command):
    done = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"{command}\n{done.stdout}{done.stderr}", pytrace=False)
