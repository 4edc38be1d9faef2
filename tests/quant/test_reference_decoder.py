"""The reference decoder equals transformers for every exported family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")


from fnmatch import fnmatchcase

import family_models as models
import tiny_models
import torch
import transformers

from edgekit.artifact.export import ExportOptions, export
from edgekit.common.content_store import ContentStore
from edgekit.contracts.recipe import RECIPES, Format, Recipe, Rule, named_recipe
from edgekit.formats.safetensors import TensorFolder
from edgekit.model.source import open_tensors
from edgekit.model.tensors import Tensor
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.plugins import load_target
from edgekit.quant import reference_decoder as decoder
from edgekit.quant.pipeline import neutral_weights
from edgekit.quant.random_weights import random_weights
from tests.helpers.configs import TINY

pytestmark = pytest.mark.quantize


@pytest.mark.parametrize("family", models.EVERY)
def test_reference_decoder_equals_transformers(tmp_path: Path, family: str) -> None:
    kind, config = models.EVERY[family]
    models.write_model(tmp_path, kind, config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    spec, stored = models.spec_of(tmp_path), open_tensors(tmp_path)
    tokens = list(models.tokens_of(40))
    expected = models.logits_of(theirs, tokens)
    found = decoder.logits(spec, lambda name: torch.from_numpy(stored.floats(name)), tokens).numpy()
    assert np.abs(found - expected).max() / np.abs(expected).max() < 1e-5


def test_batched_texts_equal_single_texts(tmp_path: Path) -> None:
    kind, config = models.FAMILIES["gemma3"]
    models.write_model(tmp_path, kind, config)
    spec, stored = models.spec_of(tmp_path), TensorFolder.open(tmp_path)

    def tensor(name: str) -> torch.Tensor:
        return torch.from_numpy(stored.floats(name))

    texts = torch.tensor([models.tokens_of(24, seed=1), models.tokens_of(24, seed=2)])
    both = decoder.logits(spec, tensor, texts)
    for row, text in zip(both, texts, strict=True):
        torch.testing.assert_close(row, decoder.logits(spec, tensor, text), rtol=1e-5, atol=1e-5)


def test_every_input_of_every_linear_is_observed_once(tmp_path: Path) -> None:
    for family in ("llama", "phi3"):
        kind, config = models.EVERY[family]
        models.write_model(tmp_path / family, kind, config)
        spec, stored = models.spec_of(tmp_path / family), TensorFolder.open(tmp_path / family)
        seen: dict[str, tuple[int, ...]] = {}

        def observe(name: str, inputs: torch.Tensor, seen: dict[str, tuple[int, ...]] = seen) -> None:
            assert name not in seen
            seen[name] = tuple(inputs.shape)

        tensors = decoder.layer_tensors(
            spec,
            1,
            lambda name, stored=stored: torch.from_numpy(stored.floats(name)),  # type: ignore[misc]
        )
        decoder.layer_forward(spec, 1, tensors, torch.randn(2, 5, spec.hidden_size), decoder.Hooks(observe))
        linears = {name.removesuffix(".weight") for name, value in tensors.items() if value.ndim == 2}
        assert set(seen) == linears
        for name, shape in seen.items():
            assert shape == (2, 5, tensors[f"{name}.weight"].shape[1])


NEEDS = {"onnx": "onnxruntime", "mlx": "mlx.core", "executorch": "executorch"}


S8 = Format(kind="s8")


SPLIT = Recipe(
    name="split",
    rules=(
        Rule(pattern="*.0.self_attn.v_proj", format=S8),
        Rule(pattern="*.1.self_attn.q_proj", format=S8),
        Rule(pattern="*.mlp.up_proj", format=S8),
        *RECIPES["s4-g32"].rules,
    ),
)


@pytest.mark.parametrize("target", NEEDS)
def test_every_target_packs_the_integers_of_mixed_layers(tmp_path: Path, target: str) -> None:
    pytest.importorskip(NEEDS[target])
    model = tiny_models.write_tiny(tmp_path / "model")
    store, options = ContentStore(tmp_path / "store"), ExportOptions(store=tmp_path / "store")
    wish = PlanRequest(recipe=SPLIT, target=target, context=64)
    artifact = export(make_plans(str(model), ["this-cpu"], wish)[0], tmp_path / "out", options)
    weights = neutral_weights(model, SPLIT, store=store)
    assert artifact.manifest.weights_sha256 == weights.sha256
    assert "quantised matrices read back bit for bit" in artifact.manifest.self_check
    read = dict(load_target(target).weights(artifact.plan, artifact.folder))
    linears = [tensor for tensor in weights.model.tensors() if tensor.role == "linear"]
    assert {str(weights.format_of(tensor.module)) for tensor in linears} == {"s8", "s4-g32"}
    for tensor in linears:
        assert torch.equal(torch.as_tensor(read[tensor.name]), torch.from_numpy(weights.tensor(tensor.name)))


def test_the_first_rule_that_matches_wins() -> None:
    """Rules with and without wildcards in any order give what matching one after the other gives."""
    s4, other = Format(kind="s4", group=32), Format(kind="float16")
    patterns = ["layers.1.up", "*.up", "layers.1.up", "layers.[12].gate", "*.2.gate", "layer?.3.up", "*2.up", "*"]
    formats = [S8, s4, other, s4, S8, other, s4, S8]
    names = ["layers.1.up", "layers.2.up", "layers.1.gate", "layers.2.gate", "layers.3.gate", "layers.3.up"]
    for start in range(len(patterns)):
        rules = tuple(
            Rule(pattern=pattern, format=form) for pattern, form in zip(patterns[start:], formats[start:], strict=True)
        )
        recipe = Recipe(name="rules", rules=rules)
        for name in names:
            first = next(rule.format for rule in rules if fnmatchcase(name, rule.pattern))
            assert recipe.format_of(Tensor(f"{name}.weight", (64, 64), "linear")) == first, (start, name)
    assert Recipe(name="one", rules=rules[:0]).format_of(Tensor("a.weight", (64, 64), "linear")) == other


def test_linears_with_biases_are_written_too(tmp_path: Path) -> None:
    weights = random_weights(tmp_path / "weights", TINY["qwen2"], named_recipe("s8"), "random")
    module = "model.layers.0.self_attn.q_proj"
    outputs = weights.tensor_of(module).shape[0]
    assert weights.scales(module).shape == (outputs, 1)
    assert not weights.floats(f"{module}.bias").any() and weights.floats(f"{module}.bias").shape == (outputs,)


def test_integers_have_no_common_direction(tmp_path: Path) -> None:
    """All outputs would else grow alike, and attention would fall below the smallest normal float."""
    weights = random_weights(tmp_path / "weights", TINY["llama"], named_recipe("s4-g32"), "random")
    matrix = next(each for each in weights.modules() if weights.format_of(each).kind == "s4")
    integers = weights.integers(matrix)
    assert integers.min() == -7 and integers.max() == 7
    spread = integers.std() / integers.size**0.5
    assert abs(integers.mean()) < 4 * spread
