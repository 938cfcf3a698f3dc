"""SHA-256 sums of a checkpoint's files: finding them, and comparing the files with them.

safetensors files carry none. They are taken from `SHA256SUMS` (as sha256sum writes it), from `FILE.sha256`, and from
the Hugging Face cache, whose large files are links to blobs that are named by their sums.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from glm_dcp_jax.model.safetensors_reader import CheckpointError
from glm_dcp_jax.progress import progress

SUMS_NAME = "SHA256SUMS"
READERS = 8
_CHUNK = 4 << 20
_LINE = re.compile(r"^\\?([0-9a-fA-F]{64})(?:\s[ *]?(.+))?$")


def verify_checksums(directory: Path, files: Iterable[Path]) -> None:
    """Read these files of a checkpoint whole, and compare them with their sums.

    Raises CheckpointError that names each file which differs, or for which there is no sum.
    """
    files = sorted(set(files))
    sums = _sums(directory, files)
    without = [file.name for file in files if file not in sums]
    if without:
        named = ", ".join(without[:5]) + (" and more" if len(without) > 5 else "")
        raise CheckpointError(
            f"{directory} has no SHA-256 sum of {named} to compare with; put a {SUMS_NAME} there (sha256sum "
            f"*.safetensors > {SUMS_NAME}, where the files are known to be right), or leave --verify-checksums out"
        )
    total = sum(file.stat().st_size for file in files)
    with (
        progress("Verifying checksums", total, "B") as bar,
        ThreadPoolExecutor(READERS, "checksums") as readers,
    ):
        found = dict(zip(files, readers.map(lambda file: _sum_of(file, bar), files), strict=True))
    wrong = [
        f"{file} has {found[file]}, should have {sums[file]}" for file in files if found[file] != sums[file]
    ]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} of {len(files)} files do not have their SHA-256 sum; download them again:\n"
            + "\n".join(f"  {line}" for line in wrong)
        )


def _sums(directory: Path, files: Iterable[Path]) -> dict[Path, str]:
    """The sum that each file should have, as far as it is known. Raises CheckpointError where two are known."""
    listed = _listed(directory / SUMS_NAME)
    sums: dict[Path, str] = {}
    contradictions = []
    for file in files:
        beside, link = file.with_name(f"{file.name}.sha256"), file.resolve()
        own = _listed(beside)
        known = {
            f"by {SUMS_NAME}": _sum_for(listed, file.relative_to(directory)),
            f"by {beside.name}": _sum_for(own, Path(file.name)) or own.get(Path()),
            "by the name of the file that it links to": link.name if _is_blob(file, link) else None,
        }
        by_sum = {found: source for source, found in known.items() if found}
        if len(by_sum) > 1:
            contradictions.append(
                f"  {file}: " + ", ".join(f"{found} {source}" for found, source in by_sum.items())
            )
        elif by_sum:
            (sums[file],) = by_sum
    if contradictions:
        raise CheckpointError(
            f"what {len(contradictions)} files should have for a SHA-256 sum is said in two ways; keep the sums of the "
            "publisher:\n" + "\n".join(contradictions)
        )
    return sums


def _is_blob(file: Path, link: Path) -> bool:
    return file.is_symlink() and re.fullmatch("[0-9a-f]{64}", link.name) is not None


def _sum_for(sums: Mapping[Path, str], file: Path) -> str | None:
    """By its path; else by its name, where all sums of files of that name are one: the list may be of another place."""
    named = {found for path, found in sums.items() if path.name == file.name}
    return sums.get(file) or (named.pop() if len(named) == 1 else None)


def _listed(path: Path) -> dict[Path, str]:
    """Sums by file, as it is named there; one that stands alone is under Path(). Raises CheckpointError for a line that
    is none, and where a file has two sums."""
    if not path.is_file():
        return {}
    sums: dict[Path, str] = {}
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.match(text)
        if match is None:
            raise CheckpointError(
                f"{path}: line {number} is not a SHA-256 sum and a file name: {text[:80]!r}"
            )
        file, found = Path(match[2] or ""), match[1].lower()
        if sums.setdefault(file, found) != found:
            raise CheckpointError(
                f"{path}: line {number} has another SHA-256 sum of {match[2] or 'the file'} than a line before; keep "
                "that of the publisher"
            )
    return sums


def _sum_of(file: Path, bar: tqdm) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()
