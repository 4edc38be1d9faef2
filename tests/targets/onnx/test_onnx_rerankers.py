"""Rerankers on onnx score as transformers does, alone and in batches; other models are refused by name."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_models import artifact_of, write_tiny
from tiny_rerankers import (
    AFTER,
    cross_encoder_logits,
    qwen3_scores,
    qwen3_tokens,
    write_cross_encoder,
    write_qwen3_reranker,
)

import edgekit
from edgekit.artifact.artifact import open_artifact
from edgekit.errors import ContextExceeded, InvalidInput, InvalidOption, Unsupported
from edgekit.plugins import load_target
from edgekit.runtime.reading_request import ReadingJob
from edgekit.runtime.reranking import Ranked

pytestmark = pytest.mark.quantize

QUERY = "where is the cat"
DOCUMENTS = ["the cat sat on the mat. " * 6, "a", "naïve façade", "stop the cat", "the mat", "日本語 " * 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_reranker(tmp_path_factory.mktemp("models") / "Qwen3-Reranker-tiny", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def exact(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(model, tmp_path_factory.mktemp("exact") / "a", "float32", context=700)


def in_order(ranked: list[Ranked]) -> list[float]:
    assert [each.score for each in ranked] == sorted((each.score for each in ranked), reverse=True)
    return [each.score for each in sorted(ranked, key=lambda each: each.index)]


@pytest.mark.parametrize("instruction", [None, "Find the cat"])
def test_scores_are_those_of_the_model_card(model: Path, exact: Path, instruction: str | None) -> None:
    asked = {} if instruction is None else {"instruction": instruction}
    expected = qwen3_scores(model, [qwen3_tokens(model, QUERY, each, **asked) for each in DOCUMENTS])
    assert max(expected) - min(expected) > 0.01
    with edgekit.open(exact, sequences=3) as runtime:
        found = runtime.rerank(QUERY, DOCUMENTS, instruction=instruction)
        assert np.abs(np.array(in_order(found)) - expected).max() < 1e-5
        alone = [runtime.rerank(QUERY, [each], instruction=instruction)[0].score for each in DOCUMENTS]
        assert np.abs(np.array(alone) - expected).max() < 1e-5
        assert runtime.rerank(QUERY, DOCUMENTS, instruction=instruction, top_n=2) == found[:2]


def test_an_answer_is_written_meanwhile_and_other_loops_rank_too(exact: Path) -> None:
    with edgekit.open(exact, sequences=3) as runtime:
        stream = runtime.submit("the cat", max_tokens=8)
        job = runtime.submit_rerank(QUERY, DOCUMENTS[:2])
        assert isinstance(job, ReadingJob) and len(job.tokens) == 2
        expected = job.ranked()
        assert len(stream.answer().tokens) == 8

    async def ranked() -> list[Ranked]:
        async with await edgekit.AsyncRuntime.open(exact) as runtime:
            return await runtime.rerank(QUERY, DOCUMENTS[:2])

    assert in_order(asyncio.run(ranked())) == pytest.approx(in_order(expected), abs=1e-6)


@pytest.mark.parametrize("recipe", ["s8", "s4-g32"])
def test_integers_score_nearly_alike(model: Path, exact: Path, tmp_path: Path, recipe: str) -> None:
    with edgekit.open(exact) as one, edgekit.open(artifact_of(model, tmp_path / "a", recipe, context=700)) as other:
        scores = [in_order(each.rerank(QUERY, DOCUMENTS)) for each in (one, other)]
    assert np.abs(np.array(scores[0]) - scores[1]).max() < (0.05 if recipe == "s8" else 0.5)


def test_long_documents_are_refused_or_cut_before_the_end_of_the_prompt(model: Path, exact: Path) -> None:
    long = "the cat sat on the mat. " * 90
    with edgekit.open(exact) as runtime:
        with pytest.raises(ContextExceeded, match="allow `truncate`"):
            runtime.rerank(QUERY, [long])
        whole, end = qwen3_tokens(model, QUERY, long), len(runtime.codec.encode(AFTER, add_special_tokens=False))
        expected = qwen3_scores(model, [[*whole[: 700 - end], *whole[-end:]]])
        assert runtime.rerank(QUERY, [long], truncate=True)[0].score == pytest.approx(expected[0], abs=1e-5)
        with pytest.raises(ContextExceeded):
            runtime.rerank(long, ["a"], truncate=True)


def test_calls_that_cannot_be_honoured_are_refused(exact: Path, tmp_path: Path) -> None:
    with edgekit.open(exact) as runtime:
        for documents in ("the cat", [], [3]):
            with pytest.raises(InvalidInput, match="documents: "):
                runtime.rerank(QUERY, documents)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="document 1 is empty"):
            runtime.rerank(QUERY, ["a", ""])
        with pytest.raises(InvalidInput, match="query"):
            runtime.rerank([3], ["a"])  # type: ignore[arg-type]
        for top_n in (0, 1.5, True):
            with pytest.raises(InvalidOption, match="top_n"):
                runtime.rerank(QUERY, ["a"], top_n=top_n)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="top_k"):
            runtime.rerank(QUERY, ["a"], top_k=3)  # type: ignore[call-arg]
    plain = write_tiny(tmp_path / "plain", model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    with (
        edgekit.open(artifact_of(plain, tmp_path / "a")) as runtime,
        pytest.raises(Unsupported, match="this model is no reranker"),
    ):
        runtime.rerank(QUERY, ["a"])


PAIRS = ["the cat sat on the mat. " * 5, "a", "dog ran", "naive cats", "the hill.", "a dog sat over the hill " * 4]


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cross_encoder(tmp_path_factory.mktemp("models") / "cross")


@pytest.fixture(scope="module")
def exact_cross(cross: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(cross, tmp_path_factory.mktemp("exact") / "a", "float32", context=64)


def test_a_cross_encoder_scores_as_transformers_does(cross: Path, exact_cross: Path) -> None:
    logits = np.array(cross_encoder_logits(cross, QUERY, PAIRS))
    assert logits.max() - logits.min() > 0.1
    with edgekit.open(exact_cross) as runtime:
        found = np.array(in_order(runtime.rerank(QUERY, PAIRS)))
        assert np.abs(found - 1 / (1 + np.exp(-logits))).max() < 1e-5
        assert runtime.metrics().steps < len(PAIRS), "pairs did not run together"
        alone = [runtime.rerank(QUERY, [each])[0].score for each in PAIRS]
        assert np.abs(np.array(alone) - found).max() < 1e-6
        long = "the cat sat on " * 30
        with pytest.raises(ContextExceeded):
            runtime.rerank(QUERY, [long])
        with pytest.raises(ContextExceeded):
            runtime.rerank("the cat sat " * 20 + "a", ["a cat"], truncate=True)  # 61 tokens and three special ones
        with pytest.raises(InvalidInput, match="half a surrogate pair"):
            runtime.rerank(QUERY, ["a \ud800"])
        cut = cross_encoder_logits(cross, QUERY, [long], most=64)[0]
        assert runtime.rerank(QUERY, [long], truncate=True)[0].score == pytest.approx(1 / (1 + np.exp(-cut)), abs=1e-5)
        with pytest.raises(Unsupported, match="is an encoder, which writes no text; use rerank"):
            runtime.generate(QUERY)
        with pytest.raises(InvalidOption, match="instruction: this model takes none"):
            runtime.rerank(QUERY, PAIRS, instruction="Find cats")


def test_a_score_is_the_logit_itself_where_the_config_says_so(cross: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(cross, tmp_path / "cross")
    config = json.loads((folder / "config.json").read_text())
    identity = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"}
    (folder / "config.json").write_text(json.dumps(config | {"sentence_transformers": identity}))
    with edgekit.open(artifact_of(folder, tmp_path / "a", "float32", context=64)) as runtime:
        found = in_order(runtime.rerank(QUERY, PAIRS))
    assert np.abs(np.array(found) - cross_encoder_logits(cross, QUERY, PAIRS)).max() < 1e-4


def test_a_cross_encoder_in_eight_bits_keeps_its_tensors_and_nearly_its_scores(
    cross: Path, exact_cross: Path, tmp_path: Path
) -> None:
    plan = edgekit.plan(str(cross), "laptop-x86-16gb")
    assert (plan.target, plan.recipe.name, plan.context) == ("onnx", "s8", 96)
    artifact = artifact_of(cross, tmp_path / "s8", "s8", context=64)
    with edgekit.open(exact_cross) as one, edgekit.open(artifact) as other:
        scores = [in_order(each.rerank(QUERY, PAIRS)) for each in (one, other)]
    assert np.abs(np.array(scores[0]) - scores[1]).max() < 0.05
    sealed = open_artifact(artifact)
    found = {name: values.shape for name, values in load_target("onnx").weights(sealed.plan, artifact)}
    assert found == {tensor.name: tensor.shape for tensor in sealed.plan.model.tensors()}
