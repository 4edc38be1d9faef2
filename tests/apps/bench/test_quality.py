"""`edgekit eval`: damage is named, and plans use the measured quality."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import measured
import numpy as np
import pytest
import tiny_models
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays

from edgekit.apps.bench.eval.evaluate import evaluate, read_text
from edgekit.apps.bench.eval.evaluation import Evaluation
from edgekit.apps.bench.eval.reference import windows_of
from edgekit.common.divergence import Pair, divergence_of, log_softmax
from edgekit.common.progress import no_progress
from edgekit.contracts import quality_measurements as quality_facts
from edgekit.contracts.recipe import RECIPES, named_recipe
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnx_ir")
pytestmark = [pytest.mark.quantize, pytest.mark.onnx]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(home))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, home: Path) -> Path:
    """A folder with a model, its artifact and a text."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEKIT_HOME", str(home))
        tiny_models.artifact_of(tiny_models.write_tiny(folder / "tiny"), folder / "artifact")
    tiny_models.text_file(folder)
    return folder


def found_of(place: Path, name: str = "artifact", reference: Path | None = None) -> Evaluation:
    return evaluate(
        place / name, reference=reference, text=place / "text.txt", tokens=300, window_tokens=64, progress=no_progress
    )


def test_the_float_model_is_close_but_not_equal(place: Path) -> None:
    found = found_of(place)
    assert found.divergence is not None
    assert 0 < found.divergence.kl_mean < 0.5
    assert found.divergence.kl_median <= found.divergence.kl_p999 <= found.divergence.kl_max
    assert found.is_sound
    assert found.reference == "tiny, float"


def test_a_plan_uses_and_names_a_measured_quality(place: Path) -> None:
    found = found_of(place)
    wish = PlanRequest(recipe=named_recipe("s4-g32"), target="onnx", context=256)
    plan = make_plans(str(place / "tiny"), [tiny_models.DEVICE], wish)[0]
    assert plan.quality.basis == "measured"
    assert found.divergence is not None
    assert plan.quality.kl == pytest.approx(found.divergence.kl_mean, rel=0.01)
    assert plan.facts == (found.fact,)
    other = make_plans(str(place / "tiny"), [tiny_models.DEVICE], PlanRequest(recipe=RECIPES["s8"], target="onnx"))[0]
    assert other.quality.basis == "prior"
    assert other.facts == ()


def test_another_target_uses_the_measured_quality_with_a_note(place: Path) -> None:
    found_of(place)
    plan = make_plans(str(place / "tiny"), ["macbook-m4-16gb"], PlanRequest(recipe=RECIPES["s4-g32"], target="mlx"))[0]
    assert plan.quality.basis == "measured"
    assert "measured on onnx cpu, the same weights" in plan.quality.source


def test_an_unreadable_fact_is_ignored(place: Path, home: Path) -> None:
    found_of(place)
    (path,) = home.glob("quality/*/*.json")
    whole = path.read_text()
    try:
        for broken in ("", "{}", whole.replace('"same_top"', '"same_bottom"'), "[" * 5000):
            path.write_text(broken)
            plan = make_plans(
                str(place / "tiny"), [tiny_models.DEVICE], PlanRequest(recipe=RECIPES["s4-g32"], target="onnx")
            )
            assert plan[0].quality.basis == "prior"
    finally:
        path.write_text(whole)


def test_a_missing_bos_is_caught_and_named(place: Path, tmp_path: Path) -> None:
    def without_bos(folder: Path) -> None:
        measured.edit_json(folder / "tokenizer.json", lambda found: found.update(post_processor=None))

    measured.resealed(place / "artifact", tmp_path / "damaged", without_bos)
    shutil.copy(place / "text.txt", tmp_path)
    found = found_of(tmp_path, "damaged")
    assert [check.what for check in found.checks if not check.same] == ["bos"]
    assert "begins with nothing in the artifact and with [0]" in found.checks[2].detail
    assert found.fact is None
    done = measured.invoked(["eval", str(tmp_path / "damaged"), "--text", str(tmp_path / "text.txt"), "--tokens", "64"])
    assert done.code == 5
    assert "DIFFERS" in done.output


def test_the_command_writes_a_fact_that_plans_show(place: Path, tmp_path: Path) -> None:
    text = str(place / "text.txt")
    arguments = ["eval", str(place / "artifact"), "--text", text, "--tokens", "200", "--window", "64"]
    done = measured.invoked([*arguments, "--json", "-o", str(tmp_path / "r.json")])
    assert done.code == 0, done.output
    found = Evaluation.model_validate_json(done.stdout)
    assert found.fact is not None
    assert json.loads((tmp_path / "r.json").read_text())["evaluations"][0]["fact"] == found.fact
    shown = measured.invoked(["plan", str(place / "tiny"), "--device", tiny_models.DEVICE, "--recipe", "s4-g32"])
    assert "measured" in shown.output


def test_another_model_is_refused_as_reference(place: Path, tmp_path: Path) -> None:
    tiny_models.write_tiny(tmp_path / "wide", vocab_size=512)
    assert "different models" in measured.refused(lambda: found_of(place, reference=tmp_path / "wide"))
    assert "is an artifact already" in measured.refused(lambda: found_of(place, reference=place / "artifact"))


@given(
    arrays.arrays(np.float32, (6, 9), elements=st.floats(-20, 20, width=32)),
    arrays.arrays(np.float32, (6, 9), elements=st.floats(-20, 20, width=32)),
)
@settings(deadline=None, max_examples=40)
def test_divergence_follows_its_definitions(one: np.ndarray, other: np.ndarray) -> None:
    tokens = (1, 2, 3, 4, 5, 6)
    found = divergence_of([Pair(tokens, one, other)])
    p, q = log_softmax(one), log_softmax(other)
    direct = (np.exp(p) * (p - q)).sum(axis=-1)
    assert found.kl_mean == pytest.approx(direct.mean(), abs=1e-9)
    assert found.kl_max >= found.kl_median >= 0
    nexts = np.array(tokens[1:])
    assert found.perplexity == pytest.approx(np.exp(-q[np.arange(5), nexts].mean()), rel=1e-9)
    assert found.log_ratio == pytest.approx((p - q)[np.arange(5), nexts].mean(), abs=1e-9)
    assert found.tokens == 6
    assert found.scored == 5
    same = divergence_of([Pair(tokens, one, one.copy())])
    assert same.kl_mean == same.kl_max == same.log_ratio == 0.0


def test_windows_begin_with_bos_and_score_every_token_once() -> None:
    found = windows_of(list(range(10, 40)), 11, 25, begin=[1])
    assert [window[0] for window in found.tokens] == [1, 1, 1]
    assert [token for window in found.tokens for token in window[1:]] == list(range(10, 35))
    assert "fewer than two tokens" in measured.refused(lambda: windows_of([5], 16, 100))


def test_facts_are_of_one_model_and_one_recipe() -> None:
    assert quality_facts.read_quality_facts("0" * 64, "nobody").find(RECIPES["s8"], "onnx", "cpu") is None


def test_weights_of_one_recipe_do_not_overwrite_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))

    def keep(weights: str, kl: float, target: str = "onnx") -> None:
        fact = quality_facts.QualityFact(
            model="m", config_sha256="0" * 64, recipe=RECIPES["s8"], target=target, backend="cpu",
            weights_sha256=weights * 64, artifact_sha256="f" * 64, kl=kl, same_top=0.9, tokens=100, text="a text",
        )  # fmt: skip
        assert quality_facts.write_quality_fact(fact)

    keep("a", 0.4)
    keep("b", 0.1)
    keep("b", 0.2)
    found = quality_facts.read_quality_facts("0" * 64, "m").find(RECIPES["s8"], "onnx", "cpu")
    assert found is not None and found.quality.kl == 0.4 and "the worst of 2 sets of weights" in found.quality.source
    assert found.fact.endswith("a" * 16)
    elsewhere = quality_facts.read_quality_facts("0" * 64, "m").find(RECIPES["s8"], "mlx", "cpu")
    assert elsewhere is not None and "measured on onnx cpu" in elsewhere.quality.source
    keep("b", 0.3, "mlx")
    own = quality_facts.read_quality_facts("0" * 64, "m").find(RECIPES["s8"], "mlx", "cpu")
    assert own is not None and own.quality.kl == 0.3


def test_texts_are_plain_or_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    assert read_text(tmp_path / "a.jsonl").words == "one\n\ntwo"
    (tmp_path / "b.jsonl").write_text('{"texts": "one"}\n')
    assert "b.jsonl:1" in measured.refused(lambda: read_text(tmp_path / "b.jsonl"))
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    assert "UTF-8" in measured.refused(lambda: read_text(tmp_path / "c.txt"))
    assert len(read_text(None).words) > 10_000


def test_the_name_of_a_public_task_is_refused_with_the_way_to_ask_it() -> None:
    told = measured.refused(lambda: measured.invoked(["eval", "absent", "--tasks", "hellaswag"]))
    assert "--tasks hellaswag: no such file; public tasks are asked by lm-eval" in told
