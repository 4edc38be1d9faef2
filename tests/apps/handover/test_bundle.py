"""The bundle: the planned weights, and what is refused before any work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from eagle3_heads import LEGACY, write_head
from family_models import EVERY, write_model
from tiny_encoders import write_bert

from edgekit.apps.handover.server_plan import ServerPlan
from edgekit.cli import command
from edgekit.contracts.neutral import NeutralWeights
from edgekit.errors import DoesNotFit, EdgekitError
from edgekit.model.heads import read_head
from edgekit.model.source import open_source

pytestmark = pytest.mark.quantize


def handed_over(*arguments: object) -> Result:
    return CliRunner().invoke(command, ["handover", *map(str, arguments)])


def refusal(*arguments: object) -> str:
    result = handed_over(*arguments)
    assert isinstance(result.exception, EdgekitError), result.exception
    return str(result.exception)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("handover") / "demo"
    made = handed_over("demo", "--to", "vllm", "--gpu", "L4", "--effort", "quick", "-r", "s4-g32", "-o", place)
    assert made.exit_code == 0, made.output
    return place


def test_the_bundle_matches_the_plan(bundle: Path) -> None:
    plan = ServerPlan.model_validate_json((bundle / "plan.json").read_bytes())
    weights = NeutralWeights.open(bundle / "weights", verify=True)
    assert weights.recipe == plan.recipe and plan.recipe.name == "s4-g32-handover"
    assert {path.name for path in bundle.iterdir()} == {
        "README.md", "plan.json", "reference.json", "smoke_test.py", "vllm.yaml", "weights",
    }  # fmt: skip


def test_neutral_weights_are_handed_over_unchanged(bundle: Path, tmp_path: Path) -> None:
    made = handed_over(bundle / "weights", "--to", "sglang", "--gpu", "L4", "-o", tmp_path / "again")
    assert made.exit_code == 0, made.output
    ours, theirs = (NeutralWeights.open(place / "weights").sha256 for place in (bundle, tmp_path / "again"))
    assert ours == theirs and (tmp_path / "again" / "sglang.yaml").is_file()
    told = refusal(bundle / "weights", "--to", "vllm", "-r", "s8")
    assert "is quantised already, as s4-g32-handover" in told


def test_a_cache_in_fp8_is_rounded_in_the_reference_too(bundle: Path, tmp_path: Path) -> None:
    made = handed_over(bundle / "weights", "--to", "vllm", "--gpu", "L4", "--kv-format", "fp8", "-o", tmp_path / "b")
    assert made.exit_code == 0, made.output
    assert "kv-cache-dtype: fp8" in (tmp_path / "b" / "vllm.yaml").read_text()
    exact, rounded = (json.loads((place / "reference.json").read_text()) for place in (bundle, tmp_path / "b"))
    assert exact["tie"] < rounded["tie"] and exact["answers"] != rounded["answers"]


def test_an_impossible_bundle_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    assert "exists already" in refusal("demo", "--to", "vllm", "-o", tmp_path / "taken")
    result = handed_over("demo", "--to", "vllm", "--gpu", "L4", "--context", "64", "--max-first-token", 1e-9,
                         "-o", tmp_path / "none")  # fmt: skip
    assert isinstance(result.exception, DoesNotFit) and not (tmp_path / "none").exists()
    assert "recipe keep" in refusal("demo", "--to", "vllm", "-r", "keep")
    assert "--effort and --store: nothing" in refusal("demo", "--to", "vllm", "--effort", "quick", "--store", "x")


def test_if_no_layout_fits_each_is_listed_and_the_exit_code_is_3() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edgekit", "handover", "demo", "--to", "vllm", "--gpu", "L4", "--context", "64"]
        + ["--max-first-token", "1e-9"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == DoesNotFit.exit_code, done.stderr
    assert "l4" in done.stdout and "first token" in done.stdout
    assert done.stderr.startswith("edgekit: ") and done.stderr.count("\n") == 1


def test_unsupported_models_are_refused_before_any_work(tmp_path: Path) -> None:
    write_bert(tmp_path / "bert")
    write_model(tmp_path / "lfm2", *EVERY["lfm2"])
    write_model(tmp_path / "gpt-oss", *EVERY["gpt_oss"])
    refused = {
        "bert": ("is an encoder, which generates no tokens", "edgekit serve"),
        "lfm2": ("has recurrent layers (LFM2, Qwen3.5)", "edgekit serve"),
        "gpt-oss": ("servers read gpt-oss's experts as stacks", "give them the published files"),
    }
    for name, told in refused.items():
        for rest in ([], ["-o", tmp_path / "out"]):
            message = refusal(tmp_path / name, "--to", "vllm", *rest)
            assert all(part in message for part in told)
    assert not (tmp_path / "out").exists()


def test_a_draft_of_another_vocabulary_is_refused_before_any_work(tmp_path: Path) -> None:
    write_model(tmp_path / "draft", *EVERY["llama"])
    told = refusal("demo", "--to", "vllm", "--draft", tmp_path / "draft")
    assert "has a vocabulary of" in told and "servers need the same one" in told
    assert handed_over("demo", "--to", "vllm", "--draft", "demo-draft").exit_code == 0


@pytest.mark.parametrize("embedding", [True, False])
def test_a_head_is_planned_and_written_as_published(bundle: Path, tmp_path: Path, embedding: bool) -> None:
    target = open_source("demo").spec
    published = write_head(
        tmp_path / "head", target, LEGACY, layers=(2, 3, 3), draft_vocabulary=100, embedding=embedding
    )
    asked = (bundle / "weights", "--to", "vllm", "--gpu", "L4", "--context", "64")
    plans = [json.loads(handed_over(*asked, *rest, "--json").output) for rest in ((), ("--drafter", published))]
    assert plans[1]["memory"]["draft_bytes"] > 0 == plans[0]["memory"]["draft_bytes"]
    made = handed_over(*asked, "--drafter", published, "-o", tmp_path / "b")
    assert made.exit_code == 0, made.output
    assert json.loads((tmp_path / "b/drafter/config.json").read_text())["speculators_model_type"] == "eagle3"
    heads = [read_head(folder, target) for folder in (published, tmp_path / "b" / "drafter")]
    assert heads[1].spec.own_embedding == embedding and heads[0].spec.hidden_layers == heads[1].spec.hidden_layers
    for name, _ in heads[0].spec.tensors():
        np.testing.assert_array_equal(heads[0].floats(name), heads[1].floats(name))
    np.testing.assert_array_equal(heads[0].targets, heads[1].targets)


def test_foreign_heads_and_two_drafters_are_refused_before_any_work(tmp_path: Path) -> None:
    write_model(tmp_path / "model", *EVERY["llama"])
    other = write_head(tmp_path / "head", open_source(tmp_path / "model").spec, layers=(1, 1, 2))
    assert "give the head of this model" in refusal("demo", "--to", "vllm", "--drafter", other)
    both = refusal("demo", "--to", "vllm", "--drafter", other, "--draft", "demo-draft")
    assert "leave out one" in both
    assert "which SGLang does not read" in refusal("demo", "--to", "sglang", "--drafter", other)


def test_without_an_output_the_plan_is_printed() -> None:
    told = handed_over("demo", "--to", "vllm", "--gpu", "H100x2", "--json")
    plan = ServerPlan.model_validate_json(told.stdout)
    assert plan.server == "vllm" and plan.gpu == "h100"
