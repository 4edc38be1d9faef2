"""Examines an installation: packages, conflicts and vendor libraries, with the command that fixes each problem."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

from edgekit.common.base import Frozen
from edgekit.common.packages import version_of, versions_of
from edgekit.contracts.device import DeviceProfile
from edgekit.device.load import load_profile
from edgekit.doctor import packages
from edgekit.doctor.packages import Extra, Installed
from edgekit.doctor.probes import ProbeOutcome, try_out
from edgekit.errors import EdgekitError
from edgekit.plugins import target_names

HealthStatus = Literal["works", "installed", "missing", "conflict", "broken"]
RunProbe = Callable[[Sequence[str], float], ProbeOutcome]

_TIMEOUT_S = 120.0
# The extra or package that installs each of these with matching versions of its dependencies.
_BUILT_FOR_OTHERS = {
    "executorch": "edgekit[executorch]",
    "torchao": "edgekit[executorch]",
    "mlx-lm": "edgekit[mlx]",
    "transformers": "edgekit[quantize]",
    "onnxruntime-genai": "onnxruntime-genai",
}
_WIRED = (
    "Metal may wire about two thirds of this Mac's memory (three quarters above 32 GB)."
    " `sudo sysctl iogpu.wired_limit_mb=N` raises that to N MiB until the next restart; 0 is the default again."
    " Leave the system at least 4 GB, more under load."
)


class Finding(Frozen):
    """The result of one check."""

    subject: str
    status: HealthStatus
    found: str
    cure: str | None = None  # a command or advice


class Diagnosis(Frozen):
    """All results of an examination of this machine."""

    python: str
    platform: str
    versions: dict[str, str]
    findings: tuple[Finding, ...]
    machine: DeviceProfile | None
    notes: tuple[str, ...]

    @property
    def is_healthy(self) -> bool:
        """True if nothing installed conflicts or is broken; a missing package is no trouble."""
        return not any(finding.status in ("conflict", "broken") for finding in self.findings)


class Practice(NamedTuple):
    """The queries of an examination, replaceable in tests."""

    installed: Installed = version_of
    extras: Callable[[], list[Extra]] = packages.extras
    unmet: Callable[[str], list[str]] = packages.unmet
    targets: Callable[[], list[str]] = target_names
    probe: RunProbe = try_out
    machine: Callable[[], DeviceProfile] = lambda: load_profile("this")
    system: str = platform.system()


def examine(practice: Practice | None = None) -> Diagnosis:
    """Run all checks; vendor libraries are tried in child processes, two at a time."""
    ask = practice or Practice()
    machine, trouble = _machine(ask)
    findings = [*trouble, *_clashes(ask, machine), *_extras(ask), *_pairs(ask)]
    with ThreadPoolExecutor(2) as threads:
        tried = list(threads.map(lambda trial: trial(), _trials(ask)))
    return Diagnosis(
        python=sys.version.split()[0],
        platform=platform.platform(),
        versions=versions_of(packages.SHOWN, ask.installed),
        findings=(*findings, *(finding for finding in tried if finding is not None)),
        machine=machine,
        notes=(_WIRED,) if ask.system == "Darwin" else (),
    )


def _machine(ask: Practice) -> tuple[DeviceProfile | None, list[Finding]]:
    try:
        return ask.machine(), []
    except EdgekitError as error:
        return None, [Finding(subject="this machine", status="missing", found=str(error))]


def _clashes(ask: Practice, machine: DeviceProfile | None) -> list[Finding]:
    has_gpu = machine is not None and (machine.vram is not None or "edgekit[cuda]" in " ".join(machine.notes))
    extra = "cuda" if has_gpu else "onnx"
    return [
        Finding(
            subject=" and ".join(group),
            status="conflict",
            found="they overwrite each other's files; removing only one breaks the other too",
            cure=f"pip uninstall -y {' '.join(group)} && pip install 'edgekit[{extra}]'",
        )
        for group in packages.overwriting(ask.installed)
    ]


def _extras(ask: Practice) -> list[Finding]:
    extras = ask.extras()
    complete = {extra.name for extra in extras if extra.complete}
    return [_extra(extra) for extra in extras if not _is_other_choice(extra, complete)]


def _is_other_choice(extra: Extra, complete: set[str]) -> bool:
    """Return whether `extra` is an incomplete alternative of a complete one: `onnx` and `cuda` exclude each other."""
    pair = {"onnx": "cuda", "cuda": "onnx"}
    return pair.get(extra.name) in complete and not extra.complete


def _extra(extra: Extra) -> Finding:
    subject, install = f"edgekit[{extra.name}]", f"pip install 'edgekit[{extra.name}]'"
    if extra.total == 0:
        return Finding(subject=subject, status="missing", found="nothing of it runs on this platform")
    if extra.wrong:
        return Finding(subject=subject, status="conflict", found=", ".join(extra.wrong), cure=install)
    if extra.complete:
        return Finding(subject=subject, status="installed", found="everything it asks for, in the versions it asks for")
    lacking = ", ".join(extra.absent)
    return Finding(subject=subject, status="missing", found=f"not installed: {lacking}", cure=install)


def _pairs(ask: Practice) -> list[Finding]:
    """Check packages that require certain versions of others, above all of torch."""
    findings: list[Finding] = []
    for name, wanted in _BUILT_FOR_OTHERS.items():
        lacks = ask.unmet(name)
        if lacks:
            cure = f"pip install --upgrade '{wanted}'"
            findings.append(Finding(subject=name, status="conflict", found="; ".join(lacks), cure=cure))
    return findings


def _trials(ask: Practice) -> list[Callable[[], Finding | None]]:
    trials: list[Callable[[], Finding | None]] = []
    if ask.installed("onnxruntime") or ask.installed("onnxruntime-gpu"):
        trials.append(lambda: _onnxruntime(ask, ""))
    if ask.installed("onnxruntime-gpu"):
        trials.append(lambda: _onnxruntime(ask, "CUDAExecutionProvider"))
    for name in ("mlx", "executorch", "torch", "torchao"):
        if ask.installed(name):
            trials.append(lambda name=name: _library(ask, name))  # type: ignore[misc]
    trials += [lambda name=name: _target(ask, name) for name in ask.targets()]  # type: ignore[misc]
    return trials


def _onnxruntime(ask: Practice, provider: str) -> Finding:
    subject = f"onnxruntime on {'CUDA' if provider else 'the CPU'}"
    outcome = ask.probe(("onnxruntime", provider), _TIMEOUT_S)
    if outcome.failure is not None:
        extra = "cuda" if ask.installed("onnxruntime-gpu") else "onnx"
        cure = f"pip install --force-reinstall 'edgekit[{extra}]'"
        return Finding(subject=subject, status="broken", found=outcome.failure, cure=cure)
    used = outcome.facts.get("used") or []
    if provider and provider not in used:
        return Finding(
            subject=subject,
            status="broken",
            found=f"{provider} could not start and the session fell back to {', '.join(used) or 'nothing'}",
            cure="pip install 'edgekit[cuda]' brings CUDA 13 and cuDNN 9; the driver must be 580 or later: nvidia-smi",
        )
    providers = _text(outcome.facts.get("available") or "none")
    text = f"{outcome.facts.get('version')}, a session of one node ran; providers: {providers}"
    return _verdict(subject, outcome, text, "pip install --force-reinstall 'edgekit[onnx]'")


def _library(ask: Practice, name: str) -> Finding:
    extra = {"mlx": "mlx", "executorch": "executorch"}.get(name, "quantize")
    cure = f"pip install --force-reinstall 'edgekit[{extra}]'"
    outcome = ask.probe((name,), _TIMEOUT_S)
    if outcome.failure is not None:
        return Finding(subject=name, status="broken", found=outcome.failure, cure=cure)
    facts = {key: value for key, value in outcome.facts.items() if key != "works"}
    text = ", ".join(f"{key} {_text(value)}" for key, value in facts.items())
    return _verdict(name, outcome, text, cure)


def _target(ask: Practice, name: str) -> Finding:
    subject = f"target {name}"
    outcome = ask.probe(("target", name), _TIMEOUT_S)
    if outcome.failure is not None:
        cure = "reinstall the package that offers it"
        return Finding(subject=subject, status="broken", found=outcome.failure, cure=cure)
    missing = outcome.facts.get("missing")
    if missing:
        reason, _, cure = str(missing).partition("; ")
        return Finding(subject=subject, status="missing", found=reason, cure=cure or None)
    devices = outcome.facts.get("devices")
    sees = f"; its library sees {_text(devices)}" if devices else ""
    return Finding(subject=subject, status="works", found=f"can build and run here{sees}")


def _verdict(subject: str, outcome: ProbeOutcome, found: str, cure: str) -> Finding:
    if outcome.facts.get("works") is True:
        return Finding(subject=subject, status="works", found=found)
    return Finding(subject=subject, status="broken", found=f"{found}; it answered wrongly", cure=cure)


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
