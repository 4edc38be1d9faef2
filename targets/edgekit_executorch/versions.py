"""Which versions belong together: ExecuTorch's extension modules are built against one torch and one torchao."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from edgekit.errors import TargetMissing

# executorch → the torch and torchao that its operators and its lowering were built and tried with
PAIRS = {"1.5": ("2.13", "0.18")}
_INSTALL = "pip install 'edgekit[executorch]'"


def versions() -> dict[str, str]:
    """What is installed of what decides over a program."""
    found = {}
    for name in ("executorch", "torch", "torchao"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def clash(found: dict[str, str], *, to_export: bool = False) -> str | None:
    """Why these versions cannot work together, with the cure; None when they can."""
    if "executorch" not in found:
        return f"executorch is not installed; {_INSTALL}"
    mine = _series(found["executorch"])
    if mine not in PAIRS:
        known = ", ".join(PAIRS)
        return f"executorch {found['executorch']} was never tried with this edgekit, which knows {known}; {_INSTALL}"
    torch, torchao = PAIRS[mine]
    needed = {"torch": torch, "torchao": torchao} if to_export else {"torch": torch}
    for name, series in needed.items():
        if name not in found:
            return f"executorch {found['executorch']} needs {name} {series}, which is not installed; {_INSTALL}"
        if _series(found[name]) != series:
            return (
                f"executorch {found['executorch']} was built for {name} {series}, found {found[name]}; "
                f"pip install '{name}~={series}.0'"
            )
    return None


def require_pair() -> None:
    """Raise unless a program can be lowered here."""
    reason = clash(versions(), to_export=True)
    if reason:
        raise TargetMissing(reason)


def _series(text: str) -> str:
    return ".".join(text.split("+")[0].split(".")[:2])


def require_runtime() -> None:
    """Raise unless a program can be run here."""
    reason = clash(versions())
    if reason:
        raise TargetMissing(reason)
