"""Which distributions are installed, and in which versions. Imports none of them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

# Unless told otherwise before it is imported, onnxruntime reports its use over the network, under an id of the machine.
UNREPORTED = {"ORT_DISABLE_TELEMETRY": "1"}


def version_of(distribution: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def versions_of(distributions: Iterable[str]) -> dict[str, str]:
    """Those that are installed."""
    found = {name: version_of(name) for name in distributions}
    return {name: text for name, text in found.items() if text is not None}
