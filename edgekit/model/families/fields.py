"""Reads one JSON object of a model's config field by field; errors name file, field, value and fix.

Families decide which fields they need and which values are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeVar

from edgekit.errors import InvalidInput, Unsupported, quote_short

MAX_LIST = 1 << 14
Value = TypeVar("Value")


class Fields:
    """The fields of one JSON object; it records which were read. Null counts as absent, except in `has`."""

    def __init__(self, values: dict[str, Any], where: str, inside: str = "") -> None:
        self._values, self._where, self._inside = values, where, inside
        self._read: set[str] = set()
        self._sections: dict[str, Fields] = {}

    def with_values(self, values: dict[str, Any]) -> Fields:
        """Return fields with other values; errors name the same file, and the record of read fields is shared."""
        other = Fields(values, self._where, self._inside)
        other._read, other._sections = self._read, self._sections
        return other

    def changed(self, **values: Any) -> Fields:
        """Return these fields with some values replaced."""
        return self.with_values({**self._values, **values})

    def unread(self) -> Iterator[tuple[Fields, str]]:
        """Yield (object, name) of each unread field of this object and its sections."""
        for name, value in self._values.items():
            if name in self._sections:
                yield from self._sections[name].unread()
            elif value is not None and name not in self._read:
                yield self, name

    def has(self, field: str) -> bool:
        """Return True if the field is present, even as null."""
        self._read.add(field)
        return field in self._values

    def get(self, field: str) -> Any:
        """Return the unchecked value."""
        self._read.add(field)
        return self._values.get(field)

    def refusal(self, field: str, fix: str) -> InvalidInput:
        """Return the error for a wrong value; `fix` follows the value in the message."""
        return InvalidInput(f"{self._path(field)}: {quote_short(self.get(field))} {fix}")

    def unsupported(self, field: str, fix: str) -> Unsupported:
        """Return the error for a value that is understood but not supported."""
        return Unsupported(f"{self._path(field)}: {quote_short(self.get(field))} {fix}")

    def missing(self, field: str) -> InvalidInput:
        """Return the error for an absent field."""
        return InvalidInput(f"{self._path(field)}: is missing; is this the whole config.json of a language model?")

    def _path(self, field: str) -> str:
        """Return the file and the field, whose name may be anything, for a message."""
        return f"{self._where}: {self._inside}{_shown(field)}"

    def _required(self, field: str, value: Value | None, default: Value | None = None) -> Value:
        value = default if value is None else value
        if value is None:
            raise self.missing(field)
        return value

    def count(self, field: str, most: int, default: int | None = None, least: int = 1) -> int:
        """Return an integer from `least` to `most`. Without a `default` the field is required."""
        return self._required(field, self.maybe_count(field, most, least), default)

    def maybe_count(self, field: str, most: int, least: int = 1) -> int | None:
        value = self.get(field)
        if value is None:
            return None
        if not _is_whole(value) or not least <= value <= most:
            raise self.refusal(field, f"is not a whole number from {least} to {most}; correct the file")
        return int(value)

    def number(self, field: str, least: float, most: float, default: float | None = None) -> float:
        """Return a finite number between two bounds. Without a `default` the field is required."""
        return self._required(field, self.maybe_number(field, least, most), default)

    def maybe_number(self, field: str, least: float, most: float) -> float | None:
        value = self.get(field)
        if value is None:
            return None
        if not _is_number(value) or not least <= value <= most:
            raise self.refusal(field, f"is not a number from {least:g} to {most:g}; correct the file")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(field, "is neither true nor false; correct the file")
        return value

    def text(self, field: str, default: str | None = None) -> str:
        value = self._required(field, self.get(field), default)
        if not isinstance(value, str):
            raise self.refusal(field, "is not a text; correct the file")
        return value

    def section(self, field: str) -> Fields | None:
        """Return a nested object; None if it is absent, null or empty."""
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refusal(field, "is not an object; correct the file")
        if not value:
            return None
        known = self._sections.get(field)
        if known is None or known._values is not value:
            known = self._sections[field] = Fields(value, self._where, f"{self._inside}{_shown(field)}.")
        return known

    def names(self) -> list[str]:
        """Return the names of all fields."""
        return list(self._values)

    def numbers(self, field: str, count: int, least: float, most: float) -> tuple[float, ...]:
        """Return exactly `count` numbers."""
        value = self._required(field, self.get(field))
        if not isinstance(value, list) or len(value) != count:
            length = f"has {len(value)} values" if isinstance(value, list) else "is not a list"
            raise self.refusal(field, f"{length} where {count} numbers are needed; correct the file")
        for item in value:
            if not _is_number(item) or not least <= item <= most:
                raise self.refusal(
                    field,
                    f"holds {quote_short(item)}, which is not a number from {least:g} to {most:g}; correct the file",
                )
        return tuple(float(item) for item in value)

    def counts(self, field: str, most: int, least: int = 0) -> tuple[int, ...] | None:
        """Return a list of integers between two bounds; None if the field is absent."""
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > MAX_LIST:
            raise self.refusal(field, "is not a list of whole numbers; correct the file")
        for item in value:
            if not _is_whole(item) or not least <= item <= most:
                raise self.refusal(
                    field,
                    f"holds {quote_short(item)}, which is not a whole number from {least} to {most}; correct the file",
                )
        return tuple(value)

    def counts_by_layer(self, field: str, layers: int, most: int, least: int = 0) -> tuple[int, ...] | None:
        """Return one integer per layer, ignoring further ones; None if the field is absent."""
        values = self.counts(field, most, least)
        if values is not None and len(values) < layers:
            raise self.refusal(
                field, f"has {len(values)} values where {layers} are needed, one a layer; correct the file"
            )
        return None if values is None else values[:layers]

    def choices(self, field: str, count: int, allowed: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return exactly `count` words of `allowed`; None if the field is absent."""
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count:
            length = f"has {len(value)} values" if isinstance(value, list) else "is not a list"
            raise self.refusal(field, f"{length} where {count} are needed, one a layer; correct the file")
        for item in value:
            if not isinstance(item, str):
                raise self.refusal(field, f"holds {quote_short(item)}, which is not a text; correct the file")
            if item not in allowed:
                raise Unsupported(
                    f"{self._path(field)}: {quote_short(item)} is a kind of layer that is not supported; supported: "
                    f"{', '.join(allowed)}"
                )
        return tuple(value)

    def token_ids(self, field: str, vocab_size: int) -> tuple[int, ...]:
        """Return the ids of a field with one id or a list, without ids outside the vocabulary."""
        value = self.get(field)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for item in ids:
            if not _is_whole(item) or not 0 <= item <= 2**31:
                raise self.refusal(field, "is not a token id or a list of them; correct the file")
        return tuple(dict.fromkeys(item for item in ids if item < vocab_size))


def _shown(name: str) -> str:
    return name if len(name) < 80 and all(c.isalnum() or c in "._-" for c in name) else quote_short(name)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))
