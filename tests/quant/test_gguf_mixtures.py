"""llama.cpp's own formats: the rules of its mixtures, their bytes, and the importance of each input."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import family_models as models
import shapes
from edgekit_llamacpp import LlamaCppTarget, library
from edgekit_llamacpp.export import Quantiser
from edgekit_llamacpp.layout import WEIGHTS
from engines import llamacpp_model

from edgekit.common.progress import Progress
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.recipe import GGUF_BLOCKS, GGUF_RECIPES, Format, _by_name, named_recipe
from edgekit.contracts.stored_weights import stored_weight_bytes
from edgekit.device.load import load_profile
from edgekit.errors import DoesNotFit, EdgekitError, InvalidInput, TargetMissing
from edgekit.formats.gguf import GgufFile
from edgekit.formats.gguf_types import TYPES, dequantise
from edgekit.formats.gguf_writer import TYPE_IDS, write_gguf
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.plugins import load_target, target_names
from edgekit.quant.calibration import Calibration
from edgekit.quant.gguf_mixtures import mixture_of
from edgekit.quant.importance import mean_squares
from edgekit.quant.neutral_gguf import model_metadata, stored_types, written_tensors

pytestmark = [pytest.mark.llamacpp, pytest.mark.quantize]
runs = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))


def kinds(family: str, name: str) -> dict[str, str]:
    model = llamacpp_model(family).plan.model
    return {name: kind for name, (kind, _) in stored_types(model, mixture_of(model, named_recipe(name)), 64).items()}


def test_blocks_are_those_of_the_file_format() -> None:
    for kind, (values, size) in GGUF_BLOCKS.items():
        stored = TYPES[TYPE_IDS[kind.upper()]]
        assert (stored.values, stored.bytes) == (values, size)
        assert Format(kind=kind).bytes((3, 512)) == 3 * 512 // values * size  # type: ignore[arg-type]


def test_finer_layers_are_those_of_llamacpp() -> None:
    """As in a published Q4_K_M file of 18 layers: 0, 1, 4, 7, 10, 13, 15, 16 and 17."""
    from edgekit.quant.gguf_mixtures import _is_finer

    assert [index for index in range(18) if _is_finer(index, 18)] == [0, 1, 4, 7, 10, 13, 15, 16, 17]
    rules = mixture_of(shapes.spec_of(shapes.LLAMA_32_1B), named_recipe("gguf-q4_k_m")).rules
    matched = [pattern for _, pattern in _by_name(rules).patterns]
    assert len(rules) > 10 and matched == ["*embed_tokens*"], "the rules of layers are found by their ends"


def test_narrow_rows_take_the_types_that_llamacpp_falls_back_to() -> None:
    found = kinds("gemma3", "gguf-q4_k_m")
    assert found["token_embd.weight"] == "Q8_0", "tied: the head's format, of rows that 256 does not divide"
    assert found["blk.0.attn_q.weight"] == "Q5_0" and found["blk.2.attn_v.weight"] == "Q8_0"
    assert found["blk.0.attn_norm.weight"] == "F32"
    wide = Format(kind="q4_k")
    assert wide.fitted(512) == wide and wide.fitted(576).kind == "q5_0"
    assert Format(kind="q5_k").fitted(576).kind == "q5_1" and Format(kind="q6_k").fitted(576).kind == "q8_0"
    assert kinds("phi3", "gguf-q4_k_m")["blk.0.attn_qkv.weight"] == "Q5_1"


@pytest.mark.parametrize("name", [*GGUF_RECIPES, "small"])
def test_offer_counts_the_bytes_of_the_file(name: str) -> None:
    model = shapes.spec_of(shapes.LLAMA_32_1B)
    offer = {each.recipe.name: each for each in LlamaCppTarget().offers(model, load_profile("laptop-x86-8gb"))}[name]
    assert offer.only_by_name and offer.refusal is None
    types = stored_types(model, offer.recipe, 64)
    stored = sum(
        int(np.prod(shape)) // TYPES[TYPE_IDS[kind]].values * TYPES[TYPE_IDS[kind]].bytes
        for kind, shape in types.values()
    )
    assert stored_weight_bytes(model, offer.recipe, offer.memory) == pytest.approx(stored, rel=0.01)
    if name == "small":
        assert 3.49 < stored * 8 / model.parameters < 3.505 and ("Q5_K", (512, 2048)) in types.values()


def test_every_target_holds_or_refuses_them_by_name() -> None:
    with pytest.raises(InvalidInput, match="--target llamacpp has its own as gguf-q4_k_m"):
        named_recipe("Q4_K_M")
    refused = {"llamacpp": "rows of 384 values .* fill no blocks of 256", "mlx": None}
    for target in target_names():
        device = {"executorch": "pixel-9", "mlx": "macbook-m4-16gb"}.get(target, "laptop-x86-16gb")
        if target != "llamacpp":
            with pytest.raises(EdgekitError, match=rf"{target} has nothing to offer here with recipe gguf-q4_k_m"):
                make_plans("demo", [device], PlanRequest(target=target, recipe=named_recipe("gguf-q4_k_m")))
        wish = PlanRequest(target=target, recipe=named_recipe("small"))
        if said := refused.get(target, "no format of 3 bits; mlx and llamacpp hold"):
            with pytest.raises(EdgekitError, match=said):
                make_plans("demo", [device], wish)
            continue
        (plan,) = make_plans("demo", [device], wish)
        assert {str(rule.format) for rule in plan.recipe.rules} == {"s3-g128", "s4-g128"}
        tight = {"memory": plan.estimate.private_bytes, "context": plan.context, "kv_bits": plan.storage.kv_bits}
        with pytest.raises(DoesNotFit, match=rf"; --recipe small fits, on {target} \(~0\.\d+\)$"):
            make_plans("demo", [device], PlanRequest(target=target, **tight))  # type: ignore[arg-type]
        with pytest.raises(DoesNotFit, match="quality ~0"):
            make_plans("demo", [device], wish.model_copy(update={"min_quality": 0.9}))


@runs
def test_small_is_read_back_from_files(tmp_path: Path) -> None:
    models.write_model(tmp_path / "model", "llama", {**models.SMALL, "hidden_size": 256, "intermediate_size": 512})
    weights = models.weights_of(tmp_path / "model", "float32", tmp_path / "store")
    recipe = mixture_of(weights.model, named_recipe("small"))
    tensors = written_tensors(weights, 64, recipe, Quantiser(moments_of(weights)))
    write_gguf(tmp_path / WEIGHTS, model_metadata(weights.model, 64) | {"tokenizer.ggml.model": "none"}, tensors)
    for name, values in LlamaCppTarget().weights(models.plan_for(weights.model, recipe), tmp_path):
        exact = weights.tensor(name)
        assert np.square(values - exact).sum() < 0.06 * np.square(exact).sum(), name


def moments_of(weights: NeutralWeights, progress: Progress = models.quiet) -> dict[str, np.ndarray]:
    tokens = tuple(models.tokens_of(48))
    text = Calibration((tokens[:24], tokens[24:]), None)  # type: ignore[arg-type]
    return mean_squares(weights.model, text, weights.tensor, progress)


def test_mean_squares_are_those_of_the_inputs() -> None:
    import torch

    from edgekit.quant import reference_decoder

    for family in ("llama untied, with biases", "gemma3"):
        weights = llamacpp_model(family, "float32").weights
        found, seen = moments_of(weights), dict[str, torch.Tensor]()
        tokens = torch.tensor(models.tokens_of(48)).reshape(2, 24)
        reference_decoder.logits(
            weights.model,
            lambda name, weights=weights: torch.from_numpy(weights.tensor(name)),
            tokens,
            observe=lambda name, inputs, seen=seen: seen.setdefault(name, inputs),
        )
        assert len(seen) > len(weights.model.layers)
        for name, inputs in seen.items():
            wanted = inputs.flatten(0, -2).square().mean(0).numpy()
            assert np.allclose(found[name], wanted, rtol=1e-4, atol=1e-6)
        head = f"{weights.model.prefix}embed_tokens" if weights.model.tied else weights.model.head
        assert found[head].shape == (weights.model.hidden_size,)


@runs
def test_importance_lowers_the_weighted_error() -> None:
    random = np.random.default_rng(0)
    rows = random.standard_normal((64, 512)).astype(np.float32)
    importance = np.exp(2 * random.standard_normal(512)).astype(np.float32)

    def error(type_name: str, weights: dict[str, np.ndarray]) -> float:
        blocks = Quantiser(weights)(type_name, "m", rows)
        off = dequantise(TYPE_IDS[type_name], blocks, 512) - rows
        return float((off**2 * importance).sum() / (rows**2 * importance).sum())

    for type_name, bound in (("Q4_K", 0.01), ("Q5_K", 0.003), ("Q6_K", 0.001), ("Q5_0", 0.004), ("Q5_1", 0.003)):
        weighted, plain = error(type_name, {"m": importance}), error(type_name, {})
        assert weighted < plain < bound, (type_name, weighted, plain)
    with pytest.raises(InvalidInput, match="not finite"):
        Quantiser({})("Q4_K", "m", np.full((1, 256), np.nan, np.float32))


@runs
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_file_holds_the_mixture_and_runs(family: str, tmp_path: Path) -> None:
    """Permuted rows included: every matrix is read back close to the float model's, and the engine agrees with it."""
    from edgekit_llamacpp.engine import LlamaCppEngine

    from edgekit.contracts.feeding import feed

    made = llamacpp_model(family, "float32")
    recipe = mixture_of(made.plan.model, named_recipe("gguf-q6_k"))
    plan = made.plan.model_copy(update={"recipe": recipe})
    own = Quantiser(moments_of(made.weights))
    tensors = written_tensors(made.weights, plan.context, recipe, own)
    metadata = model_metadata(plan.model, plan.context) | {"tokenizer.ggml.model": "none"}
    write_gguf(tmp_path / WEIGHTS, metadata, tensors)
    with GgufFile.open(tmp_path / WEIGHTS) as file:
        assert {"Q8_0", "F32"} == {tensor.type_name for tensor in file.tensors.values()}
    for name, values in LlamaCppTarget().weights(plan, tmp_path):
        exact = made.weights.tensor(name)
        assert np.abs(values - exact).max() <= np.abs(exact).max() / 100, name
    tokens = list(models.tokens_of(32))
    answers = []
    for chosen, files in ((plan, tmp_path), (made.plan, made.files)):
        engine = LlamaCppEngine(chosen, files)
        answers.append(feed(engine, engine.start(chosen.storage), tokens, 32))
        engine.close()
    assert np.abs(answers[0] - answers[1]).max() < 0.1 * np.abs(answers[1]).max()


@runs
def test_rows_and_importance_that_do_not_fit_are_refused() -> None:
    own = Quantiser({"module": np.ones(64, np.float32)})
    rows = np.ones((3, 288), np.float32)
    for type_name, named in (("Q4_K", "288 values fill no blocks of 256"), ("Q8_0", "importance of 64 inputs for 288")):
        with pytest.raises(InvalidInput, match=named):
            own(type_name, "module", rows)
    assert own("Q8_0", "another", rows).shape == (3, 9 * 34)


def test_export_without_the_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from edgekit_llamacpp.export import export

    made = llamacpp_model("llama", "float32")
    plan = made.plan.model_copy(update={"recipe": mixture_of(made.plan.model, named_recipe("gguf-q4_k_m"))})
    blocks = load_target("llamacpp").input_blocks(plan, made.weights)
    assert set(blocks.values()) == {32}, "rows of 64 values fill no blocks of 256, in which inputs share a scale"
    library.load.cache_clear()
    monkeypatch.setattr(library, "version_of", lambda name: None)
    with pytest.raises(TargetMissing, match="xllamacpp is not installed"):
        export(plan, made.weights, tmp_path, models.quiet)
    assert "xllamacpp" not in sys.modules
