"""Compares installed packages with edgekit's extras, and finds conflicting packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import requires

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from edgekit.common.base import Frozen
from edgekit.common.packages import RUNTIMES, version_of

Installed = Callable[[str], str | None]

# Packages of one group are installed over each other's files.
OVERWRITING = (("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino"),)
SHOWN = (
    *RUNTIMES,
    "onnxruntime-genai",
    "transformers",
    "compressed-tensors",
    "optimum",
    "tokenizers",
    "huggingface-hub",
    "llguidance",
    "nvidia-ml-py",
)
EXTRAS = ("onnx", "cuda", "mlx", "llamacpp", "executorch", "quantize", "structured", "serve")


class Extra(Frozen):
    """The state of one of edgekit's extras on this machine."""

    name: str
    absent: tuple[str, ...]  # requirements whose package is not installed
    wrong: tuple[str, ...]  # "torch 2.9 (wanted <2.14,>=2.13)"
    total: int  # requirements that apply on this platform

    @property
    def complete(self) -> bool:
        """True if every requirement is installed in the right version."""
        return self.total > 0 and not self.absent and not self.wrong


def extras(needed: list[str] | None = None, installed: Installed = version_of) -> list[Extra]:
    """Compare each of edgekit's extras with the installed packages; `needed` replaces our metadata."""
    lines = needed if needed is not None else list(requires("edgekit") or ())
    return [_extra(name, list(_requirements(lines, name)), installed) for name in EXTRAS]


def _requirements(lines: list[str], extra: str) -> Iterator[Requirement]:
    """Yield what an extra requires; with an empty name, what the package itself requires."""
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if _applies(requirement, extra) and not (extra and _applies(requirement, "")):
            yield requirement


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _extra(name: str, wanted: list[Requirement], installed: Installed) -> Extra:
    absent, wrong = [], []
    for requirement in wanted:
        version = installed(requirement.name)
        if version is None:
            absent.append(requirement.name)
        elif not _satisfies(version, requirement):
            wrong.append(f"{requirement.name} {version} (wanted {requirement.specifier})")
    return Extra(name=name, absent=tuple(absent), wrong=tuple(wrong), total=len(wanted))


def _satisfies(version: str, requirement: Requirement) -> bool:
    if not requirement.specifier:
        return True
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def overwriting(installed: Installed = version_of) -> list[tuple[str, ...]]:
    """Return the groups with several installed packages, of which the last one overwrote the others."""
    groups = [tuple(name for name in group if installed(name) is not None) for group in OVERWRITING]
    return [group for group in groups if len(group) > 1]


def unmet(name: str, needed: list[str] | None = None, installed: Installed = version_of) -> list[str]:
    """Return the unmet requirements of an installed package, e.g. `torchao 0.9 (wanted >=0.18)`."""
    if installed(name) is None:
        return []
    lines = needed if needed is not None else list(requires(name) or ())
    problems: list[str] = []
    for requirement in _requirements(lines, ""):
        version = installed(requirement.name)
        if version is None:
            problems.append(f"{requirement.name} is not installed (wanted {requirement.specifier or 'any version'})")
        elif not _satisfies(version, requirement):
            problems.append(f"{requirement.name} {version} (wanted {requirement.specifier})")
    return problems
