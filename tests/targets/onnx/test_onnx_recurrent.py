"""Models with a recurrent part (LFM2, Qwen3.5) on onnxruntime: what segments keep, and what a plan counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

from configs import QWEN_35_SMALL
from edgekit_onnx.export import FAST
from edgekit_onnx.offers import offer
from engines import spaced
from onnx_models import onnx_model

from edgekit.contracts import recurrent
from edgekit.contracts.feeding import feed
from edgekit.contracts.recipe import named_recipe
from edgekit.contracts.recurrent import part_bytes, recurrent_shapes
from edgekit.device.load import load_profile
from edgekit.errors import DamagedArtifact
from edgekit.model.families import model_from_config
from edgekit.planner.memory import MemoryLoad, after_opening, predict

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
def test_segments_with_wrong_checkpoints_or_tokens_are_refused(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaced(monkeypatch, 4)
    engine = onnx_model(family, "s4-g64", FAST).open()
    state = engine.start(engine.plan.storage)
    feed(engine, state, list(range(5, 15)))
    segment = state.save(0, 10)
    spacing = recurrent.checkpoint_tokens(engine.plan.model)
    places = sorted(segment.checkpoints)
    assert places == [*range(spacing, 10, spacing), 10]
    segment.arrays[0][0, 3] = engine.capabilities.vocabulary
    segment.write(tmp_path / "tokens")
    with pytest.raises(DamagedArtifact, match="outside the vocabulary"):
        engine.read_segment(tmp_path / "tokens")
    for name, wrong in (("before", [0, *places[1:]]), ("twice", [10, *places[1:]])):
        state.save(0, 10).write(tmp_path / name)
        old, new = json.dumps(places).encode(), json.dumps(wrong).encode()
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes().replace(old, new))
        with pytest.raises(Exception, match="checkpoints after"):
            engine.read_segment(tmp_path / name)
    engine.close()


def test_plans_count_the_recurrent_parts_of_a_step_and_the_graph_of_delta_rules() -> None:
    """Qwen3.5-0.8B has 18 delta rules with a memory of 1 MiB each."""
    model = model_from_config(QWEN_35_SMALL, "qwen", "config.json")
    part, recipe, device = part_bytes(recurrent_shapes(model)), named_recipe("s4-g32"), load_profile("laptop-x86-8gb")
    facts = after_opening(offer(model, device, "cpu", recipe).memory)
    without = facts.model_copy(update={"recurrent_copies": 0.0})
    load = MemoryLoad(model, recipe, facts, 4096, sequences=64, kv_bits=32, chunk_tokens=512)
    for sequences in (1, 4):
        one = load._replace(sequences=sequences)
        counted, not_counted = predict(one), predict(one._replace(facts=without))
        assert counted.activation_bytes - not_counted.activation_bytes == part > 18 << 20
    counted, not_counted = predict(load), predict(load._replace(facts=without))
    assert counted.activation_bytes - not_counted.activation_bytes > 10 * part  # a step of all takes more than a prompt
    attending = model.model_copy(update={"layers": (model.layers[3],) * 24})
    fewer = offer(attending, device, "cpu", recipe).memory
    assert (facts.layer_bytes - fewer.layer_bytes) * 24 == 18 << 20
