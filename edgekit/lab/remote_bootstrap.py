"""Makes an environment with edgekit. The lab sends this file to a device, where Python runs it from stdin.

It imports only the standard library, because edgekit is not installed yet. Argument: one line of JSON; output: a path.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

# Only some environments of other wheels are kept, because each may take a gigabyte.
KEPT = 8


def prepare(message: dict[str, Any]) -> Path:
    """Return the Python of the environment at `place`; make the environment unless a complete one exists."""
    place = Path(message["place"]).absolute()
    ready = place / "ready"
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another lab may be making the same one
        if not ready.exists():
            _make(place, message)
            os.sync()
        ready.touch()
    _remove_oldest(place)
    return place / "bin/python"


def _make(place: Path, message: dict[str, Any]) -> None:
    try:
        import ensurepip  # noqa: F401
        import venv
    except ImportError:
        _refuse(
            f"{sys.executable} cannot make environments (no venv or ensurepip); on Debian: apt install python3-venv"
        )
    # A partial environment is rebuilt, because pip would accept a half-installed package. Downloads are cached.
    venv.create(place, clear=True, with_pip=True, system_site_packages=message["system_packages"])
    command = [
        str(place / "bin/python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
    ]
    command += [f"--find-links={Path(folder).absolute()}" for folder in message["links"]]
    if message["index"]:
        command += ["--index-url", message["index"]]
    elif message["links"]:
        command += ["--no-index"]
    extra = f"[{message['extra']}]" if message["extra"] else ""
    command += [f"{Path(message['wheel']).absolute()}{extra}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode:
        lines = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]
        _refuse(f"pip failed: {(errors or lines or ['no word'])[-1]}")


def _remove_oldest(place: Path) -> None:
    made = sorted(place.parent.glob("env-*/ready"), key=lambda path: path.stat().st_mtime, reverse=True)
    for ready in made[KEPT:]:
        if ready.parent != place:
            ready.unlink()
            shutil.rmtree(ready.parent, ignore_errors=True)


def _refuse(why: str) -> NoReturn:
    sys.exit(why)


if __name__ == "__main__":
    sys.stdout.write(f"{prepare(json.loads(sys.argv[1]))}\n")
