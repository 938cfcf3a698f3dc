"""The documents say what the code says: flags, dimension letters, links, imports, examples."""

import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from glm_dcp_jax import plan

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def links_of(document: Path) -> list[str]:
    """Files that it links to, as it writes them."""
    return re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text())


def python_of(document: Path) -> str:
    """The page's only block of Python."""
    (block,) = re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    return block


def output_of(python: str, timeout: int) -> str:
    """What a program prints in a process of its own, from another directory."""
    command = [sys.executable, "-c", python]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT.parent, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_flags_are_documented_as_they_are():
    script = runpy.run_path(str(ROOT / "scripts" / "make_flags_doc.py"))
    written = (ROOT / "docs" / "flags.md").read_text()
    assert written == script["document"](), (
        "docs/flags.md is out of date: run .venv/bin/python scripts/make_flags_doc.py"
    )


def test_metrics_are_documented_as_they_are():
    script = runpy.run_path(str(ROOT / "scripts" / "make_metrics_doc.py"))
    written = (ROOT / "docs" / "metrics.md").read_text()
    assert written == script["document"](), (
        "docs/metrics.md is out of date: run .venv/bin/python scripts/make_metrics_doc.py"
    )


def test_readme_names_only_flags_that_exist():
    pages = [(ROOT / "docs" / page).read_text() for page in ("flags.md", "planner.md")]
    known = {flag for page in pages for flag in re.findall(r"`(--?[\w-]+)`", page)}
    named = set(re.findall(r"(?<=[\s`])--[\w-]+", (ROOT / "README.md").read_text()))
    assert "--tensor-parallel-size" in named
    assert named - known - {"--help", "--platform"} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    assert [link for link in links_of(document) if not (document.parent / link).exists()] == []


def test_every_page_is_linked_from_another():
    linked = {(page.parent / link).resolve() for page in DOCUMENTS for link in links_of(page)}
    assert set(DOCUMENTS) - linked == {ROOT / "README.md"}


def test_ops_are_imported_from_where_the_page_says():
    page = (ROOT / "docs" / "kernels.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \| `(glm_dcp_jax[\w.]*)` \|", page, re.MULTILINE)
    listed = {name: module for names, module in rows for name in re.findall(r"\w+", names)}
    assert all(callable(getattr(importlib.import_module(module), name)) for name, module in listed.items())
    assert set(re.findall(r"^\| `(\w+)` \| [^|]*\| [\d,]+ \|", page, re.MULTILINE)) <= set(listed)


def test_the_example_of_the_kernels_page_prints_registers(request):
    if plan.compiler_plugin() is None or request.config.getoption("--platform") == "gpu":
        pytest.skip("compiles for GPUs that are not here: needs the extra [aot], on a CPU machine")
    printed = output_of(python_of(ROOT / "docs" / "kernels.md"), 120)
    for gpu in ("1xH200", "1xRTX-PRO-6000"):
        assert re.search(rf"^{gpu} sparse_attention 25\d registers, 0 bytes spilled$", printed, re.MULTILINE)


@pytest.mark.slow
def test_the_recipe_that_compares_formats_runs_as_printed():
    printed = output_of(python_of(ROOT / "docs" / "results" / "record-formats.md"), 500).splitlines()
    assert [line.split(":")[0] for line in printed] == ["bfloat16", "fp8_ds_mla", "nvfp4_ds_mla"]
    assert printed[0] == "bfloat16: KL 0.00000, same best token 1.0000"


def test_readme_gives_the_two_commands_and_they_can_be_run():
    readme = (ROOT / "README.md").read_text()
    for command in ("scripts/serve", "scripts/test"):
        assert re.search(rf"^{command}", readme, re.MULTILINE)
        assert (ROOT / command).stat().st_mode & 0o111
        subprocess.run(["sh", "-n", ROOT / command], check=True)


def test_every_dimension_of_an_annotation_is_in_the_glossary():
    first_column = re.findall(r"^\| (`[^|]+)\|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    known = {letter for cell in first_column for letter in re.findall(r"`(\w+)`", cell)}
    unknown = {}
    for path in sorted((ROOT / "glm_dcp_jax").rglob("*.py")):
        for shape in re.findall(
            r"\b(?:Float|Int|UInt|Bool|Shaped)\w*\[\w+, \"([^\"]*)\"\]", path.read_text()
        ):
            for name in re.findall(r"[A-Za-z_]\w*", shape):
                if name not in known and not is_product(name, known):
                    unknown.setdefault(name, path.name)
    assert unknown == {}, "add these to docs/glossary.md, or use its letters"


def is_product(name: str, known: set[str]) -> bool:
    """Capital letters side by side, each of them known, are their product: WH, PB."""
    return name.isupper() and set(name) <= known
