"""Arguments and files for which llama.cpp would end the process are typed errors, and never a signal.

Each test runs in a process of its own, whose exit status says whether the library ended it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import llamacpp_kills
from edgekit_llamacpp import LlamaCppTarget, library
from edgekit_llamacpp.capabilities import capabilities
from edgekit_llamacpp.layout import WEIGHTS
from engines import llamacpp_model

from edgekit.artifact.artifact import open_artifact, seal
from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.contracts.recipe import named_recipe
from edgekit.errors import DamagedArtifact, Unsupported
from edgekit.quant.neutral_gguf import refusal

pytestmark = [pytest.mark.llamacpp, pytest.mark.quantize]
runs = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
HELPERS = Path(__file__).parents[2] / "helpers"


def lines_of(script: str, *arguments: object, home: Path) -> list[str]:
    """Run a script of the helpers, which must end without an error, and return the lines that it prints."""
    command = [sys.executable, HELPERS / script, *map(str, arguments)]
    path = os.pathsep.join(filter(None, sys.path))
    known = {**os.environ, "EDGEKIT_HOME": str(home), "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=known)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-200:]} {done.stderr[-1000:]}"
    return done.stdout.splitlines()


@runs
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_each_trap_is_a_typed_error(mode: str, tmp_path: Path) -> None:
    made = llamacpp_model("llama", context=256, sequences=3)
    plan, scratch = tmp_path / "plan.json", tmp_path / "scratch"
    plan.write_text(made.plan.model_copy(update={"adapter_rank": 8}).to_json())
    scratch.mkdir()
    found = lines_of("llamacpp_kills.py", plan, made.files, scratch, mode, home=tmp_path / "home")
    assert [line.partition(": ")[0] for line in found] == list(llamacpp_kills.CASES)
    assert not [line for line in found if ": no error" in line]


@runs
def test_forged_artifacts_that_agree_with_their_plans_never_end_the_process(tmp_path: Path) -> None:
    found = lines_of("forged_models.py", "--count", 150, home=tmp_path)
    ran = [line for line in found if line.endswith(": ran")]
    assert len(ran) > 20  # the others were refused by name


@runs
def test_an_artifact_that_is_sealed_anew_must_still_agree_with_its_plan(tmp_path: Path) -> None:
    """Other weights under the same header open: a seal proves integrity, not origin."""
    made = llamacpp_model("llama")
    changes = {"header": llamacpp_kills.flip_number(b"llama.attention.head_count_kv"), "weights": flip_last_bit}
    for name, change in changes.items():
        data = bytearray((made.files / WEIGHTS).read_bytes())
        change(data)
        (tmp_path / "staging").mkdir()
        (tmp_path / "staging" / WEIGHTS).write_bytes(data)
        seal(tmp_path / "staging", tmp_path / name, made.plan, weights_sha256="0" * 64, tools={}, self_check="none")
    forged = open_artifact(tmp_path / "header")
    forged.check_hashes()
    with pytest.raises(DamagedArtifact, match=r"head_count_kv is 3, and the plan says 2"):
        forged.working_target().open(forged.plan, forged.folder)
    other = open_artifact(tmp_path / "weights")
    other.working_target().open(other.plan, other.folder).close()


def flip_last_bit(data: bytearray) -> None:
    data[-1] ^= 1


def test_evictions_are_refused_where_all_layers_have_windows() -> None:
    plan = llamacpp_model("gemma3").plan
    windowed = plan.model.model_copy(update={"layers": plan.model.layers[:5]})
    able, unable = (capabilities(model, plan.recipe, "cpu", 128) for model in (plan.model, windowed))
    assert able.can_evict and not unable.can_evict
    asked = plan.model_copy(update={"model": windowed, "cache": KVEvictionPolicy.of(64, 4)})
    with pytest.raises(Unsupported, match="if all layers have windows"):
        LlamaCppTarget().check(asked)


def test_a_model_without_positions_is_refused() -> None:
    model = llamacpp_model("smollm3").plan.model
    layers = tuple(layer.model_copy(update={"rope": None}) for layer in model.layers)
    found = refusal(model.model_copy(update={"layers": layers}), named_recipe("s4-g32"), 128)
    assert found is not None and "none of its layers has positions" in found
