"""Probes that try vendor libraries in child processes, so that a crash or a hang is a result.

Run as `python -m edgekit.doctor.probes NAME [ARGUMENT]`; the last line printed is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from edgekit.common.packages import UNREPORTED

# An ONNX model with one node, y = x + x, for a vector of one float; opset 13.
_ADD_MODEL = bytes.fromhex(
    "08083a350a0e0a01780a017812017922034164641201675a0f0a0178120a0a08080112040a0208"
    "01620f0a0179120a0a08080112040a02080142040a00100d"
)


class ProbeOutcome(NamedTuple):
    """The facts that a probe reported, or the reason, in one line, why it failed."""

    facts: dict[str, Any]
    failure: str | None = None


def try_out(arguments: Sequence[str], timeout_s: float) -> ProbeOutcome:
    """Run a probe in a child process; its crash, timeout or bad output becomes a `failure`."""
    command = [sys.executable, "-m", __name__, *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**UNREPORTED, **os.environ, "PYTHONWARNINGS": "ignore"},
        )
    except subprocess.TimeoutExpired:
        return ProbeOutcome({}, f"did not answer within {timeout_s:g} s")
    except OSError as error:
        return ProbeOutcome({}, f"could not be started: {error.strerror or error}")
    if done.returncode < 0:
        return ProbeOutcome({}, f"the process was ended by signal {-done.returncode}")
    if done.returncode != 0:
        return ProbeOutcome({}, _last_line(done.stderr) or f"the process exited with {done.returncode}")
    try:
        facts = json.loads(_last_line(done.stdout))
    except ValueError:
        return ProbeOutcome({}, "the process ended without an answer")
    return (
        ProbeOutcome(facts) if isinstance(facts, dict) else ProbeOutcome({}, "the process answered with something else")
    )


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else ""


def onnxruntime(wanted: str = "") -> dict[str, Any]:
    """Run a one-node model on the execution provider `wanted`, or on the CPU."""
    import numpy as np
    import onnxruntime as ort

    provider = wanted or "CPUExecutionProvider"
    session = ort.InferenceSession(_ADD_MODEL, providers=[provider], enable_fallback=0)  # it prints to stdout
    answer = session.run(None, {"x": np.asarray([21], dtype=np.float32)})[0]
    return {
        "version": ort.__version__,
        "available": ort.get_available_providers(),
        "used": session.get_providers(),  # onnxruntime drops a provider that cannot start, without an error
        "works": float(answer[0]) == 42.0,
    }


def mlx() -> dict[str, Any]:
    """Add two numbers on the default device."""
    import mlx.core as mx

    total = mx.array([21.0]) + mx.array([21.0])
    return {
        "version": version("mlx"),
        "device": str(mx.default_device()),
        "metal": bool(mx.metal.is_available()),
        "works": total.tolist() == [42.0],
    }


def executorch() -> dict[str, Any]:
    """List the backends in this build of the runtime."""
    from executorch.runtime import Runtime

    names = list(Runtime.get().backend_registry.registered_backend_names)
    return {"backends": names, "works": bool(names)}


def torch() -> dict[str, Any]:
    """Multiply two small matrices."""
    import torch

    square = torch.ones(2, 2) @ torch.ones(2, 2)
    return {"version": torch.__version__, "cuda": torch.cuda.is_available(), "works": square.sum().item() == 8.0}


def torchao() -> dict[str, Any]:
    """Import torchao with torch, which fails if it was built for another version."""
    import torchao

    return {"version": torchao.__version__, "works": True}


def target(name: str) -> dict[str, Any]:
    """Ask a target why it cannot run on this machine."""
    from edgekit.plugins import load_target

    loaded = load_target(name)
    missing = loaded.missing()
    return {"missing": missing, "works": missing is None, "devices": [] if missing else loaded.devices()}


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "onnxruntime": onnxruntime,
    "mlx": mlx,
    "executorch": executorch,
    "torch": torch,
    "torchao": torchao,
    "target": target,
}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])))  # noqa: T201
