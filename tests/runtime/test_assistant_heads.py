"""Gemma 4's assistant is sealed beside its model, computes what transformers' class computes, and drafts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from assistants import CLUSTERS, VOCABULARY, torch_draft, torch_logits, write_assistant, write_gemma4
from click.testing import CliRunner
from sealed_heads import KEPT, TARGETS, check_answers, check_schemas_and_prefixes, planned, words

import edgekit
from edgekit.artifact.artifact import Artifact
from edgekit.artifact.export import export
from edgekit.artifact.sealed_head import HEAD_FOLDER, open_head
from edgekit.cli import command
from edgekit.contracts.engine import Chunk
from edgekit.contracts.feeding import feed
from edgekit.contracts.manifest import MANIFEST
from edgekit.contracts.recipe import named_recipe
from edgekit.errors import DamagedArtifact, Unsupported
from edgekit.model import assistant
from edgekit.model.heads import read_head
from edgekit.runtime.speculation import assistant_decoder
from edgekit.runtime.speculation.assistant_decoder import AssistantDecoder, Seen

DRAFTED = 270  # of the small model's tokens, for a head without clusters
FULL, SLIDING = 3, 2  # the last layers that store keys and values


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path_factory.getbasetemp() / "home"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma4(tmp_path_factory.mktemp("gemma4") / "model")


@pytest.fixture(scope="module")
def head(model: Path) -> Path:
    return write_assistant(model.parent / "assistant", model, clusters=CLUSTERS)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("onnx", marks=pytest.mark.onnx),
        pytest.param("mlx", marks=[pytest.mark.mlx, pytest.mark.slow]),
    ],
)
def artifact(model: Path, head: Path, request: pytest.FixtureRequest) -> Artifact:
    pytest.importorskip(TARGETS[request.param])
    return export(planned(model, head, target=request.param), model.parent / request.param)


@pytest.mark.parametrize("kept", KEPT)
def test_answers_are_those_of_plain_decoding(artifact: Artifact, kept: str) -> None:
    prompts = [words(2 + place % 20, place) for place in range(12)]
    proposed, accepted = check_answers(artifact, prompts, kept)
    assert accepted > 0 and proposed > accepted


@pytest.mark.parametrize("bits", [16, 8])
def test_answers_with_a_narrow_cache_are_too(artifact: Artifact, bits: int) -> None:
    prompts = [words(2 + place, place) for place in range(6)]
    proposed, accepted = check_answers(artifact, prompts, "everything", kv_bits=bits)
    assert accepted > 0 and proposed > accepted


def test_json_schemas_and_prefix_hits_are_kept_too(artifact: Artifact) -> None:
    check_schemas_and_prefixes(artifact)


@pytest.mark.onnx
@pytest.mark.quantize
@pytest.mark.parametrize("clusters", [None, CLUSTERS])
@pytest.mark.parametrize("bits", [32, 16, 8])
def test_draft_logits_equal_those_of_transformers(
    model: Path, tmp_path: Path, clusters: int | None, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a text longer than the window, whose keys and values are read in several pieces."""
    pytest.importorskip("torch")
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(assistant, "DRAFT_TOKENS", DRAFTED)
    monkeypatch.setattr(assistant_decoder, "READ_TOKENS", 9)
    head = write_assistant(tmp_path / "head", model, clusters=clusters)
    made = export(planned(model, head, recipe=named_recipe("float32")), tmp_path / "made")
    draw = np.random.default_rng(1)
    tokens, drafted = draw.integers(0, VOCABULARY, 60).tolist(), draw.integers(0, VOCABULARY, 4).tolist()
    decoder = AssistantDecoder(open_head(made.plan, made.folder))
    found = []
    with edgekit.open(made.folder, kv_bits=bits) as runtime:
        state = runtime.engine.start(made.plan.storage.model_copy(update={"kv_bits": bits}))
        feed(runtime.engine, state, tokens[:-1])
        row = np.empty((1, runtime.engine.abilities.feature_width), np.float32)
        runtime.engine.forward([Chunk(state, tokens[-1:], 1, features=row)])
        first = hidden = decoder.combine(row)[0]
        for token in drafted:
            hidden, normed = decoder.forward(Seen.of(state), token, hidden)
            found.append(decoder.logits(normed))
        layers = {"full_attention": FULL, "sliding_attention": SLIDING}
        kv = {kind: state.cached(layer, 0, 60) for kind, layer in layers.items()}
        embedded = open_head(made.plan, made.folder).rows(np.array(drafted))
        expected = torch_logits(head, embedded, first, kv, 60)[:, decoder.targets]
        state.close()
    ours = np.stack(found)
    if clusters is None:
        assert ours.shape == (4, DRAFTED) and np.isfinite(ours).all()
    else:
        assert (np.isfinite(ours).sum(axis=1) == 3 * VOCABULARY // CLUSTERS).all()
        least = np.where(np.isfinite(ours), expected, np.inf).min(axis=1)
        assert (np.where(np.isfinite(ours), -np.inf, expected).max(axis=1) < least).all()  # those that it leaves out
        expected = np.where(np.isfinite(ours), expected, -np.inf)
    np.testing.assert_allclose(ours, expected, atol=2e-5)
    decoder.close()
