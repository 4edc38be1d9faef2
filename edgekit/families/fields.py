"""Reads one JSON object of a model's config field by field; a complaint names file, field, value and cure.

It knows nothing of models: families say which fields they need and which values make sense.
"""

from __future__ import annotations

import math
from typing import Any

from edgekit.errors import InvalidInput, Unsupported, clip

MAX_LIST = 1 << 14


class Fields:
    """The fields of one object. A field that is null counts as absent, except to `has`."""

    def __init__(self, values: dict[str, Any], where: str, inside: str = "") -> None:
        self._values, self._where, self._inside = values, where, inside

    def beside(self, values: dict[str, Any]) -> Fields:
        """Other values that stand at the same place, for complaints about them."""
        return Fields(values, self._where, self._inside)

    def has(self, field: str) -> bool:
        """Whether the field is written at all, even as null."""
        return field in self._values

    def get(self, field: str) -> Any:
        """The value as it stands, unchecked."""
        return self._values.get(field)

    def refusal(self, field: str, cure: str) -> InvalidInput:
        """The error that says what is wrong with a field that stands here."""
        return InvalidInput(f"{self._where}: {self._inside}{field}: {clip(self.get(field))} {cure}")

    def unsupported(self, field: str, cure: str) -> Unsupported:
        """The error for a value that is understood and refused."""
        return Unsupported(f"{self._where}: {self._inside}{field}: {clip(self.get(field))} {cure}")

    def missing(self, field: str) -> InvalidInput:
        return InvalidInput(
            f"{self._where}: {self._inside}{field}: is missing; is this the whole config.json of a language model?"
        )

    def count(self, field: str, most: int, default: int | None = None, least: int = 1) -> int:
        """A whole number between two bounds."""
        found = self.maybe_count(field, most, least)
        if found is not None:
            return found
        if default is None:
            raise self.missing(field)
        return default

    def maybe_count(self, field: str, most: int, least: int = 1) -> int | None:
        value = self.get(field)
        if value is None:
            return None
        if not _is_whole(value) or not least <= value <= most:
            raise self.refusal(field, f"is not a whole number from {least} to {most}; correct the file")
        return int(value)

    def number(self, field: str, least: float, most: float, default: float | None = None) -> float:
        """A finite number between two bounds."""
        found = self.maybe_number(field, least, most)
        if found is not None:
            return found
        if default is None:
            raise self.missing(field)
        return default

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
        value = self.get(field)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.missing(field)
        if not isinstance(value, str):
            raise self.refusal(field, "is not a text; correct the file")
        return value

    def section(self, field: str) -> Fields | None:
        """An object that stands inside; None where it is absent, null or empty."""
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refusal(field, "is not an object; correct the file")
        return Fields(value, self._where, f"{self._inside}{field}.") if value else None

    def names(self) -> list[str]:
        """The fields that are written."""
        return list(self._values)

    def numbers(self, field: str, count: int, least: float, most: float) -> tuple[float, ...]:
        """Exactly `count` numbers."""
        value = self.get(field)
        if value is None:
            raise self.missing(field)
        if not isinstance(value, list) or len(value) != count:
            length = f"has {len(value)} values" if isinstance(value, list) else "is not a list"
            raise self.refusal(field, f"{length} where {count} numbers are needed; correct the file")
        for item in value:
            if not _is_number(item) or not least <= item <= most:
                raise self.refusal(
                    field, f"holds {clip(item)}, which is not a number from {least:g} to {most:g}; correct the file"
                )
        return tuple(float(item) for item in value)

    def counts(self, field: str, most: int, least: int = 0) -> tuple[int, ...] | None:
        """A list of whole numbers between two bounds; None where the field is absent."""
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > MAX_LIST:
            raise self.refusal(field, "is not a list of whole numbers; correct the file")
        for item in value:
            if not _is_whole(item) or not least <= item <= most:
                raise self.refusal(
                    field, f"holds {clip(item)}, which is not a whole number from {least} to {most}; correct the file"
                )
        return tuple(value)

    def counts_by_layer(self, field: str, layers: int, most: int, least: int = 0) -> tuple[int, ...] | None:
        """One whole number for each layer, further ones left out; None where the field is absent."""
        found = self.counts(field, most, least)
        if found is not None and len(found) < layers:
            raise self.refusal(
                field, f"has {len(found)} values where {layers} are needed, one a layer; correct the file"
            )
        return None if found is None else found[:layers]

    def choices(self, field: str, count: int, allowed: tuple[str, ...]) -> tuple[str, ...] | None:
        """Exactly `count` words out of `allowed`; None where the field is absent."""
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count:
            length = f"has {len(value)} values" if isinstance(value, list) else "is not a list"
            raise self.refusal(field, f"{length} where {count} are needed, one a layer; correct the file")
        for item in value:
            if not isinstance(item, str):
                raise self.refusal(field, f"holds {clip(item)}, which is not a text; correct the file")
            if item not in allowed:
                raise Unsupported(
                    f"{self._where}: {self._inside}{field}: {clip(item)} is a kind of layer that is not supported; "
                    f"supported: {', '.join(allowed)}"
                )
        return tuple(value)

    def token_ids(self, field: str, vocab_size: int) -> tuple[int, ...]:
        """One id or a list of ids; those outside the vocabulary are left out, as no model can emit them."""
        value = self.get(field)
        if value is None:
            return ()
        found = value if isinstance(value, list) else [value]
        for item in found:
            if not _is_whole(item) or not 0 <= item <= 2**31:
                raise self.refusal(field, "is not a token id or a list of them; correct the file")
        return tuple(dict.fromkeys(item for item in found if item < vocab_size))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))
