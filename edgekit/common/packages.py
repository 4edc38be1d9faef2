"""Versions of installed distributions. Imports none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version

# Must be set before onnxruntime is imported: otherwise it reports its use, under an id of the machine.
UNREPORTED = {"ORT_DISABLE_TELEMETRY": "1"}

# Packages that may influence an artifact or its results.
RUNTIMES = (
    "edgekit",
    "numpy",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnx-ir",
    "mlx",
    "mlx-lm",
    "xllamacpp",
    "executorch",
    "torch",
    "torchao",
)

# Those that belong to one target; the others have a part in artifacts of all.
TARGET_PACKAGES = {
    "onnx": ("onnxruntime", "onnxruntime-gpu", "onnx-ir"),
    "mlx": ("mlx", "mlx-lm"),
    "llamacpp": ("xllamacpp",),
    "executorch": ("executorch", "torchao"),
}


def version_of(distribution: str) -> str | None:
    """Return the installed version; None if the distribution is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def versions_of(distributions: Iterable[str], installed: Callable[[str], str | None] = version_of) -> dict[str, str]:
    """Return the versions of the installed ones among `distributions`."""
    versions = {name: installed(name) for name in distributions}
    return {name: text for name, text in versions.items() if text is not None}
