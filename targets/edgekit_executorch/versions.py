"""Checks versions: ExecuTorch's extension modules are built against one torch and one torchao."""

from __future__ import annotations

from edgekit.common.packages import versions_of
from edgekit.errors import TargetMissing

# executorch's series → the torch and torchao that it was built for, and tested with here.
PAIRS = {"1.5": ("2.13", "0.18")}
_INSTALL = "pip install 'edgekit[executorch]'"


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that a program depends on."""
    return versions_of(("executorch", "torch", "torchao"))


def clash(installed: dict[str, str], *, to_export: bool = False) -> str | None:
    """Return the reason why these versions cannot work together, with a fix; None if they can."""
    if "executorch" not in installed:
        return f"executorch is not installed; {_INSTALL}"
    mine = _series(installed["executorch"])
    if mine not in PAIRS:
        known = ", ".join(PAIRS)
        return (
            f"executorch {installed['executorch']} was never tested with this edgekit, which knows {known}; {_INSTALL}"
        )
    torch, torchao = PAIRS[mine]
    needed = {"torch": torch, "torchao": torchao} if to_export else {"torch": torch}
    for name, series in needed.items():
        if name not in installed:
            return f"executorch {installed['executorch']} needs {name} {series}, which is not installed; {_INSTALL}"
        if _series(installed[name]) != series:
            return (
                f"executorch {installed['executorch']} was built for {name} {series}, found {installed[name]}; "
                f"pip install '{name}~={series}.0'"
            )
    return None


def require(*, to_export: bool = False) -> None:
    """Raise `TargetMissing` unless a program can run on this machine, or be lowered."""
    reason = clash(versions(), to_export=to_export)
    if reason:
        raise TargetMissing(reason)


def _series(text: str) -> str:
    return ".".join(text.split("+")[0].split(".")[:2])
