"""The example of docs/ahead-of-time.md runs, and prints what the page says."""

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "ahead-of-time.md"


@pytest.mark.usefixtures("cuda_compiler")
def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    exec(compile(example, str(DOCUMENT), "exec"), {})
    printed = capsys.readouterr().out
    assert re.search(rf"^Memory\(argument_bytes={(64 + 8192) * 2048 * 2},", printed, re.MULTILINE)
    assert re.search(rf"^all-reduce {64 * 8192 * 2} blocks$", printed, re.MULTILINE)
    assert re.search(r"^gemm_fusion\S* \{.*\} \{'mma': \d+\} Launch\(", printed, re.MULTILINE)
