"""Every target writes the greedy texts of transformers, beyond one chunk, one block of the cache and any window."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("transformers")

import family_models as models

LIBRARIES = {"onnx": "onnxruntime", "mlx": "mlx", "executorch": "executorch"}
MARKS = {
    "onnx": pytest.mark.onnx,
    "mlx": pytest.mark.mlx,
    "executorch": [pytest.mark.executorch, pytest.mark.slow],
}
EVERYWHERE = models.TWISTED
SPECIAL = (*models.RECURRENT, *models.SHARING, *models.EXPERTS, *models.HYBRID_EXPERTS)
ROWS = [(target, family) for target in LIBRARIES for family in EVERYWHERE]
ROWS += [(target, family) for target in ("onnx", "mlx") for family in SPECIAL]


def opened(target: str, family: str) -> tuple[Any, Any]:
    """An engine and transformers' model with its weights."""
    if target == "onnx":
        from onnx_models import onnx_model

        made = onnx_model(family, "s4-g32" if family in models.HYBRID_EXPERTS else "float32")
        return made.open(), made.reference()
    if target == "mlx":
        import mlx_models
        from edgekit_mlx.engine import MlxEngine

        found = mlx_models.made(family, "float32")
        return MlxEngine(found.plan, found.files), mlx_models.reference(family, "float32")
    from executorch_models import program

    lowered = program(family, "float32")
    return lowered.open(), models.reference_of(lowered.files / "model", lowered.weights)


@pytest.mark.quantize
@pytest.mark.parametrize(
    ("target", "family"),
    [pytest.param(target, family, marks=MARKS[target]) for target, family in ROWS],
)
def test_greedy_text_equals_transformers_for_64_tokens(
    target: str, family: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec(LIBRARIES[target]) is None:
        pytest.skip(f"{LIBRARIES[target]} is not installed")
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    engine, reference = opened(target, family)
    text = models.greedy_text(engine, engine.start(engine.plan.storage), models.tokens_of(20, seed=3), first=13)
    engine.close()
    assert len(text) == 84
    assert text[20:] == [int(row.argmax()) for row in models.logits_of(reference, text)[19:-1]]
