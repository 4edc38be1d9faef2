"""The MTP part of a checkpoint is sealed with rows for likely tokens, computes what its formula says, and drafts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import runtimes
from click.testing import CliRunner
from eagle3_heads import features_of
from mtp_heads import part_alone, torch_mtp_logits, write_mtp_model
from sealed_heads import check_logits, planned, words

import edgekit
from edgekit.artifact.draft_vocabulary import draft_tokens
from edgekit.artifact.export import export
from edgekit.cli import command
from edgekit.contracts.feeding import feed
from edgekit.contracts.recipe import named_recipe
from edgekit.errors import Unsupported
from edgekit.formats.safetensors import TensorFolder
from edgekit.methods.drafters.head_decoder import HeadDecoder
from edgekit.model import mtp
from edgekit.model.source import open_source

DRAFTED = 270  # of the small tokenizer's tokens


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path_factory.getbasetemp() / "home"))
    monkeypatch.setattr(mtp, "DRAFT_TOKENS", DRAFTED)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mtp_model(tmp_path_factory.mktemp("mtp") / "model")


def test_bytes_ends_and_marks_are_draft_tokens_and_then_the_most_frequent(model: Path) -> None:
    spec = open_source(model).spec.model_copy(update={"eos_ids": (3, 299)})
    tokenizer = runtimes.byte_level()
    most = tokenizer.get_vocab_size(with_added_tokens=True)
    tokens = draft_tokens(model, spec, most - 4)
    assert np.array_equal(tokens, np.unique(tokens)) and len(tokens) == most - 4
    single = [token for text, token in tokenizer.get_vocab().items() if len(text) == 1]
    added = list(tokenizer.get_added_tokens_decoder())
    assert len(single) >= 256 and {3, 299, *single, *added} <= set(tokens.tolist())
    text = (Path(mtp.__file__).parents[1] / "quant" / "calibration_text" / "corpus.jsonl").read_text()
    documents = [json.loads(line) for line in text.splitlines()]
    plain = "".join(each["text"] for each in documents if "text" in each)
    times = np.bincount(tokenizer.encode(plain).ids, minlength=spec.vocab_size)
    left_out = np.setdiff1d(np.arange(spec.vocab_size), tokens)
    assert times[left_out].max() <= 5 < times.max()
    assert np.array_equal(draft_tokens(model, spec, spec.vocab_size), np.arange(spec.vocab_size))


@pytest.mark.onnx
@pytest.mark.quantize
@pytest.mark.parametrize("tied", [True, False])
def test_draft_logits_equal_a_plain_torch_reading(tmp_path: Path, tied: bool) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("onnxruntime")
    model = write_mtp_model(tmp_path / "model", tie_word_embeddings=tied, rms_norm_eps=1e-5)
    made = export(planned(model, part_alone(model, tmp_path / "alone"), recipe=named_recipe("float32")), tmp_path / "a")
    with TensorFolder.open(model) as whole:
        table = whole.floats("model.embed_tokens.weight")
        norm = whole.floats("model.norm.weight")
        head = whole.floats("model.embed_tokens.weight" if tied else "lm_head.weight")
    draw = np.random.default_rng(1)
    vocabulary = made.plan.model.vocab_size
    tokens, drafted = draw.integers(0, vocabulary, 90).tolist(), draw.integers(0, vocabulary, 4).tolist()
    with edgekit.open(made.folder, exact=True) as runtime:
        hidden = features_of(runtime.engine, tokens, [64, 25, 1])[:89]
        state = runtime.engine.start(made.plan.storage)
        logits = feed(runtime.engine, state, tokens[:89], 1)[-1]
        expected = torch_mtp_logits(model, {"embedding": table, "norm": norm, "head": head}, hidden, tokens, drafted)
        decoder = HeadDecoder(made.open_head())
        # The part reads what the target's head reads.
        np.testing.assert_allclose(decoder.combine(hidden[-1:])[0] @ head.T, logits, atol=1e-3 * np.abs(logits).max())
        check_logits(decoder, hidden, tokens, drafted, expected, state.embedded)
        decoder.close()
        state.close()


@pytest.mark.onnx
def test_the_command_seals_it_and_the_runtime_finds_it(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    out = tmp_path / "made"
    asked = ["export", str(model), "--target", "onnx", "--recipe", "s4-g32", "--context", "128", "-o", str(out)]
    done = CliRunner().invoke(command, [*asked, "--device", "laptop-x86-16gb", "--drafter", str(model)])
    assert done.exit_code == 0, done.output
    with edgekit.open(out, draft="head") as runtime:
        runtime.generate(words(5, 5), max_tokens=20)
        report = runtime.speculation()
        assert report is not None and [each.name for each in report.proposals] == ["head"]


def test_a_server_bundle_refuses_it_in_one_line(tmp_path: Path) -> None:
    """Hybrids are refused before; a model without recurrent layers is refused for its part."""
    model = write_mtp_model(tmp_path / "dense", layer_types=["full_attention"] * 4)
    asked = ["handover", str(model), "--to", "vllm", "--gpu", "L4", "--context", "64"]
    done = CliRunner().invoke(command, [*asked, "--drafter", str(model)])
    assert isinstance(done.exception, Unsupported) and "from the model's own checkpoint" in str(done.exception)
    assert "\n" not in str(done.exception)
