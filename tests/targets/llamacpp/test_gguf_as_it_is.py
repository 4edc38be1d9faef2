"""A GGUF file of another tool opens as it is: checked, planned and admitted, without torch and without an export."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import gguf_files
import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType

import edgekit
from edgekit.artifact.gguf_file import open_file
from edgekit.cli import command
from edgekit.contracts.engine import Chunk
from edgekit.errors import DamagedArtifact, DoesNotFit

pytestmark = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="needs xllamacpp: pip install xllamacpp")
TYPES = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def write(path: Path, kind: str, family: str = "llama untied, with biases") -> Path:
    """Write a small model whose matrices have one type."""
    weights = gguf_files.random_tensors(gguf_files.FAMILIES[family])
    types = {name: GGMLQuantizationType[kind] for name, values in weights.items() if values.ndim == 2}
    path.write_bytes(gguf_files.model_file(gguf_files.FAMILIES[family], weights, types=types))
    return path


@pytest.mark.parametrize("family", gguf_files.FAMILIES)
def test_every_family_computes_as_transformers_does(family: str, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    path, tokens = tmp_path / "m.gguf", [1, 5, 9, 20, 31, 44, 7, 3]
    weights = gguf_files.write_family(path, family)
    artifact = open_file(path, 64)
    config = transformers.AutoConfig.from_pretrained(artifact.folder)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict({name: torch.from_numpy(values) for name, values in weights.items()}, strict=False)
    model.tie_weights()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    engine = artifact.working_target().open(artifact.plan, artifact.weights)
    found = engine.forward([Chunk(engine.start(artifact.plan.storage), tokens, len(tokens))])[0]
    engine.close()
    apart = np.abs(found - expected).max() / expected.std()
    assert apart < 0.05, apart


@pytest.mark.parametrize("kind", TYPES)
def test_its_types_are_planned_as_they_are_stored(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", kind)
    plan = open_file(path, 64).plan
    assert plan.estimate.mapped_weights_bytes == pytest.approx(path.stat().st_size, rel=0.15)
    assert "opened as it is, quantised by its maker" in plan.notes[0] and "not sealed" in plan.notes[0]
    assert plan.context == 64 and plan.quality.kl == 0


def test_commands_say_so_in_one_line_and_load_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails
    path = write(tmp_path / "m.gguf", "Q4_1")
    found = CliRunner().invoke(command, ["run", str(path), "hello", "--max-tokens", "4", "--context", "64"])
    assert found.exit_code == 0, found.output
    assert found.stderr.startswith("edgekit: m.gguf is opened as it is, quantised by its maker (Q4_1)")
    assert found.stderr.strip().splitlines()[1:] == ["edgekit: cut: --max-tokens 4 is reached"]


def test_memory_is_admitted_as_always(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "Q4_0")
    with pytest.raises(DoesNotFit, match="private memory are needed"):
        edgekit.open(path, memory="20MiB")


def test_a_file_that_changes_after_planning_is_not_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "Q4_0")
    artifact = open_file(path, 64)
    write(path, "Q8_0")
    with pytest.raises(DamagedArtifact, match="was changed since it was planned"):
        artifact.working_target().open(artifact.plan, artifact.weights)
    assert open_file(path, 64).sha256 != artifact.sha256
