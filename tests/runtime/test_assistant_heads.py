"""Gemma 4's assistant is sealed with its model, computes what transformers' class computes, and drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from assistants import CLUSTERS, VOCABULARY, torch_draft, torch_logits, write_assistant, write_gemma4
from click.testing import CliRunner
from sealed_heads import planned

import edgekit
from edgekit.artifact.export import export
from edgekit.cli import command
from edgekit.contracts.engine import Chunk
from edgekit.contracts.feeding import feed
from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.contracts.recipe import named_recipe
from edgekit.errors import EdgekitError, Unsupported
from edgekit.formats.safetensors import TensorFolder
from edgekit.methods.drafters.assistant_decoder import AssistantDecoder, CachedText
from edgekit.methods.drafters.assistant_drafter import AssistantDrafting
from edgekit.model import assistant
from edgekit.model.head_spec import HeadSpec
from edgekit.runtime.generation.sampling import Sampler, Sampling
from edgekit.runtime.speculation.draft_method import DraftRequest
from edgekit.runtime.speculation.hidden_log import HiddenLog

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


def test_executorch_and_server_bundles_refuse_it_in_one_line(model: Path, head: Path) -> None:
    with pytest.raises(EdgekitError, match="executorch") as raised:
        planned(model, head, target="executorch")
    assert "layers of gemma4_text are not supported" in str(raised.value)
    asked = ["handover", str(model), "--to", "vllm", "--gpu", "L4", "--context", "64"]
    done = CliRunner().invoke(command, [*asked, "--drafter", str(head)])
    assert isinstance(done.exception, Unsupported) and "no bundle with an assistant" in str(done.exception)
    assert "\n" not in str(done.exception)


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
    monkeypatch.setattr(HeadSpec, "read_tokens", 9)
    head = write_assistant(tmp_path / "head", model, clusters=clusters)
    made = export(planned(model, head, recipe=named_recipe("float32")), tmp_path / "made")
    draw = np.random.default_rng(1)
    tokens, drafted = draw.integers(0, VOCABULARY, 60).tolist(), draw.integers(0, VOCABULARY, 4).tolist()
    decoder = AssistantDecoder(made.open_head())
    found = []
    with edgekit.open(made.folder, kv_bits=bits) as runtime:
        state = runtime.engine.start(made.plan.storage.model_copy(update={"kv_bits": bits}))
        feed(runtime.engine, state, tokens[:-1])
        row = np.empty((1, runtime.engine.capabilities.feature_width), np.float32)
        runtime.engine.forward([Chunk(state, tokens[-1:], 1, features=row)])
        first = hidden = decoder.combine(row)[0]
        for token in drafted:
            hidden, normed = decoder.forward(CachedText.of(state), token, hidden)
            found.append(decoder.logits(normed))
        layers = {"full_attention": FULL, "sliding_attention": SLIDING}
        kv = {kind: state.cached(layer, 0, 60) for kind, layer in layers.items()}
        embedded = state.embedded(drafted)
        with TensorFolder.open(model) as whole:
            rows = 8 * whole.floats("model.embed_tokens.weight", np.array(drafted))
        np.testing.assert_allclose(embedded, rows, rtol=1e-6)
        expected = torch_logits(head, rows, first, kv, 60)[:, decoder.targets]
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


@pytest.mark.onnx
@pytest.mark.quantize
@pytest.mark.parametrize("clusters", [None, CLUSTERS])
def test_a_draft_is_that_of_transformers_own_generation(model: Path, tmp_path: Path, clusters: int | None) -> None:
    """With hidden states, keys and values as transformers' own target hands them over after a text."""
    pytest.importorskip("torch")
    pytest.importorskip("onnxruntime")
    head = write_assistant(tmp_path / "head", model, clusters=clusters)
    made = export(planned(model, head, recipe=named_recipe("float32")), tmp_path / "made")
    tokens = np.random.default_rng(2).integers(0, 300, 31).tolist()
    with edgekit.open(made.folder, exact=True) as runtime:
        state, log = runtime.engine.start(made.plan.storage), HiddenLog(made.plan.drafter.width)
        request = DraftRequest(
            tokens, Sampler(Sampling(), VOCABULARY), KVEvictionPolicy(), 64, lambda: state, hidden=log
        )
        drafter = AssistantDrafting(AssistantDecoder(made.open_head()), one_s=1.0).start(request)
        runtime.engine.forward([Chunk(state, tokens[:30], 0, features=log.ask(30, 31))])
        log.keep(30)
        assert list(drafter.propose(tokens, 5)) == torch_draft(model, head, tokens, 5)
        drafter.close()
        state.close()
