"""The training script of a drafting head: it resumes after a kill, and the runtime drafts with the trained head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models
import torch

from edgekit.artifact.export import export
from edgekit.contracts.recipe import named_recipe
from edgekit.methods.drafters.head_decoder import HeadDecoder
from edgekit.model.source import open_source
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest

pytestmark = [pytest.mark.quantize, pytest.mark.onnx]
pytest.importorskip("onnxruntime")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use short texts and small batches."""
    from examples.training import train_head
    from examples.training.head_training import outputs

    for module in (outputs, train_head):
        for name, value in {"LENGTH": 24, "BATCH": 4}.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


def test_head_training_resumes_and_the_head_drafts(
    tmp_path: Path, small: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    from examples.training.head_training.head import Head, HeadShape
    from examples.training.train_head import main

    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    model = tiny_models.write_tiny(tmp_path / "model", layers=3)
    words = tiny_models.text_file(tmp_path).read_text()
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": words[i * 50 :]}) + "\n" for i in range(9)))
    asked: list[Any] = ["--model", model, "--out", tmp_path / "run", "--text", tmp_path / "text.jsonl", "--tokens", 480]
    asked += ["--prompt-tokens", 6]
    asked += ["--draft-vocabulary", 90, "--layers", 1, 2, 2, "--threads", 1]
    main([str(each) for each in [*asked, "--minutes", 0.02]])
    first = json.loads((tmp_path / "run" / "figures.json").read_text())
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "outputs").iterdir()}
    main([str(each) for each in [*asked, "--minutes", 0.05]])
    assert f"and {first['steps']} steps" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "outputs").iterdir()} == files
    figures = json.loads((tmp_path / "run" / "figures.json").read_text())
    assert figures["steps"] > first["steps"] > 0 and len(figures["same_top_token_by_place"]) == 3
    with pytest.raises(SystemExit, match="made with other settings"):
        main([str(each) for each in [*asked, "--seed", 1, "--minutes", 0.05]])

    folder = tmp_path / "run" / "head"
    request = PlanRequest(recipe=named_recipe("float32"), target="onnx", context=128, drafter=str(folder))
    artifact = export(make_plans(str(model), [tiny_models.DEVICE], request)[0], tmp_path / "out")
    ours = HeadDecoder(artifact.open_head())
    shape = {**figures["shape"], "layers": tuple(figures["shape"]["layers"])}
    head = Head(HeadShape(**shape))
    stored = load_file(folder / "model.safetensors")
    head.load_state_dict({name: value.float() for name, value in stored.items() if name not in ("d2t", "t2d")})
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, open_source(model).spec.vocab_size, 12)
    hidden = draw.standard_normal((10, ours.spec.width), np.float32)
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"].float()
    with torch.no_grad():
        expected = head(table[tokens][None], torch.from_numpy(np.concatenate([hidden, hidden[:2]]))[None], 2)
    cache = ours.start(64, lambda looked_up: table[list(looked_up)].numpy())
    output = ours.forward(cache, tokens[1:11], ours.combine(hidden), np.arange(10))
    np.testing.assert_allclose(ours.logits(output[-1]), expected[0][0, 9], atol=1e-3)
    output = ours.forward(cache, tokens[11:12], output[-1:], np.array([10]))
    np.testing.assert_allclose(ours.logits(output[-1]), expected[1][0, 9], atol=1e-3)
