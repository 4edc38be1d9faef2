"""Artifacts of the fake target with tensors of real sizes, and the device that they are for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import fake_artifacts
from safetensors_files import entry, write

from edgekit.artifact.artifact import Artifact, open_artifact

TENSOR_BYTES = (300_000, 2_000, 1_500_000, 40_000, 90_000, 700_000, 3_000, 260_000)
PROFILE = Path(__file__).parents[2] / "profiles/raspberry-pi-5-8gb.yaml"


def device_profile(folder: Path, name: str = "test-device") -> str:
    """Write a device that runs the fake target; return its path."""
    text = PROFILE.read_text().replace("name: raspberry-pi-5-8gb", f"name: {name}")
    path = folder / f"{name}.yaml"
    path.write_text(text.replace("targets:\n", "targets:\n  fake: [cpu]\n"))
    return str(path)


def tensors(changed: Sequence[int] = ()) -> list[bytes]:
    """Random tensors; those at the places `changed` have other bytes than without it."""
    return [random.Random(f"{place} {place in changed}").randbytes(size) for place, size in enumerate(TENSOR_BYTES)]


def make_artifact(folder: Path, changed: Sequence[int] = (), seed: int = 0) -> Artifact:
    """Seal an artifact whose weights are `tensors(changed)`."""
    header, start, parts = {}, 0, tensors(changed)
    for place, part in enumerate(parts):
        header[f"t{place}"] = entry("U8", [len(part)], start, start + len(part))
        start += len(part)
    weights = write(folder.with_name(f".{folder.name}.weights"), header, b"".join(parts))
    more = {"model.safetensors": weights.read_bytes(), "empty.txt": b""}
    weights.unlink()
    return open_artifact(fake_artifacts.make_artifact(folder, more=more, seed=seed))
