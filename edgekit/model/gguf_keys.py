"""The metadata of one architecture in a GGUF file; errors name file, key and value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from edgekit.errors import InvalidInput, Unsupported, quote_short


class ArchitectureKeys:
    """The metadata of one architecture; each value is checked on access."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, where: str) -> None:
        self._metadata, self._prefix, self.where = metadata, f"{architecture}.", where

    def refuse_others(self, known: Sequence[str]) -> None:
        """Refuse a key of the architecture that is not among `known`."""
        for key in self._metadata:
            if key.startswith(("general.", "tokenizer.", "split.")):
                continue
            if not key.startswith(self._prefix):
                if key.startswith(("adapter.", "imatrix.", "clip.")):
                    raise Unsupported(
                        f"{self.where}: {quote_short(key)}: belongs to no language model; give the model's own file"
                    )
                continue  # notes of other tools (quantize.imatrix.*, …), which do not affect the model
            if key.removeprefix(self._prefix) not in known:
                raise Unsupported(
                    f"{self.where}: {quote_short(key)} = {quote_short(self._metadata[key])} is not known in this "
                    f"architecture, and "
                    "leaving it out could make another model of it; export from the original checkpoint"
                )

    def refusal(self, key: str, why: str) -> InvalidInput:
        """Return the error for a wrong value."""
        return InvalidInput(f"{self.where}: {self._prefix}{key}: {quote_short(self.get(key))} {why}")

    def unsupported(self, key: str, why: str) -> Unsupported:
        """Return the error for a value that is understood but not supported."""
        return Unsupported(f"{self.where}: {self._prefix}{key}: {quote_short(self.get(key))} {why}")

    def get(self, key: str) -> Any:
        """Return the unchecked value."""
        return self._metadata.get(self._prefix + key)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number; a list with one value per layer must have equal values."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise InvalidInput(f"{self.where}: {self._prefix}{key} is missing; is the file complete?")
        if hasattr(value, "tolist"):
            listed = value[:1].tolist()
            if not listed or (value != value[0]).any():
                raise self.unsupported(key, "differs from layer to layer, which is not supported")
            value = listed[0]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 31:
            raise self.refusal(key, f"is not a whole number from {least}; convert the model again")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a finite number."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.refusal(key, "is not a finite number; convert the model again")
        return float(value)

    def text(self, key: str, default: str) -> str:
        """Return a text."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refusal(key, "is not a text; convert the model again")
        return default if value is None else value
