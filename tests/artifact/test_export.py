"""Exports: results, shared quantisation, refusals and interruptions."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("torch")

from click.testing import CliRunner, Result
from configs import GEMMA_3N_E2B, QWEN_3_SMALL, SMOLLM2_135M
from shapes import GEMMA_3_1B
from tiny_models import write_tiny

import edgekit
from edgekit.apps.bench.eval.evaluate import evaluate
from edgekit.artifact.artifact import open_artifact, verify
from edgekit.artifact.export import check_export, export
from edgekit.artifact.export_memory import export_peak
from edgekit.artifact.self_check import CHECKED_TOKENS
from edgekit.cli import command
from edgekit.cli._export_here import export_here
from edgekit.common.free_memory import Free
from edgekit.common.progress import no_progress
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Quantisation
from edgekit.contracts.recipe import RECIPES, bits_per_weight
from edgekit.errors import DoesNotFit, EdgekitError, InvalidInput, OutOfSpace, TargetFailed, Unsupported
from edgekit.model import source
from edgekit.model.source import open_source
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.plugins import load_target
from edgekit.testing import write_adapter

pytestmark = [pytest.mark.onnx, pytest.mark.quantize, pytest.mark.usefixtures("home")]

QUICK = ("demo-draft", "--effort", "quick")
ASKED = (*QUICK, "--device", "this-cpu", "--recipe", "s4-g64", "-o")

GEMMA = GEMMA_3_1B | {
    "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "vocab_size": 262_144,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
}  # fmt: skip
# Random weights: few wide layers, and many narrow ones.
WIDE = QWEN_3_SMALL | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "num_key_value_heads": 8,
    "vocab_size": 32_000, "max_window_layers": 4,
}  # fmt: skip
DEEP = QWEN_3_SMALL | {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16_384, "max_window_layers": 40,
}  # fmt: skip
CALIBRATED = 24 * 512
# The most private MiB of a whole process tree, measured on x86-64 Linux with two cores.
MEASURED: list[tuple[dict[str, Any], str, str, int, int]] = [
    (SMOLLM2_135M, "onnx", "s4-g32", 0, 443),
    (SMOLLM2_135M, "llamacpp", "s4-g32", 0, 391),
    (SMOLLM2_135M, "executorch", "s4-g32", 0, 2558),
    (SMOLLM2_135M, "llamacpp", "balanced", CALIBRATED, 1219),
    (GEMMA, "onnx", "s4-g32", 0, 1042),
    (GEMMA, "llamacpp", "s4-g32", 0, 934),
    (GEMMA, "mlx", "s4-g32", 0, 990),
    (DEEP, "executorch", "s4-g32", 0, 3206),
    (QWEN_3_SMALL, "onnx", "s4-g32", 0, 1124),
    (DEEP, "llamacpp", "s4-g32", CALIBRATED, 917),
    (DEEP, "llamacpp", "balanced", CALIBRATED, 1210),
    (WIDE, "llamacpp", "balanced", CALIBRATED, 4977),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny")


def typed(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["export", *map(str, arguments)])


def refused(*arguments: str | Path) -> str:
    found = typed(*arguments)
    assert isinstance(found.exception, EdgekitError), found.output + repr(found.exception)
    assert "\n" not in str(found.exception)
    return str(found.exception)


def test_code_beside_a_checkpoint_is_neither_run_nor_copied(tmp_path: Path) -> None:
    """`auto_map` in the model's and the tokenizer's config names code that would write a file."""
    model, canary = write_tiny(tmp_path / "tiny"), tmp_path / "canary"
    code = f"open({str(canary)!r}, 'w').close()\nclass Own: pass\n"
    names = {
        "AutoConfig": "own_code.Own",
        "AutoModelForCausalLM": "own_code.Own",
        "AutoTokenizer": ["own_code.Own"] * 2,
    }
    for name in ("config.json", "tokenizer_config.json"):
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | {"auto_map": names}))
    for name in ("own_code.py", "setup.py"):
        (model / name).write_text(code)
    asked = PlanRequest(recipe=RECIPES["s4-g32"], target="onnx", context=256)
    made = export(make_plans(str(model), ["this-cpu"], asked)[0], tmp_path / "out")
    shown = CliRunner().invoke(command, ["run", str(made.folder), "the cat", "--max-tokens", "2"])
    assert shown.exit_code == 0 and shown.stdout
    assert not canary.exists()
    assert not list(made.folder.rglob("*.py"))


def short_text(folder: Path) -> Path:
    """Calibration text that takes seconds; the bundled text takes a minute."""
    text = folder / "text.txt"
    text.write_text((Path(edgekit.__file__).parent / "common" / "parsing.py").read_text() * 2)
    return text


def quantisations(home: Path) -> int:
    return sum(path.is_dir() and not path.name.startswith(".") for path in (home / "weights").iterdir())


def test_export_is_sealed_checked_and_prints_the_next_command(tmp_path: Path) -> None:
    out = tmp_path / "demo.edgekit"
    found = typed(*ASKED, out)
    assert found.exit_code == 0, found.output
    artifact = verify(out)
    assert "read back bit for bit" in artifact.manifest.self_check
    assert f'next: edgekit run {out} "def fibonacci(n):" --raw' in found.output
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(artifact.manifest.files)
    assert artifact.manifest.tools["edgekit"]


def test_several_devices_share_one_quantisation(tiny: Path, tmp_path: Path, home: Path) -> None:
    devices = ("--device", "this-cpu", "--device", "raspberry-pi-5-8gb", "--target", "onnx")
    found = typed(tiny, *QUICK[1:], *devices, "-o", tmp_path / "out", "--json")
    assert found.exit_code == 0, found.output
    events = [json.loads(line) for line in found.output.splitlines()]
    sealed = [event for event in events if event["event"] == "sealed"]
    assert [event["device"] for event in sealed] == ["this", "raspberry-pi-5-8gb"]
    assert len({event["weights_sha256"] for event in sealed}) == 1
    assert quantisations(home) == 1
    for event in sealed:
        assert open_artifact(event["path"]).sha256 == event["sha256"]


def test_fresh_caches_give_the_same_artifact(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = set()
    for name in ("one", "two"):
        monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / name / "home"))
        plan = make_plans(str(tiny), ["laptop-x86-8gb"], PlanRequest(recipe=RECIPES["s4-g32"], target="onnx"))[0]
        made.add(export(plan, tmp_path / name / "out").sha256)
    assert len(made) == 1


def test_an_artifact_names_no_folder_of_the_machine_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = tmp_path / "of-the-maker"
    model, text = write_tiny(private / "tiny"), private / "text.txt"
    text.write_text("a cat sat on a mat. " * 400)
    write_adapter(private / "law", open_source(model).spec)
    law = f"law={private / 'law'}"
    asked = ["--device", "this-cpu", "--target", "onnx", "--recipe", "s4-g32", "--calibrate", text, "--adapter", law]
    for count, given in enumerate((model, "tiny", ".")):
        monkeypatch.chdir(private / "tiny" if given == "." else private)
        made = typed(given, *asked, "--adapter-rank", "4", "--with-bom", "-o", tmp_path / f"{count}")
        assert made.exit_code == 0, made.output
    artifacts = [open_artifact(tmp_path / str(count)) for count in range(3)]
    for artifact in artifacts:
        assert artifact.plan.model_source == "tiny" and Path(artifact.made_of) == model.resolve()
        for path in artifact.folder.rglob("*"):
            assert not path.is_file() or b"of-the-maker" not in path.read_bytes(), path
    assert len({artifact.sha256 for artifact in artifacts}) == 1, "the path that was typed changes nothing"
    assert evaluate(artifacts[0].folder, tokens=64, progress=no_progress).divergence.kl_mean >= 0


def test_a_saved_plan_is_built_unchanged(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    planned = ["plan", "demo-draft", "--device", "this-cpu", "--target", "onnx", "--recipe", "s8", "--context", "256"]
    assert CliRunner().invoke(command, [*planned, "-o", str(plan)]).exit_code == 0
    assert typed(*QUICK, "--plan", plan, "-o", tmp_path / "made").exit_code == 0
    assert open_artifact(tmp_path / "made").plan.context == 256
    assert "leave out --prefer" in refused("demo-draft", "--plan", plan, "--prefer", "speed", "-o", tmp_path / "other")
    assert "another model" in refused("demo", "--plan", plan, "-o", tmp_path / "other")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere"),
        (["demo", "--device", "toaster"], "toaster"),
        (["demo", "--recipe", "q5_1"], "q5_1"),
        (["demo", "--calibrate", "none.txt"], "none.txt"),
        (["demo", "--effort", "quick", "--method", "gptq"], "--effort quick"),
        (["demo", "--recipe", "float16", "--effort", "normal"], "no integers"),
        (["demo", "--plan", "none.json"], "none.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_invalid_arguments_are_refused_in_one_line_and_leave_nothing(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    assert words in refused(*arguments, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*.part"))


def test_a_model_that_cannot_be_exported_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "gemma3n"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GEMMA_3N_E2B))
    plan = make_plans(folder, ["macbook-m4-16gb"], PlanRequest(target="onnx"))[0]
    with pytest.raises(Unsupported, match="AltUp"):
        export(plan, tmp_path / "out")


def test_a_model_that_changed_since_it_was_planned_is_refused(tmp_path: Path) -> None:
    plan = make_plans("demo-draft", ["laptop-x86-8gb"])[0].model_copy(update={"model_sha256": "0" * 64})
    with pytest.raises(InvalidInput, match="plan again"):
        export(plan, tmp_path / "out")


def test_wrong_weights_are_never_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plans("demo-draft", ["laptop-x86-8gb"], PlanRequest(target="onnx", recipe=RECIPES["s8"]))[0]
    rows = np.random.default_rng(0).standard_normal((CHECKED_TOKENS, plan.model.vocab_size)).astype(np.float32)
    for module in ("self_check", "checked_reference"):
        monkeypatch.setattr(f"edgekit.artifact.{module}.reference_logits", lambda *_: rows)
    with pytest.raises(TargetFailed, match="self-check failed: KL"):
        export(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.slow
def test_an_interrupted_export_leaves_nothing_or_a_whole_artifact_and_runs_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "edgekit", "export", *ASKED, str(out)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(2.0)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    if out.exists():
        verify(out)
        return
    # Interrupted inside a library, the interpreter may end by the signal itself: 130 for a shell too.
    assert running.returncode in (130, -signal.SIGINT), errors
    assert "Traceback" not in errors
    assert not list(tmp_path.glob(".*.part"))
    again = typed(*ASKED, out)
    assert again.exit_code == 0, again.output
    verify(out)
    assert not list(tmp_path.glob(".*.part"))


def test_neutral_weights_are_exported_unchanged(tiny: Path, tmp_path: Path) -> None:
    weights = tmp_path / "neutral"
    made = CliRunner().invoke(command, ["quantize", str(tiny), *QUICK[1:], "--recipe", "s4-g32", "-o", str(weights)])
    assert made.exit_code == 0, made.output
    assert typed(weights, "--device", "this-cpu", "--target", "onnx", "-o", tmp_path / "out").exit_code == 0
    artifact = open_artifact(tmp_path / "out")
    assert artifact.plan.recipe.name == "s4-g32"
    assert artifact.manifest.weights_sha256 == NeutralWeights.open(weights).sha256
    assert "is quantised already, as s4-g32" in refused(weights, "--recipe", "s8", "-o", tmp_path / "other")


def test_an_artifact_names_its_quantisation_method_and_its_model_is_opened_once(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, open_folder = [], source.open_folder

    def count(folder: Path, *arguments: object) -> source.ModelSource:
        opened.append(folder)
        return open_folder(folder, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(source, "open_folder", count)
    text = short_text(tmp_path)
    arguments = [tiny, "--device", "this-cpu", "--target", "onnx", "--recipe", "s4-g32"]
    found = typed(*arguments, "--calibrate", text, "-o", tmp_path / "calibrated")
    assert "note: gptq chose the integers on text.txt" in found.output and len(opened) == 1
    assert "rtn" not in found.output
    made = open_artifact(tmp_path / "calibrated").plan.quantisation
    assert made is not None and made.method == "gptq" and (made.calibration or "").startswith("text.txt")
    rounded = typed(*arguments, *QUICK[1:], "-o", tmp_path / "rounded")
    assert "weights were rounded to the nearest (rtn)" in rounded.output
    assert open_artifact(tmp_path / "rounded").plan.quantisation == Quantisation(method="rtn")


@pytest.mark.parametrize(
    ("lacking", "why"),
    [
        ("torch", "4 bits needs torch"),
        ("tokenizer", "4 bits needs the model's tok"),
        ("nothing", "export makes 4 bits"),
    ],
)
def test_run_and_export_take_one_recipe_or_say_why_not(
    tmp_path: Path, lacking: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny(tmp_path / "tiny")
    if lacking == "torch":
        for module in ("quant.effort", "quant.pipeline", "cli.plan"):
            monkeypatch.setattr(f"edgekit.{module}.find_spec", lambda name: None)
        monkeypatch.setitem(sys.modules, "torch", None)
    if lacking == "tokenizer":
        (model / "tokenizer.json").unlink()
    planned = CliRunner().invoke(command, ["plan", str(model), "--device", "raspberry-pi-5-8gb"])
    assert ("without it, export rounds to 8 bits" in planned.stderr) == (lacking == "torch")
    quick = QUICK[1:] if lacking == "nothing" else ()
    exported = typed(model, "--target", "onnx", "--device", "this", *quick, "-o", tmp_path / "out")
    export_here(open_source(model), None, "onnx", tmp_path / "run", tmp_path / "store")
    assert why in exported.stderr + capsys.readouterr().err, exported.output
    made = [open_artifact(tmp_path / name) for name in ("out", "run")]
    assert [each.plan.recipe for each in made] == [RECIPES["s8"]] * 2
    assert made[1].manifest.self_check.startswith("ran, results not compared: ") == (lacking == "torch")


def test_a_bit_budget_is_sealed_as_rules(tiny: Path, tmp_path: Path) -> None:
    text = short_text(tmp_path)
    rules = [
        {"pattern": "*embed_tokens*", "format": {"kind": "s8"}},
        {"pattern": "*", "format": {"kind": "s4", "group": 64}},
    ]
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(json.dumps({"name": "mine", "rules": rules, "bits_per_weight": 5.5}))
    arguments = [tiny, "--device", "this-cpu", "--target", "onnx", "--recipe", recipe, "--calibrate", text]
    found = typed(*arguments, "--method", "rtn", "-o", tmp_path / "out")
    assert found.exit_code == 0, found.output
    sealed = open_artifact(tmp_path / "out").plan
    assert len(sealed.recipe.rules) > len(rules)
    assert 5.3 < bits_per_weight(sealed.model, sealed.recipe) <= 5.5


def test_the_disk_of_the_output_is_asked_for_the_artifact_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a device packs at the first opening lies in its cache."""
    made = open_artifact(source.DEMO_ARTIFACT)
    size = sum(fact.bytes for fact in made.manifest.files.values())
    (plan,) = make_plans(source.open_source("demo"), ["this-cpu"], PlanRequest(target="onnx", recipe=made.plan.recipe))
    assert plan.estimate.disk_bytes > 2 * size
    free = [2 * size]
    monkeypatch.setattr("edgekit.artifact.export.free_bytes", lambda path: free[0])
    check_export(plan, tmp_path / "out", source.open_source("demo"))
    free[0] = size // 2
    with pytest.raises(OutOfSpace, match="bytes are needed"):
        check_export(plan, tmp_path / "out", source.open_source("demo"))


@pytest.mark.parametrize(("config", "target", "recipe", "tokens", "measured"), MEASURED)
def test_measured_exports_are_within_a_tenth_of_their_prediction(
    tmp_path: Path, config: dict[str, Any], target: str, recipe: str, tokens: int, measured: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = edgekit.plan(tmp_path, "laptop-x86-16gb", target=target, recipe=recipe, context=1024)
    predicted = export_peak(plan, load_target(target), tokens)
    assert predicted.bytes / 2**20 == pytest.approx(measured, rel=0.1), predicted.why


def test_an_export_that_would_be_killed_is_refused_before_work(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgekit.artifact.export_memory.free_memory", lambda: Free(bytes=100 << 20, source="a test"))
    for method, cure in (("gptq", "--effort quick"), ("rtn", "a larger machine")):
        with pytest.raises(DoesNotFit, match=rf"takes \d+ MiB .* 100 MiB are free \(a test\).*{cure}"):
            edgekit.export("demo-draft", tmp_path / "out", target="onnx", recipe="s4-g64", method=method)
    assert not list(tmp_path.glob("out*")) and not (home / "weights").exists()


def test_a_plan_says_what_its_export_takes_and_the_artifact_does_not(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny")
    words = ["plan", str(model), "--device", "this-cpu", "--target", "onnx", "--recipe", "s4-g32"]
    assert "making them takes about " in CliRunner().invoke(command, words).output
    (plan,) = json.loads(CliRunner().invoke(command, [*words, "--json"]).output)
    assert plan["export_bytes"] > 200 << 20
    found = CliRunner().invoke(command, [*words, "-o", str(tmp_path / "plan.json")])
    assert found.exit_code == 0, found.output
    made = edgekit.export(str(tmp_path / "plan.json"), tmp_path / "out", effort="quick")
    assert "export_bytes" not in json.loads((made.folder / "manifest.json").read_text())["plan"]
