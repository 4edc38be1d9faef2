"""Models with a recurrent part (LFM2, Qwen3.5) on onnxruntime: the suite, texts, drafts, batches, states, prefixes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import recurrent_checks as checks
from configs import QWEN_35_SMALL
from edgekit_onnx import runner
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import EXACT, FAST, export
from edgekit_onnx.offers import offer
from recurrent_checks import SPACING, TOKENS, RecurrentModel

from edgekit.contracts import recurrent
from edgekit.contracts.feeding import feed
from edgekit.contracts.recipe import named_recipe
from edgekit.contracts.recurrent import part_bytes, recurrent_shapes
from edgekit.device.load import load_profile
from edgekit.enginekit import recurrent as parts
from edgekit.errors import DamagedArtifact
from edgekit.model.families import model_from_config
from edgekit.planner.memory import MemoryLoad, after_opening, predict
from edgekit.testing import check_engine

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]


@pytest.fixture(autouse=True)
def close_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "LEAST_TOKENS", SPACING)


def make(folder: Path, family: str, recipe: str, level: int = FAST, **options: Any) -> RecurrentModel:
    return RecurrentModel(
        folder, family, recipe, "onnx", partial(export, accuracy_level=level), OnnxEngine, **options
    )  # fmt: skip


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RecurrentModel:
    return make(tmp_path_factory.mktemp(request.param), request.param, "s4-g64", sequences=8)


@pytest.mark.parametrize("spacing", [SPACING, 128])
def test_exact_mode_is_bitwise(made: RecurrentModel, spacing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "LEAST_TOKENS", spacing)
    check_engine(lambda: made.open(exact=True), exact=True, tolerance=0, sequences=60)


@pytest.mark.parametrize("kv_bits", [32, 16, 8])
@pytest.mark.parametrize("family", ["lfm2, five taps, with biases", "qwen3_5, more heads of values, with biases"])
def test_default_mode_equals_up_to_rounding(
    tmp_path: Path, family: str, kv_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "TOKENS_AT_ONCE", 5)
    monkeypatch.setattr(parts, "MOST_UNCERTAIN", 4)  # a piece holds all of them
    made = make(tmp_path, family, "s4-g64", EXACT)

    def narrow() -> Any:
        engine = made.open()
        engine.capabilities = engine.capabilities.model_copy(update={"kv_bits": (kv_bits,)})
        return engine

    check_engine(narrow, exact=False, tolerance=1e-5 if kv_bits == 32 else 0.1, sequences=40)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
def test_drafts_change_no_text_in_exact_mode(tmp_path: Path, family: str) -> None:
    checks.check_drafts(partial(make, tmp_path), family)


@pytest.mark.slow
@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
def test_drafted_prompts_have_the_plain_texts(tmp_path: Path, family: str, count: int) -> None:
    checks.check_drafted_prompts(partial(make, tmp_path), family, count)


@pytest.mark.parametrize(("exact", "tolerance"), [(True, 0.0), (False, 0.05)])
def test_eight_in_a_batch_equal_eight_alone(made: RecurrentModel, exact: bool, tolerance: float) -> None:
    checks.check_batch_of_eight(made, tolerance, exact=exact)


def test_killed_state_continues_equally_in_another_process(made: RecurrentModel) -> None:
    checks.check_killed_state(made)


def test_segments_with_wrong_checkpoints_or_tokens_are_refused(made: RecurrentModel, tmp_path: Path) -> None:
    engine = made.open()
    state = engine.start(engine.plan.storage)
    feed(engine, state, TOKENS[:10])
    segment = state.save(0, 10)
    places = sorted(segment.checkpoints)
    assert places == [*range(made.spacing, 10, made.spacing), 10]
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


def test_a_prefix_hit_computes_the_suffix_and_at_most_one_gap(
    made: RecurrentModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks.check_prefix_hits(made, monkeypatch)


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
