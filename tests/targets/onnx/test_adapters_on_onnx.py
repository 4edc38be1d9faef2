"""LoRA on ONNX Runtime: logits equal torch with the same adapter, in any batch, and base requests are unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import family_models as models
import tiny_models
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import FAST
from edgekit_onnx.memory import ADAPTED_LINEAR_BYTES, DERIVING_BYTES
from engines import Model, onnx_model

import edgekit
from edgekit.artifact.export import ExportOptions, export as export_artifact
from edgekit.contracts.plan import Quantisation
from edgekit.contracts.recipe import named_recipe
from edgekit.errors import Unsupported
from edgekit.model.lora import adaptable
from edgekit.model.source import open_source
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.testing import write_adapter

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]


@pytest.fixture(scope="module")
def llama() -> Model:
    return onnx_model("llama", "s4-g32", FAST, exits=(1, 2), adapter_rank=8)


def test_weights_whose_inputs_awq_scaled_take_no_adapter(tmp_path: Path, llama: Model) -> None:
    plan = llama.plan.model_copy(update={"quantisation": Quantisation(method="awq")})
    engine = OnnxEngine(plan, llama.files)
    with pytest.raises(Unsupported, match="awq scaled the inputs that adapters read"):
        engine.load_adapter("tone", write_adapter(tmp_path / "tone", plan.model))
    engine.close()
    for refused, method in ((llama.plan, "awq"), (plan, None)):
        with pytest.raises(Unsupported, match="--adapter-rank 8: awq scaled the inputs"):
            export_artifact(refused, tmp_path / "art", ExportOptions(method=method), source=open_source(llama.folder))
    assert not (tmp_path / "art").exists()


def test_adapter_text_is_independent_of_drafts_and_batches(tmp_path: Path) -> None:
    """With a sealed, packed artifact, whose second session maps the weights of the first."""
    model = tiny_models.write_tiny(tmp_path / "tiny")
    wish = PlanRequest(
        recipe=named_recipe("s4-g32"), target="onnx", context=256, sequences=3, exits=(1,), adapter_rank=8
    )
    artifact = export_artifact(make_plans(str(model), [tiny_models.DEVICE], wish)[0], tmp_path / "art")
    place = write_adapter(tmp_path / "tone", artifact.plan.model, rank=8)
    prompt, texts = list(models.tokens_of(40, 200)), {}
    for draft in ("off", "early-exit", "ngram"):
        with edgekit.open(artifact.folder, exact=True, draft=draft, prefixes=1 << 22) as runtime:
            runtime.load_adapter("tone", place)
            sessions = ADAPTED_LINEAR_BYTES * len(adaptable(artifact.plan.model)) + DERIVING_BYTES
            assert sessions < runtime.adapters["tone"] < sessions + (1 << 18), "the weights were copied"
            found = [runtime.complete(prompt, max_tokens=30, ignore_eos=True, adapter="tone").tokens for _ in range(2)]
            streams = [runtime.submit(prompt, max_tokens=30, ignore_eos=True, adapter=name) for name in ("tone", None)]
            together = [stream.answer().tokens for stream in streams]
            assert found[0] == found[1] == together[0] != together[1]
            texts[draft] = found[0]
    assert len({tuple(tokens) for tokens in texts.values()}) == 1
