"""Write the native library's tables of Unicode's normal form C: `python tests/helpers/unicode_normal_form.py`.

The decompositions are those of the `tokenizers` library, which knows another version of Unicode than Python.
"""

from __future__ import annotations

import unicodedata
from pathlib import Path

from tokenizers import normalizers
from unicode_classes import code_points

TABLE = Path(__file__).parents[2] / "edgekit/apps/native/src/normal_form_table.cpp"
_HEAD = """// Written by tests/helpers/unicode_normal_form.py; do not edit.
#include "normal_form.h"

namespace edgekit {
"""
_HANGUL = range(0xAC00, 0xD7A4)  # by arithmetic
_LAST_CLASS = "\u0345"  # of the highest combining class


def decompositions() -> dict[int, list[int]]:
    """The whole decomposition of each code point that has one."""
    decompose = normalizers.NFD().normalize_str
    found = {point: decompose(chr(point)) for point in code_points() if point not in _HANGUL}
    return {point: [ord(each) for each in text] for point, text in found.items() if text != chr(point)}


def compositions(decomposed: dict[int, list[int]]) -> dict[tuple[int, int], int]:
    """The code point that each pair becomes."""
    compose = normalizers.NFC().normalize_str
    found = {}
    for point, parts in decomposed.items():
        first = compose("".join(map(chr, parts[:-1])))
        if len(parts) > 1 and compose(chr(point)) == chr(point) and len(first) == 1:
            found[ord(first), parts[-1]] = point
    return found


def combining_classes() -> dict[int, int]:
    """The class of each code point that has one: marks are ordered by it."""
    decompose = normalizers.NFD().normalize_str
    named = {point: unicodedata.combining(chr(point)) for point in code_points()}
    return {
        point: number
        for point, number in named.items()
        if number and (chr(point) == _LAST_CLASS or decompose(_LAST_CLASS + chr(point))[-1] == _LAST_CLASS)
    }


def table() -> str:
    """The tables as C++."""
    decomposed = decompositions()
    assert max(map(len, decomposed.values())) <= 4
    lines = [_HEAD, "const Decomposition kDecompositions[] = {"]
    each = [f"{{{point:#x}, {{{', '.join(map(hex, parts))}}}}}" for point, parts in sorted(decomposed.items())]
    lines += _in_rows(each, 3)
    lines += ["};\nconst size_t kDecompositionCount = std::size(kDecompositions);\n"]
    lines += ["const Composition kCompositions[] = {"]
    each = [
        f"{{{first:#x}, {second:#x}, {made:#x}}}" for (first, second), made in sorted(compositions(decomposed).items())
    ]
    lines += _in_rows(each, 4)
    lines += ["};\nconst size_t kCompositionCount = std::size(kCompositions);\n"]
    lines += ["const CombiningClass kCombiningClasses[] = {"]
    ranges: list[list[int]] = []
    for point, number in sorted(combining_classes().items()):
        if ranges and ranges[-1][1] == point - 1 and ranges[-1][2] == number:
            ranges[-1][1] = point
        else:
            ranges.append([point, point, number])
    lines += _in_rows([f"{{{first:#x}, {last:#x}, {number}}}" for first, last, number in ranges], 4)
    lines += ["};\nconst size_t kCombiningClassCount = std::size(kCombiningClasses);\n"]
    return "\n".join([*lines, "}  // namespace edgekit\n"])


def _in_rows(each: list[str], width: int) -> list[str]:
    return [f"    {', '.join(each[start : start + width])}," for start in range(0, len(each), width)]


if __name__ == "__main__":
    TABLE.write_text(table())
