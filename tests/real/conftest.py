"""Real models, fetched once, and artifacts of them made through the command that a user types."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_files import Export, edgekit, fetched, first_layers

from examples.small_models import gemma3, smollm2

SMOLLM2_LAYERS, GEMMA3_LAYERS = 4, 7  # Gemma's sixth layer is its first without a window


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    return fetched(smollm2)


@pytest.fixture(scope="session")
def gemma3_file() -> Path:
    return fetched(gemma3)


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """`export(model, target, *options)`: the artifact, made once a session."""
    made: dict[tuple[object, ...], Path] = {}

    def get(model: Path, target: str, *options: str) -> Path:
        key = (model, target, *options)
        if key not in made:
            out = tmp_path_factory.mktemp("artifacts") / f"{model.stem}-{target}"
            edgekit("export", model, "--device", "this", "--target", target, "-o", out, *options)
            made[key] = out
        return made[key]

    return get


@pytest.fixture(scope="session")
def smollm2_short(smollm2_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's first layers as a Hugging Face folder of float32."""
    return first_layers(smollm2_file, SMOLLM2_LAYERS, tmp_path_factory.mktemp("short") / "smollm2")


@pytest.fixture(scope="session")
def gemma3_short(gemma3_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3's first layers, one without a window among them, as a Hugging Face folder of float32."""
    return first_layers(gemma3_file, GEMMA3_LAYERS, tmp_path_factory.mktemp("short") / "gemma3")
