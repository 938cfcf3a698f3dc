"""The shape of the source: which package may import which, how long a file may be, what no text may name."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "glm_dcp_jax"
LAYERS = "config environment progress cache kernels parallel model transfer engine demo serve plan convert chat".split()
"""Lowest first: a package imports itself and what stands before it."""
FREE = {"_version"}

MAX_LINES = 400
FOLDERS = (PACKAGE, "tests", "scripts", "docs", ".ci")
TEXT_SUFFIXES = {"", ".cfg", ".ini", ".jinja", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.~}\)])/(?:home|root|mnt|Users|work|opt)/\w"),
    "a package index": re.compile(r"\bpypi\.|pythonhosted\.|\bindex.url\b|/simple[/]", re.IGNORECASE),
}
NO_JAX = (
    PACKAGE,
    "config",
    "environment",
    "progress",
    "cache.placement",
    "cache.allocator",
    "cache.prefix_cache",
)


def texts(root: Path) -> Iterator[Path]:
    """The checkout's files that a person reads, without what tools keep in it (.venv, .cache, __pycache__)."""
    yield from (path for path in sorted(root.iterdir()) if path.is_file() and path.suffix in TEXT_SUFFIXES)
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            kept = any(part[0] in "._" for part in path.relative_to(root / folder).parts[:-1])
            if path.is_file() and path.suffix in TEXT_SUFFIXES and not kept:
                yield path


def imported(path: Path, module: list[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import of the package in a file, wherever it stands.

    module: the file's own name, which relative imports start from.
    """
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = module[: len(module) - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == PACKAGE)


def import_violations(root: Path) -> list[str]:
    """Imports that go up, or through the top of the package, in `root`/glm_dcp_jax."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        if parts == [PACKAGE, "__init__"]:
            continue  # exports LLM lazily
        layer = parts[1]
        if layer not in LAYERS and layer not in FREE:
            found.append(f"{path}: {layer} is none of the packages {', '.join(LAYERS)}")
            continue
        for line, name in imported(path, parts):
            target = name.split(".")[1] if "." in name else ""
            if target in FREE or target == layer:
                continue
            if target not in LAYERS:
                found.append(f"{path}:{line}: import {name} from its own package, not from the top")
            elif layer in FREE or LAYERS.index(target) > LAYERS.index(layer):
                found.append(f"{path}:{line}: {layer} must not import {target}, which stands above it")
    return found


def forbidden_words(root: Path) -> list[str]:
    """Lines of `root`'s texts that name what no text may name."""
    return [
        f"{path}:{number}: {what}: {line.strip()}"
        for path in texts(root)
        if path.resolve() != Path(__file__).resolve()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for what, pattern in FORBIDDEN.items()
        if pattern.search(line)
    ]


def long_files(root: Path) -> list[str]:
    """Python files of more than MAX_LINES lines."""
    counts = ((path, len(path.read_text().splitlines())) for path in texts(root) if path.suffix == ".py")
    return [f"{path}: {count} lines" for path, count in counts if count > MAX_LINES]


def test_packages_import_only_what_stands_before_them():
    assert import_violations(ROOT) == []


def test_files_are_short():
    assert long_files(ROOT) == []


def test_no_text_names_a_machine_or_a_package_index():
    assert forbidden_words(ROOT) == []


@pytest.fixture
def planted(tmp_path: Path):
    """Write one file into an otherwise empty checkout, and return the checkout."""

    def plant(name: str, content: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return tmp_path

    return plant


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("cache/pools.py", "import glm_dcp_jax.engine", "cache must not import engine"),
        ("cache/pools.py", "from glm_dcp_jax.engine.llm import LLM", "cache must not import engine"),
        ("cache/pools.py", "from glm_dcp_jax import model", "cache must not import model"),
        ("cache/pools.py", "from ..model import network", "cache must not import model"),
        ("cache/pools.py", "def late():\n    import glm_dcp_jax.serve", "cache must not import serve"),
        ("serve/app.py", "from glm_dcp_jax import LLM", "import glm_dcp_jax.LLM from its own package"),
        ("config/__init__.py", "from ..environment import prepare", "config must not import environment"),
        ("_version.py", "import glm_dcp_jax.config", "_version must not import config"),
        ("helpers/text.py", "", "helpers is none of the packages"),
    ],
)
def test_an_import_that_goes_up_is_found(planted, file, line, complaint):
    (violation,) = import_violations(planted(f"{PACKAGE}/{file}", line))
    assert complaint in violation


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("engine/llm.py", "from glm_dcp_jax.cache import pools"),
        ("engine/llm.py", "from . import runner"),
        ("engine/llm.py", "from ..model import network"),
        ("serve/app.py", "from glm_dcp_jax._version import __version__"),
        ("cache/pools.py", "import jax.numpy as engine"),
    ],
)
def test_an_import_that_goes_down_is_fine(planted, file, line):
    assert import_violations(planted(f"{PACKAGE}/{file}", line)) == []


@pytest.mark.parametrize("root", ["home", "root", "work"])
def test_a_machine_path_is_found_and_a_url_path_is_not(planted, root):
    assert forbidden_words(planted("docs/a.md", f"see /{root}/me/model")) != []
    assert forbidden_words(planted("docs/a.md", f"GET http://127.0.0.1/v1/{root}/me, ./{root}/me")) == []


def test_a_package_index_is_found(planted):
    assert (
        forbidden_words(planted("scripts/install", "pip install --index" + "-url https://example.org")) != []
    )


def test_a_long_file_is_found(planted):
    assert long_files(planted("tests/a.py", "\n" * MAX_LINES)) == []
    assert long_files(planted("tests/a.py", "\n" * (MAX_LINES + 1))) != []


def loads_jax(module: str, *before: str) -> bool:
    code = "\n".join([*before, f"import {module}, sys", "print('jax' in sys.modules)"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


@pytest.mark.parametrize("name", NO_JAX)
def test_settings_can_be_made_before_jax_is_imported(name):
    assert not loads_jax(name if name == PACKAGE else f"{PACKAGE}.{name}")


def test_a_jax_that_is_imported_is_noticed():
    assert loads_jax(PACKAGE, "import jax")
