"""Real models for tests: their GGUF files, float32 folders of their first layers, and the command that exports them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgekit.common.packages import version_of
from edgekit.errors import EdgekitError
from edgekit.model.source import open_source, open_tensors
from examples.small_models import RealModelMissing

Export = Callable[..., Path]


def edgekit(*arguments: str | Path, timeout_s: float = 3000) -> str:
    """Standard output of one `edgekit` command; fails the test with its standard error."""
    command = [sys.executable, "-m", "edgekit", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=dict(os.environ))
    assert done.returncode == 0, f"edgekit {' '.join(map(str, arguments))}\n{done.stderr[-3000:]}"
    return done.stdout


def manifest(artifact: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((artifact / "manifest.json").read_text())
    return document


def fetched(fetch: Callable[[], Path]) -> Path:
    """The model's file; skips the test, with the reason, where it cannot be fetched."""
    try:
        return fetch()
    except RealModelMissing as error:
        pytest.skip(str(error))


def require(package: str) -> None:
    """Skip the test where this package is not installed, without importing it."""
    if version_of(package) is None:
        pytest.skip(f"{package} is not installed")


def first_layers(gguf: Path, layers: int, folder: Path) -> Path:
    """A Hugging Face folder of the model's first `layers` layers, in float32.

    Real embeddings, a real tokenizer and real activations, at a size that every engine runs in seconds.
    """
    import torch
    from safetensors.torch import save_file

    source = open_source(gguf, need_weights=True)
    folder.mkdir(parents=True)
    for path in source.folder.iterdir():
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    config = json.loads((folder / "config.json").read_text())
    if layers > config["num_hidden_layers"]:
        raise EdgekitError(f"the model has {config['num_hidden_layers']} layers, not {layers}")
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(config))
    with open_tensors(source.weights) as tensors:
        kept = [name for name in tensors.entries if ".layers." not in name or _layer(name) < layers]
        save_file({name: torch.from_numpy(tensors.floats(name).copy()) for name in kept}, folder / "model.safetensors")
    return folder


def _layer(name: str) -> int:
    return int(name.partition(".layers.")[2].partition(".")[0])
