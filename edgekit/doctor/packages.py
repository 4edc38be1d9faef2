"""Which packages are installed, whether edgekit's extras ask for those, and which cannot stand together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import requires

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from edgekit.frozen import Frozen
from edgekit.installed import version_of

Installed = Callable[[str], str | None]

# Packages of one group are installed over each other's files.
OVERWRITING = (("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino"),)
SHOWN = (
    "edgekit",
    "numpy",
    "tokenizers",
    "huggingface-hub",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnx-ir",
    "onnxruntime-genai",
    "mlx",
    "mlx-lm",
    "executorch",
    "torch",
    "torchao",
    "transformers",
    "compressed-tensors",
    "optimum",
    "llguidance",
    "nvidia-ml-py",
)
EXTRAS = ("onnx", "cuda", "mlx", "executorch", "quantize", "structured")


class Extra(Frozen):
    """One of edgekit's extras on this machine."""

    name: str
    absent: tuple[str, ...]  # requirements whose package is not installed
    wrong: tuple[str, ...]  # "torch 2.9 (wanted <2.14,>=2.13)"
    total: int  # requirements that hold on this platform

    @property
    def complete(self) -> bool:
        """Everything is there, in the version asked for."""
        return self.total > 0 and not self.absent and not self.wrong

    @property
    def begun(self) -> bool:
        """Some of it is there."""
        return len(self.absent) < self.total


def installed_versions(installed: Installed = version_of) -> dict[str, str]:
    """The packages that matter here and are installed."""
    found = {name: installed(name) for name in SHOWN}
    return {name: text for name, text in found.items() if text is not None}


def extras(needed: list[str] | None = None, installed: Installed = version_of) -> list[Extra]:
    """Each of edgekit's extras against what is installed; `needed` are requirements as metadata says them."""
    lines = needed if needed is not None else list(requires("edgekit") or ())
    return [_extra(name, list(_requirements(lines, name)), installed) for name in EXTRAS]


def _requirements(lines: list[str], extra: str) -> Iterator[Requirement]:
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        marker = requirement.marker
        if marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            yield requirement


def _extra(name: str, wanted: list[Requirement], installed: Installed) -> Extra:
    absent, wrong = [], []
    for requirement in wanted:
        found = installed(requirement.name)
        if found is None:
            absent.append(requirement.name)
        elif not _satisfies(found, requirement):
            wrong.append(f"{requirement.name} {found} (wanted {requirement.specifier})")
    return Extra(name=name, absent=tuple(absent), wrong=tuple(wrong), total=len(wanted))


def _satisfies(found: str, requirement: Requirement) -> bool:
    if not requirement.specifier:
        return True
    try:
        return requirement.specifier.contains(Version(found), prereleases=True)
    except InvalidVersion:
        return False


def overwriting(installed: Installed = version_of) -> list[tuple[str, ...]]:
    """Groups of which more than one package is installed: whichever came last has broken the other."""
    groups = [tuple(name for name in group if installed(name) is not None) for group in OVERWRITING]
    return [group for group in groups if len(group) > 1]


def unmet(name: str, needed: list[str] | None = None, installed: Installed = version_of) -> list[str]:
    """What an installed package itself asks for and does not find: `torchao 0.9 (wanted >=0.18)`."""
    if installed(name) is None:
        return []
    lines = needed if needed is not None else list(requires(name) or ())
    found: list[str] = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        there = installed(requirement.name)
        if there is None:
            found.append(f"{requirement.name} is not installed (wanted {requirement.specifier or 'any version'})")
        elif not _satisfies(there, requirement):
            found.append(f"{requirement.name} {there} (wanted {requirement.specifier})")
    return found
