"""EmbeddingGemma's attention in both directions, its windows and its dense layers equal transformers'."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_encoders import DENSE, WORDS, dense_vectors, hidden_states, unit, write_bert, write_embedding_gemma
from tiny_models import DEVICE, artifact_of

import edgekit
from edgekit.artifact.artifact import open_artifact
from edgekit.contracts.recipe import named_recipe
from edgekit.errors import DoesNotFit, EdgekitError, InvalidOption, Unsupported
from edgekit.model.source import open_source
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.plugins import load_target
from edgekit.runtime.runtime import Runtime

pytestmark = pytest.mark.quantize


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedding_gemma(tmp_path_factory.mktemp("models") / "gemma", seed=3, matryoshka_dimensions=[32, 16])


@pytest.fixture(scope="module")
def exact(gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(gemma, tmp_path_factory.mktemp("exact") / "a", "float32", context=64)


def texts(count: int) -> list[str]:
    """Texts shorter and much longer than a window."""
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(WORDS, int(draw.integers(1, 60)))).replace(" ##", "") for _ in range(count)]


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


def test_vectors_equal_transformers(gemma: Path, exact: Path) -> None:
    with edgekit.open(exact) as runtime:
        given = texts(24)
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


def test_the_far_end_of_a_text_matters_through_global_layers_only(gemma: Path, exact: Path, tmp_path: Path) -> None:
    """Without global layers, tokens beyond all windows together change nothing: masks hold in both directions."""
    folder = write_embedding_gemma(tmp_path / "near", num_hidden_layers=2, layer_types=["sliding_attention"] * 2)
    with edgekit.open(artifact_of(folder, tmp_path / "a", "float32", context=64)) as near, edgekit.open(exact) as far:
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
        given = texts(4)
        assert np.abs(runtime.embed(given) - unit(expected(folder, runtime, given))).max() < 1e-5


@pytest.mark.parametrize(("recipe", "least"), [("s8", 0.98), ("s4-g32", 0.7)])
def test_integers_keep_the_direction(gemma: Path, exact: Path, tmp_path: Path, recipe: str, least: float) -> None:
    artifact = artifact_of(gemma, tmp_path / "a", recipe, context=64)
    with edgekit.open(exact) as one, edgekit.open(artifact) as other:
        given = texts(12)
        assert (one.embed(given) * other.embed(given)).sum(1).min() > least
    plan = open_artifact(artifact).plan
    found = {name: values.shape for name, values in load_target("onnx").weights(plan, artifact)}
    assert found == {tensor.name: tensor.shape for tensor in plan.model.tensors()}


def test_plans_have_no_cache_and_other_targets_refuse(gemma: Path) -> None:
    plan = edgekit.plan(str(gemma), DEVICE)
    assert (plan.target, plan.backend, plan.recipe.name) == ("onnx", "cpu", "s8")
    assert plan.estimate.kv_bytes == 0 and plan.context == plan.chunk_tokens == 64
    for name in ("mlx", "llamacpp", "executorch"):
        with pytest.raises((Unsupported, DoesNotFit), match=r"encoder|nothing to offer"):
            make_plans(str(gemma), [DEVICE], PlanRequest(target=name, recipe=named_recipe("s8")))


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
