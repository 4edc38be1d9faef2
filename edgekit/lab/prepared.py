"""Prepares a Python environment on a device: sends wheels, which the device's Python installs.

The caller provides two functions: one runs a command on the device, one sends it a file.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import zipfile
from collections.abc import Callable
from email.parser import BytesParser
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from edgekit.common.files import file_sha256
from edgekit.contracts.plan import Plan
from edgekit.errors import DeviceFailed, InvalidInput, WorkloadFailed, quote_short
from edgekit.lab.devices import Prepare

OLDEST = (3, 11)
_WHEEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+]{0,127}(-[A-Za-z0-9][A-Za-z0-9._+!]{0,127}){2,5}\.whl")
_MAX_WHEELS, _MAX_METADATA_BYTES = 500, 1 << 20


class Ask(Protocol):
    def __call__(self, command: str, timeout_s: float, stdin: bytes = b"") -> bytes: ...


Push = Callable[[Path, str, float], None]  # a file, the path that it gets there, seconds


def remote_python(ask: Ask, python: str, timeout_s: float) -> str:
    """Return the version of the device's Python. Raises `DeviceFailed` if it is too old or missing."""
    try:
        output = ask(f"{python} -c 'import sys; print(*sys.version_info[:3])'", timeout_s).decode("utf-8", "replace")
    except WorkloadFailed as error:
        raise DeviceFailed(
            f"{error}; there is no {quote_short(python)}: install Python 3.11, or say which in `python`"
        ) from error
    version_info = tuple(int(part) for part in output.split() if part.isdigit())
    version = ".".join(map(str, version_info)) or quote_short(output)
    if version_info < OLDEST:
        raise DeviceFailed(f"{python} there is Python {version}, and edgekit needs 3.11: name a newer one in `python`")
    return version


def prepare(prepare: Prepare, plan: Plan, folder: str, python: str, prefix: str, ask: Ask, push: Push) -> str:
    """Return the path of a Python on the device with edgekit and the plan's target; made once per wheel."""
    wheel = _checked(Path(prepare.wheel))
    extra = extra_of(wheel, plan)
    wheels = {path: file_sha256(path) for path in [wheel, *_wheelhouse(prepare)]}
    key = [*wheels.values(), extra, prepare.index, prepare.system_packages, python]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    remote_python(ask, python, prepare.timeout_s)
    for path, sha256 in wheels.items():
        push(path, f"{folder}/wheels/{sha256}/{path.name}", prepare.timeout_s)
    message = {
        "place": f"{folder}/env-{name}",
        "wheel": f"{folder}/wheels/{wheels[wheel]}/{wheel.name}",
        "links": [f"{folder}/wheels/{sha256}" for path, sha256 in wheels.items() if path != wheel],
        "index": prepare.index,
        "extra": extra,
        "system_packages": prepare.system_packages,
    }
    # `timeout` ends it if the connection is cut; a partial environment is rebuilt.
    command = f"{prefix} timeout -k 5 {prepare.timeout_s:.0f} {python} - {shlex.quote(json.dumps(message))}"
    try:
        answer = ask(command, prepare.timeout_s + 10, (files("edgekit.lab") / "remote_bootstrap.py").read_bytes())
    except WorkloadFailed as error:
        # Not a result of the measurement: the device is not ready.
        raise DeviceFailed(f"no environment could be made: {error}") from error
    remote_path = answer.decode("utf-8", "replace").strip()
    if not remote_path.endswith(f"/env-{name}/bin/python") or "\n" in remote_path:
        raise DeviceFailed(f"making an environment answered {quote_short(remote_path)}")
    return shlex.quote(remote_path)


def extra_of(wheel: Path, plan: Plan) -> str | None:
    """Return the wheel's extra for the plan's backend or target; None if it has none."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            (metadata,) = (
                name for name in archive.namelist() if re.fullmatch(r"edgekit-[^/]+\.dist-info/METADATA", name)
            )
            with archive.open(metadata) as file:
                offered = BytesParser().parsebytes(file.read(_MAX_METADATA_BYTES)).get_all("Provides-Extra") or []
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise InvalidInput(f"{wheel}: is not a wheel of edgekit; build one with `python -m build --wheel`") from error
    for name in (plan.backend, plan.target):
        if name in offered:
            return name
    return None


def _wheelhouse(prepare: Prepare) -> list[Path]:
    if prepare.wheelhouse is None:
        return []
    house = Path(prepare.wheelhouse)
    version_info = sorted(house.glob("*.whl"))
    if not 0 < len(version_info) <= _MAX_WHEELS:
        raise InvalidInput(f"{house}: holds {len(version_info)} wheels; a wheelhouse is a folder of 1 to {_MAX_WHEELS}")
    return [_checked(path) for path in version_info]


def _checked(path: Path) -> Path:
    if not path.is_file() or not _WHEEL.fullmatch(path.name):
        raise InvalidInput(
            f"{path}: is not a wheel; check the path (a wheel's file keeps the name that it was built with)"
        )
    return path
