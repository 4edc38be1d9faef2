"""Write the native library's table of Unicode classes: `python tests/helpers/unicode_classes.py`.

The classes are those of the `tokenizers` library itself, whose regular expressions and digits know different versions
of Unicode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[2] / "edgekit/apps/native/src/unicode_table.cpp"
_HEAD = """// Written by tests/helpers/unicode_classes.py; do not edit.
#include "unicode.h"

namespace edgekit {
"""
_PIECE = 2048  # code points that are split at once


def code_points() -> list[int]:
    return [point for point in range(0x110000) if not 0xD800 <= point <= 0xDFFF]


def members(splitter: Any, points: Sequence[int]) -> Iterator[int]:
    """Those of `points` that a pre-tokenizer isolates."""
    for start in range(0, len(points), _PIECE):
        piece = points[start : start + _PIECE]
        text = "\x01\x01".join(map(chr, piece))  # two, which are never a piece of one character
        alone = {found for found, _ in splitter.pre_tokenize_str(text)}
        yield from (point for point in piece if chr(point) in alone)


def ranges(points: Iterator[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for point in points:
        if found and found[-1][1] == point - 1:
            found[-1] = found[-1][0], point
        else:
            found.append((point, point))
    return found


def classes() -> dict[str, Any]:
    from tokenizers import Regex, pre_tokenizers

    return {
        "kLetters": pre_tokenizers.Split(Regex(r"\p{L}"), "isolated"),
        "kNumbers": pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
        "kSpaces": pre_tokenizers.Split(Regex(r"\s"), "isolated"),
        "kDigits": pre_tokenizers.Digits(individual_digits=True),
    }


def table() -> str:
    """The table as C++."""
    lines = [_HEAD]
    for name, splitter in classes().items():
        each = [f"{{{first:#x}, {last:#x}}}" for first, last in ranges(members(splitter, code_points()))]
        lines.append(f"const CodePoints {name} = {{")
        lines += [f"    {', '.join(each[start : start + 5])}," for start in range(0, len(each), 5)]
        lines.append("};\n")
    return "\n".join([*lines, "}  // namespace edgekit\n"])


if __name__ == "__main__":
    TABLE.write_text(table())
