"""The documents say what the code says: flags, dimension letters, links."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_flags_are_documented_as_they_are():
    script = runpy.run_path(str(ROOT / "scripts" / "make_flags_doc.py"))
    written = (ROOT / "docs" / "flags.md").read_text()
    assert written == script["document"](), (
        "docs/flags.md is out of date: run python scripts/make_flags_doc.py"
    )


def test_readme_names_only_flags_that_exist():
    known = set(re.findall(r"`(--?[\w-]+)`", (ROOT / "docs" / "flags.md").read_text()))
    named = set(re.findall(r"(?<=[\s`])--[\w-]+", (ROOT / "README.md").read_text()))
    assert "--tensor-parallel-size" in named
    assert named - known - {"--help", "--platform"} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


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
