"""A real encoder against sentence-transformers' arithmetic, in float and in eight bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from real_files import Export, fetched
from tiny_encoders import hidden_states, unit

import edgekit
from edgekit.artifact.artifact import read_manifest
from edgekit.artifact.bom import bill_of_materials
from examples.small_models import minilm

PAIRS = 500
TEXTS = [
    "hello",
    "A man is eating food.",
    "The quick brown fox jumps over the lazy dog, and sleeps for a long time in the warm afternoon sun. " * 4,
    "日本語 naïve café 🙂",
    "def average(values): return sum(values) / len(values)",
]


@pytest.fixture(scope="module")
def model() -> Path:
    return fetched(minilm)


def sentences() -> list[str]:
    """Lines of the documentation: short texts on neighbouring subjects, in a fixed order."""
    pages = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))
    lines = [line.strip() for page in pages for line in page.read_text().splitlines()]
    found = [line[:120] for line in lines if len(line) > 40 and not line.startswith(("|", "#", "`"))]
    return list(np.random.default_rng(0).permutation(found)[: 2 * PAIRS])


@pytest.mark.real
@pytest.mark.quantize
def test_float_vectors_equal_sentence_transformers_arithmetic(model: Path, export: Export) -> None:
    with edgekit.open(export(model, "onnx", "--recipe", "float32")) as runtime:
        tokens = [runtime.encode(text) for text in TEXTS]
        expected = unit(np.stack([states.mean(0) for states in hidden_states(model, tokens)]))
        assert np.abs(runtime.embed(TEXTS) - expected).max() < 1e-4


@pytest.mark.real
@pytest.mark.quantize
def test_the_bill_has_the_licence_of_the_model_page(model: Path, export: Export) -> None:
    """The files state none, so it comes from the table of known models."""
    artifact = read_manifest(export(model, "onnx", "--recipe", "float32"))
    bill = json.loads(bill_of_materials(artifact.manifest, artifact.sha256))
    assert bill["metadata"]["component"]["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    card = bill["metadata"]["component"]["modelCard"]
    assert card["modelParameters"]["task"] == "feature-extraction"
    assert card["quantitativeAnalysis"]["performanceMetrics"] == []  # an encoder predicts no tokens


@pytest.mark.real
@pytest.mark.long
def test_eight_bits_keep_the_order_of_pairs(model: Path, export: Export) -> None:
    similarities = []
    texts = sentences()
    for recipe in ("float32", "s8"):
        with edgekit.open(export(model, "onnx", "--recipe", recipe)) as runtime:
            vectors = runtime.embed(texts)
            similarities.append((vectors[::2] * vectors[1::2]).sum(1))
            report = runtime.memory()
            assert report.predicted.kv_bytes == 0
    ranks = [values.argsort().argsort() for values in similarities]
    assert len(ranks[0]) == PAIRS
    assert np.corrcoef(*ranks)[0, 1] >= 0.99
