"""Python source under permissive licences: the standard library and the packages that are installed here.

It reads metadata and text files; tokens and models are other modules.
"""

from __future__ import annotations

import hashlib
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

MIN_CHARACTERS, MAX_CHARACTERS = 400, 150_000
_PERMISSIVE = {
    "0BSD", "APACHE-2.0", "APACHE-2.0 WITH LLVM-EXCEPTION", "BSD-1-CLAUSE", "BSD-2-CLAUSE", "BSD-3-CLAUSE", "BSL-1.0",
    "CC0-1.0", "ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "PYTHON-2.0", "PYTHON-2.0.1", "UNLICENSE", "ZLIB",
}  # fmt: skip
_CLASSIFIERS = re.compile(
    r"License :: OSI Approved( :: (MIT|MIT No Attribution|BSD|Apache Software|Python Software Foundation|ISC)\b.*)?"
)
# What people write into the free field `License` when they mean one of the above.
_NAMES = re.compile(
    r"(new |modified |the |\d-clause |simplified )*"
    r"(mit|(\d-clause )?bsd([ -]?\d-clause)?|apache( software)?([ ,-]*(license )?(version )?v?2(\.0)?)?|psf(l|-2\.0)?|"
    r"isc|python software foundation)( licen[sc]e)?",
    re.IGNORECASE,
)
# Folders of others' code, which the package's own metadata does not speak of.
_VENDORED = {"_vendor", "_vendored", "vendor", "vendored", "extern", "externals", "third_party"}
_COPYLEFT = re.compile(r"GNU (Lesser |Affero )?General Public|Mozilla Public|\b(A|L)?GPL", re.IGNORECASE)
# Shorter lines, as `return self`, say nothing about where a file comes from.
_TELLING_LINE = 24


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    licence: str


@dataclass(frozen=True)
class Document:
    package: str
    path: str
    text: str


def permissive_licence(metadata: Iterable[tuple[str, str]]) -> str | None:
    """The licence that a package's metadata states, where all of it is permissive; None otherwise."""
    fields: dict[str, list[str]] = {}
    for key, value in metadata:
        fields.setdefault(key.lower(), []).append(value.strip())
    expression = next(iter(fields.get("license-expression", [])), "")
    if expression:
        return expression if _expression_is_permissive(expression) else None
    classifiers = [each for each in fields.get("classifier", []) if each.startswith("License ::")]
    named = [each.rpartition(" :: ")[2] for each in classifiers if each != "License :: OSI Approved"]
    if named:
        return ", ".join(named) if all(_CLASSIFIERS.fullmatch(each) for each in classifiers) else None
    words = next(iter(fields.get("license", [])), "")
    if _expression_is_permissive(words) or _NAMES.fullmatch(words):
        return words
    return None


def _expression_is_permissive(expression: str) -> bool:
    """Return whether every licence of an SPDX expression is permissive; of alternatives (`OR`), one suffices."""
    plain = expression.replace("(", " ").replace(")", " ")
    if " OR " in plain and " AND " in plain:
        plain = plain.replace(" OR ", " AND ")
    join = any if " OR " in plain else all
    return join(each.strip().upper() in _PERMISSIVE for each in re.split(r" (?:AND|OR) ", plain))


def installed() -> Iterator[tuple[Package, list[tuple[str, Path]]]]:
    """The standard library, then every package that states a permissive licence: (name in the package, file)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    inside = (path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.relative_to(root).parts)
    version = ".".join(map(str, sys.version_info[:3]))
    yield Package("python", version, "PSF-2.0"), [(path.relative_to(root).as_posix(), path) for path in inside]
    found = {each.name.lower(): each for each in distributions() if each.name}
    for name in sorted(found):
        licence = permissive_licence(_pairs(found[name]))
        if licence is not None:
            yield Package(name, found[name].version, licence), list(_sources(found[name]))


def in_folder(folder: Path) -> Iterator[tuple[Package, list[tuple[str, Path]]]]:
    """The Python files of one folder, as if they were a package; its licence is its owner's to state."""
    files = [(path.relative_to(folder).as_posix(), path) for path in sorted(folder.rglob("*.py"))]
    yield Package(folder.resolve().name, "", "as stated by its owner"), files


def _pairs(distribution: Distribution) -> list[tuple[str, str]]:
    metadata = distribution.metadata
    return [(key, value) for key in sorted(set(metadata)) for value in metadata.get_all(key) or []]


def _sources(distribution: Distribution) -> Iterator[tuple[str, Path]]:
    for file in sorted(distribution.files or (), key=str):
        if file.suffix == ".py" and ".." not in file.parts and not _VENDORED & set(file.parts):
            yield file.as_posix(), Path(str(distribution.locate_file(file)))


def read_documents(sources: Iterable[tuple[Package, list[tuple[str, Path]]]]) -> Iterator[tuple[Package, Document]]:
    """The files of a fitting size, in UTF-8, that do not name a copyleft licence."""
    for package, files in sources:
        for name, path in files:
            try:
                if path.stat().st_size > 4 * MAX_CHARACTERS:
                    continue
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS and not _COPYLEFT.search(text[:3000]):
                yield package, Document(package.name, name, text)


def is_held_out(document: Document, one_in: int) -> bool:
    """Decided by the file's place alone, so that another version of a package keeps the same split."""
    digest = hashlib.sha256(f"{document.package}/{document.path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0


class Seen:
    """Which telling lines were seen, to leave out files that are mostly copies of others."""

    def __init__(self) -> None:
        self._lines: set[int] = set()

    def share(self, text: str) -> float:
        """Which part of the telling lines was seen."""
        lines = self._telling(text)
        return len(lines & self._lines) / max(1, len(lines))

    def add(self, text: str) -> None:
        self._lines |= self._telling(text)

    @staticmethod
    def _telling(text: str) -> set[int]:
        stripped = (line.strip() for line in text.splitlines())
        return {hash(line) for line in stripped if len(line) >= _TELLING_LINE and not line.startswith("#")}
