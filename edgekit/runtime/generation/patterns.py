r"""Rewrite regular expressions so that \d, \w and \s mean what they mean in ECMA-262, as in JSON Schema.

llguidance reads patterns as Rust's regex crate does, where \d is a digit of any script. The escapes are replaced by
explicit classes. Word boundaries are refused, because llguidance has none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from edgekit.errors import InvalidInput, quote_short

WORD = "0-9A-Za-z_"  # members of classes, as ECMA-262 means \w and \s
BLANK = r"\t-\r\x20\xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_SETS = {"d": "0-9", "w": WORD, "s": BLANK}
_UNICODE_SETS = {  # under the flag (?u)
    "d": r"\p{Nd}",
    "w": r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}",
    "s": r"\p{White_Space}",
}
_ESCAPE = r"\\c[A-Za-z]|\\0(?![0-9])|\\.|"
_OUTSIDE = re.compile(_ESCAPE + r"\(\?(?P<flags>[A-Za-z-]*)[:)]|.", re.DOTALL)
_NAMED = "alnum|alpha|ascii|blank|cntrl|digit|graph|lower|print|punct|space|upper|word|xdigit"
_INSIDE = re.compile(_ESCAPE + rf"\[:\^?(?:{_NAMED}):\]|.", re.DOTALL)
# Keywords of JSON Schema whose keys are names, and those whose values are data.
_NAMES = frozenset({"properties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_DATA = frozenset({"const", "enum", "default", "example", "examples"})


def as_ecma(pattern: str) -> str:
    r"""Return `pattern` with the escapes of ECMA-262 as explicit classes. Raises `InvalidInput` for \b and \B."""
    return _Rewriting(pattern).result()


def schema_as_ecma(schema: Any) -> Any:
    """Apply `as_ecma` to every `pattern` and every key of `patternProperties` of a JSON schema."""
    if isinstance(schema, list):
        return [schema_as_ecma(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    rewritten: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            rewritten[key] = as_ecma(value)
        elif key == "patternProperties" and isinstance(value, dict):
            rewritten[key] = {as_ecma(name): schema_as_ecma(part) for name, part in value.items()}
            if len(rewritten[key]) < len(value):
                raise InvalidInput(f"patternProperties: two patterns mean the same ({quote_short(', '.join(value))})")
        elif key in _NAMES and isinstance(value, dict):
            rewritten[key] = {name: schema_as_ecma(part) for name, part in value.items()}
        else:
            rewritten[key] = value if key in _DATA else schema_as_ecma(value)
    return rewritten


def has_open_pattern(schema: Any) -> bool:
    """Return whether a `pattern` of the schema lacks ^ or $, so that other text may surround what it describes."""
    if isinstance(schema, list):
        return any(map(has_open_pattern, schema))
    if not isinstance(schema, dict):
        return False
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and not (pattern.startswith("^") and pattern.endswith("$")):
        return True
    return any(has_open_pattern(value) for key, value in schema.items() if key not in _DATA)


@dataclass(frozen=True)
class _Flags:
    """The flags inside a group: its own and its enclosing groups' flags."""

    unicode: bool | None = None  # None: not given
    verbose: bool = False

    def changed_by(self, flags: str) -> _Flags:
        given, _, taken = flags.partition("-")
        unicode = True if "u" in given else False if "u" in taken else self.unicode
        return _Flags(unicode, "x" in given or (self.verbose and "x" not in taken))


class _Rewriting:
    """One pass over a pattern, token by token, as Rust's regex crate splits it."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._written: list[str] = []
        self._groups = [_Flags()]
        self._open = 0  # open brackets
        self._opening = ""  # the start of a class so far; directly after it, a closing bracket is a member
        self._last = self._before = ""  # the last two members
        self._last_at = 0

    def result(self) -> str:
        place = 0
        while place < len(self._pattern):
            match = (_INSIDE if self._open else _OUTSIDE).match(self._pattern, place)
            assert match is not None  # any single character matches
            token = match[0]
            place = match.end()
            if self._groups[-1].verbose and (token == "#" or token.isspace()):
                end = self._pattern.find("\n", place) + 1 if token == "#" else place
                self._written.append(self._pattern[match.start() : end or None])
                place = end or len(self._pattern)
            elif self._open:
                self._inside(token)
            else:
                self._outside(token, match["flags"])
        return "".join(self._written)

    def _outside(self, token: str, flags: str | None) -> None:
        if flags is not None:
            changed = self._groups[-1].changed_by(flags)
            if token[-1] == ")":
                self._groups[-1] = changed
            else:
                self._groups.append(changed)
        elif token == "(":
            self._groups.append(self._groups[-1])
        elif token == ")" and len(self._groups) > 1:
            self._groups.pop()
        elif token == "[":
            self._open, self._opening, self._last = 1, token, ""
        elif token in (r"\b", r"\B"):
            raise InvalidInput(
                f"pattern {quote_short(self._pattern)}: word boundaries ({token}) are not offered; leave them out, "
                "or name the characters around the word"
            )
        self._written.append(self._meant(token))

    def _inside(self, token: str) -> None:
        meant = self._meant(token)
        if meant[0] == "[" and token[0] == "\\" and self._last == "-" != self._before:
            self._written[self._last_at] = r"\-"  # the hyphen is literal, since a class cannot end a range
        self._written.append(meant)
        if token == "^" and self._opening == "[":
            self._opening = "[^"
            return
        if token == "[":
            self._open += 1
        elif token == "]" and not self._opening:
            self._open -= 1
        self._opening = "[" if token == "[" else ""
        self._before, self._last = ("", "") if token == "[" else (self._last, token)
        self._last_at = len(self._written) - 1

    def _meant(self, token: str) -> str:
        if len(token) < 2 or token[0] != "\\":
            return token
        letter = token[1]
        unicode = self._groups[-1].unicode
        if letter.lower() in _SETS and unicode is not False:
            members = (_UNICODE_SETS if unicode else _SETS)[letter.lower()]
            return f"[{'^' if letter.isupper() else ''}{members}]"
        if letter == "c" and len(token) == 3:
            return rf"\x{ord(token[2]) % 32:02X}"
        if letter == "0":
            return r"\x00"
        return r"\x08" if letter == "b" and self._open else token
