"""Encoders, EmbeddingGemma and rerankers on onnxruntime: vectors and scores of transformers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_encoders import (
    DENSE,
    WORDS,
    dense_vectors,
    hidden_states,
    unit,
    write_bert,
    write_embedding_gemma,
    write_modules,
)
from tiny_models import DEVICE, artifact_of, write_tiny
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
from edgekit.contracts.engine import Chunk
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import RECIPES, named_recipe
from edgekit.errors import (
    ContextExceeded,
    DamagedArtifact,
    DoesNotFit,
    EdgekitError,
    InvalidInput,
    InvalidOption,
    TargetFailed,
    Unsupported,
)
from edgekit.model.source import open_source
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.plugins import load_target
from edgekit.runtime.reading_request import ReadingJob
from edgekit.runtime.reranking import Ranked
from edgekit.runtime.runtime import Runtime

pytestmark = pytest.mark.quantize


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("models") / "bert")


def artifact_in_floats(model: str, context: int = 64) -> Any:
    """A fixture: the artifact of a model that another one gives."""

    @pytest.fixture(scope="module")
    def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
        place = tmp_path_factory.mktemp("exact") / "a"
        return artifact_of(request.getfixturevalue(model), place, "float32", context=context)

    return made


exact, exact_gemma, exact_cross = map(artifact_in_floats, ("bert", "gemma", "cross"))
exact_ranker = artifact_in_floats("model", 700)


def texts(count: int, most: int = 50) -> list[str]:
    """Texts of fewer than `most` words: with 60, some are much longer than a window."""
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(WORDS, int(draw.integers(1, most)))).replace(" ##", "") for _ in range(count)]


@pytest.mark.parametrize("model", ["bert", "gemma"])
def test_a_plan_has_no_cache_takes_eight_bits_and_other_targets_refuse(
    request: pytest.FixtureRequest, model: str
) -> None:
    folder = str(request.getfixturevalue(model))
    plan = edgekit.plan(folder, DEVICE)
    assert (plan.target, plan.backend, plan.recipe.name) == ("onnx", "cpu", "s8")
    assert plan.estimate.kv_bytes == 0 and plan.context == plan.chunk_tokens == 64
    others = {each.target: each.reason for each in plan.rejected if each.target != "onnx"}
    assert {"executorch", "llamacpp"} <= others.keys()
    assert all("offer" in reason for reason in others.values())
    assert Plan.model_validate_json(plan.to_json()) == plan
    for name in ("mlx", "llamacpp", "executorch"):
        with pytest.raises((Unsupported, DoesNotFit), match=r"encoder|nothing to offer"):
            make_plans(folder, [DEVICE], PlanRequest(target=name, recipe=named_recipe("s8")))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_equal_transformers(bert: Path, exact: Path, pooling: Any) -> None:
    with edgekit.open(exact) as runtime:
        given = texts(30)
        tokens = [runtime.encode(text) for text in given]
        states = hidden_states(bert, tokens)
        expected = unit(np.stack([each.mean(0) if pooling == "mean" else each[0] for each in states]))
        vectors = runtime.embed(given, pooling=pooling)
        assert runtime.metrics().steps < len(given), "texts did not run together"
        assert np.abs(vectors - expected).max() < 1e-5
        if pooling == "mean":  # as its own files say
            assert (runtime.embed(given) == vectors).all()
        alone = np.concatenate([runtime.embed([text], pooling=pooling) for text in given])
        assert np.abs(alone - vectors).max() < 1e-5


def test_prompts_are_put_before_texts(exact: Path) -> None:
    with edgekit.open(exact) as runtime:
        with_prompt = runtime.embed(["dog ran"], prompt="query")
        assert (with_prompt == runtime.embed(["the cat dog ran"])).all()
        assert (runtime.embed(["dog ran"], prompt="document") == runtime.embed(["dog ran"])).all()


def test_long_texts_are_refused_or_cut_before_the_last_special_token(exact: Path) -> None:
    with edgekit.open(exact) as runtime:
        long = "the cat sat on " * 30
        with pytest.raises(ContextExceeded, match="122 tokens"):
            runtime.embed([long])
        tokens = runtime.encode(long)
        cut = runtime.embed([[*tokens[:63], tokens[-1]]])
        assert (runtime.embed([long], truncate=True) == cut).all()


def test_unsupported_calls_of_an_encoder_are_refused_by_name(exact: Path, bert: Path, tmp_path: Path) -> None:
    with edgekit.open(exact) as runtime:
        with pytest.raises(Unsupported, match="generate: this model is an encoder"):
            runtime.generate("the cat")
        engine = runtime.engine
        state = engine.start(runtime.kv_config)
        with pytest.raises(Unsupported, match="no logits"):
            engine.forward([Chunk(state, [2, 3], 1)])
        state = engine.start(runtime.kv_config)
        engine.forward([Chunk(state, [2, 3], 2, hidden=True)])
        with pytest.raises(InvalidInput, match="reads a text whole"):
            engine.forward([Chunk(state, [2, 3], 2, hidden=True)])
    with pytest.raises(Unsupported, match="exact"):
        edgekit.open(exact, exact=True)
    with pytest.raises(DoesNotFit, match="private memory are needed"):
        edgekit.open(exact, memory="20MiB")
    for recipe, options in (("s8", {"method": "gptq", "calibrate": "default"}), ("balanced", {})):
        with pytest.raises(Unsupported, match="is an encoder, which is rounded to the nearest"):
            edgekit.quantize(str(bert), RECIPES[recipe], tmp_path / "out", **options)


def test_an_encoder_is_interrupted(exact: Path) -> None:
    with edgekit.open(exact) as runtime:
        engine: Any = runtime.engine
        state = engine.start(runtime.kv_config)
        engine._options.terminate()  # not `interrupt`, after which no call reaches onnxruntime
        with pytest.raises(TargetFailed, match="terminate flag"):
            engine.forward([Chunk(state, [2, 3], 2, hidden=True)])


def test_a_graph_of_another_kind_is_refused(exact: Path, tmp_path: Path) -> None:
    import onnx

    copy = tmp_path / "copy"
    shutil.copytree(exact, copy)
    graph = onnx.load_model(copy / "encoder.onnx", load_external_data=False)
    graph.graph.node[5].op_type = "Loop"
    (copy / "encoder.onnx").write_bytes(graph.SerializeToString())
    plan = open_artifact(exact).plan
    with pytest.raises(DamagedArtifact, match="uses the operator"):
        load_target("onnx").open(plan, copy)


def test_decoders_embed_by_their_last_token(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "qwen", model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    write_modules(folder, "", steps=("Transformer", "Pooling", "Normalize"))
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    assert open_source(folder).spec.embedding is not None
    with edgekit.open(artifact_of(folder, tmp_path / "a", "float32"), sequences=2) as runtime:
        given = ["the cat sat on the mat. " * 4, "a", "naïve façade"]
        tokens: Sequence[Sequence[int]] = [runtime.encode("the cat " + text) for text in given]
        expected = unit(np.stack([each[-1] for each in hidden_states(folder, tokens)]))
        stream = runtime.submit("the cat", max_tokens=8)
        assert np.abs(runtime.embed(given, prompt="query") - expected).max() < 1e-4
        assert len(stream.answer().tokens) == 8


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedding_gemma(tmp_path_factory.mktemp("models") / "gemma", seed=3, matryoshka_dimensions=[32, 16])


def expected(folder: Path, runtime: Runtime, given: list[str]) -> NDArray[np.float32]:
    states = hidden_states(folder, [runtime.encode(text) for text in given])
    return dense_vectors(folder, np.stack([each.mean(0) for each in states]))


def test_tensors_and_parameters_are_those_of_transformers(gemma: Path) -> None:
    transformers = pytest.importorskip("transformers")
    spec = open_source(gemma, need_weights=True).spec
    model = transformers.Gemma3TextModel.from_pretrained(gemma)
    names = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    dense = {"2_Dense.linear.weight": (96, 64), "3_Dense.linear.weight": (48, 96)}
    assert {tensor.name.removeprefix(spec.prefix): tensor.shape for tensor in spec.tensors()} == names | dense
    assert [layer.window for layer in spec.layers] == [9, 9, None, 9] and spec.vector_size == 48


def test_vectors_equal_transformers_onnx_embedding_gemma(gemma: Path, exact_gemma: Path) -> None:
    with edgekit.open(exact_gemma) as runtime:
        given = texts(24, 60)
        assert max(len(runtime.encode(text)) for text in given) > 40
        vectors, wanted = runtime.embed(given), expected(gemma, runtime, given)
        assert vectors.shape == (24, 48) and runtime.metrics().steps < len(given)
        assert np.abs(vectors - unit(wanted)).max() < 1e-5
        alone = np.concatenate([runtime.embed([text]) for text in given])
        assert np.abs(alone - vectors).max() < 1e-5
        assert np.abs(runtime.embed(given, dimensions=16) - unit(wanted[:, :16])).max() < 1e-5
        assert (runtime.embed(["dog"], prompt="query") == runtime.embed(["the cat dog"])).all()
        for options, said in (({"dimensions": 8}, "was trained for 32, 16"), ({"pooling": "max"}, "dense layers")):
            with pytest.raises(InvalidOption, match=said):
                runtime.embed(given, **options)  # type: ignore[arg-type]
        with pytest.raises(Unsupported, match="is an encoder"):
            runtime.generate("the cat")


def test_the_far_end_of_a_text_matters_through_global_layers_only(
    gemma: Path, exact_gemma: Path, tmp_path: Path
) -> None:
    """Without global layers, tokens beyond all windows together change nothing: masks hold in both directions."""
    folder = write_embedding_gemma(tmp_path / "near", num_hidden_layers=2, layer_types=["sliding_attention"] * 2)
    with (
        edgekit.open(artifact_of(folder, tmp_path / "a", "float32", context=64)) as near,
        edgekit.open(exact_gemma) as far,
    ):
        one, other = ([5] * 40 + [6] * 20), ([5] * 40 + [7] * 20)
        for runtime, is_alike in ((near, True), (far, False)):
            first, second = (runtime.embed([each], pooling="cls")[0] for each in (one, other))
            assert np.allclose(first, second, atol=1e-6) is is_alike
            first, second = (runtime.embed([each[::-1]], pooling="last")[0] for each in (one, other))
            assert np.allclose(first, second, atol=1e-6) is is_alike


def test_dense_layers_follow_the_pooling_of_a_bert_too(gemma: Path, tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "bert")
    for name in DENSE:
        shutil.copytree(gemma / name, folder / name)
    shutil.copy(gemma / "modules.json", folder)
    with edgekit.open(artifact_of(folder, tmp_path / "a", "float32", context=64)) as runtime:
        given = texts(4, 60)
        assert np.abs(runtime.embed(given) - unit(expected(folder, runtime, given))).max() < 1e-5


@pytest.mark.parametrize(
    ("model", "recipe", "least"), [("bert", "s8", 0.98), ("gemma", "s8", 0.98), ("gemma", "s4-g32", 0.7)]
)
def test_integers_keep_the_direction(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, recipe: str, least: float
) -> None:
    folder, exact = (request.getfixturevalue(name) for name in (model, "exact" if model == "bert" else "exact_gemma"))
    artifact = artifact_of(folder, tmp_path / "a", recipe, context=64)
    with edgekit.open(exact) as one, edgekit.open(artifact) as other:
        given = texts(12, 60)
        assert (one.embed(given) * other.embed(given)).sum(1).min() > least
    plan = open_artifact(artifact).plan
    found = {name: values.shape for name, values in load_target("onnx").weights(plan, artifact)}
    assert found == {tensor.name: tensor.shape for tensor in plan.model.tensors()}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"in_features": 63}, "in_features: 63 is not 64"),
        ({"activation_function": "torch.nn.modules.activation.Tanh"}, "Tanh' is not supported"),
        ({"activation_function": None}, "activation_function: .* is not supported"),
        ({"module_input_name": "token_embeddings"}, "module_input_name: .* is not supported"),
        ({"residual": True}, "residual: .* is not a known field"),
        ({"out_features": 97}, "in_features: 96 is not 97"),
    ],
)
def test_other_dense_layers_are_refused(gemma: Path, tmp_path: Path, changed: dict[str, object], said: str) -> None:
    folder = shutil.copytree(gemma, tmp_path / "gemma")
    path = folder / "2_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(EdgekitError, match=said):
        open_source(folder)


def test_dense_layers_belong_after_the_pooling_of_an_encoder(gemma: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(gemma, tmp_path / "gemma")
    modules, config = folder / "modules.json", folder / "config.json"
    steps, stated = json.loads(modules.read_text()), json.loads(config.read_text())
    for changed, said in (
        ([steps[0], *steps[2:4], steps[1]], "in the order"),
        ([*steps[:2], steps[2], steps[2]], "not that of another dense layer"),
        ([*steps[:2], {**steps[2], "path": "../2_Dense"}], "not that of another dense layer"),
        ([*steps[:3]], "not in a gemma3_text model: 3_Dense"),
    ):
        modules.write_text(json.dumps(changed))
        with pytest.raises(EdgekitError, match=said):
            open_source(folder)
    modules.write_text(json.dumps(steps))
    config.write_text(json.dumps(stated | {"use_bidirectional_attention": False}))
    with pytest.raises(Unsupported, match="step Dense is only supported in encoders"):
        open_source(folder)
    config.write_text(json.dumps(stated | {"attention_sinks": 4}))
    with pytest.raises(Unsupported, match=r"attention_sinks: .* is not a known field"):
        open_source(folder)


QUERY = "where is the cat"
DOCUMENTS = ["the cat sat on the mat. " * 6, "a", "naïve façade", "stop the cat", "the mat", "日本語 " * 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_reranker(tmp_path_factory.mktemp("models") / "Qwen3-Reranker-tiny", max_position_embeddings=1024)


def in_order(ranked: list[Ranked]) -> list[float]:
    assert [each.score for each in ranked] == sorted((each.score for each in ranked), reverse=True)
    return [each.score for each in sorted(ranked, key=lambda each: each.index)]


@pytest.mark.parametrize("instruction", [None, "Find the cat"])
def test_scores_are_those_of_the_model_card(model: Path, exact_ranker: Path, instruction: str | None) -> None:
    asked = {} if instruction is None else {"instruction": instruction}
    expected = qwen3_scores(model, [qwen3_tokens(model, QUERY, each, **asked) for each in DOCUMENTS])
    assert max(expected) - min(expected) > 0.01
    with edgekit.open(exact_ranker, sequences=3) as runtime:
        found = runtime.rerank(QUERY, DOCUMENTS, instruction=instruction)
        assert np.abs(np.array(in_order(found)) - expected).max() < 1e-5
        alone = [runtime.rerank(QUERY, [each], instruction=instruction)[0].score for each in DOCUMENTS]
        assert np.abs(np.array(alone) - expected).max() < 1e-5
        assert runtime.rerank(QUERY, DOCUMENTS, instruction=instruction, top_n=2) == found[:2]


def test_an_answer_is_written_meanwhile_and_other_loops_rank_too(exact_ranker: Path) -> None:
    with edgekit.open(exact_ranker, sequences=3) as runtime:
        stream = runtime.submit("the cat", max_tokens=8)
        job = runtime.submit_rerank(QUERY, DOCUMENTS[:2])
        assert isinstance(job, ReadingJob) and len(job.tokens) == 2
        expected = job.ranked()
        assert len(stream.answer().tokens) == 8

    async def ranked() -> list[Ranked]:
        async with await edgekit.AsyncRuntime.open(exact_ranker) as runtime:
            return await runtime.rerank(QUERY, DOCUMENTS[:2])

    assert in_order(asyncio.run(ranked())) == pytest.approx(in_order(expected), abs=1e-6)


@pytest.mark.parametrize("recipe", ["s8", "s4-g32"])
def test_integers_score_nearly_alike(model: Path, exact_ranker: Path, tmp_path: Path, recipe: str) -> None:
    with (
        edgekit.open(exact_ranker) as one,
        edgekit.open(artifact_of(model, tmp_path / "a", recipe, context=700)) as other,
    ):
        scores = [in_order(each.rerank(QUERY, DOCUMENTS)) for each in (one, other)]
    assert np.abs(np.array(scores[0]) - scores[1]).max() < (0.05 if recipe == "s8" else 0.5)


def test_long_documents_are_refused_or_cut_before_the_end_of_the_prompt(model: Path, exact_ranker: Path) -> None:
    long = "the cat sat on the mat. " * 90
    with edgekit.open(exact_ranker) as runtime:
        with pytest.raises(ContextExceeded, match="allow `truncate`"):
            runtime.rerank(QUERY, [long])
        whole, end = qwen3_tokens(model, QUERY, long), len(runtime.codec.encode(AFTER, add_special_tokens=False))
        expected = qwen3_scores(model, [[*whole[: 700 - end], *whole[-end:]]])
        assert runtime.rerank(QUERY, [long], truncate=True)[0].score == pytest.approx(expected[0], abs=1e-5)
        with pytest.raises(ContextExceeded):
            runtime.rerank(long, ["a"], truncate=True)


def test_calls_that_cannot_be_honoured_are_refused(exact_ranker: Path, tmp_path: Path) -> None:
    with edgekit.open(exact_ranker) as runtime:
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
