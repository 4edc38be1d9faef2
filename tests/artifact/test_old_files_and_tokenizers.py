"""Files that an earlier version wrote still open; the memory of a tokenizer is predicted.

The files in `tests/data/made_before` were written before the modules and classes got their present names."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_artifacts import install

import edgekit
from edgekit import plugins
from edgekit.artifact.tokenizer_memory import tokenizer_memory
from edgekit.contracts.neutral import read_manifest
from edgekit.planner.make import read_plan
from edgekit.planner.memory import explain

BEFORE = Path(__file__).parents[1] / "data/made_before"


def test_an_old_artifact_gives_the_same_answer_and_loads_its_old_prefixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch)
    shutil.copytree(BEFORE / "fake-artifact", tmp_path / "fake")
    shutil.copy(BEFORE / "fake.prefixes", tmp_path)
    (tmp_path / "fake.prefixes").chmod(0o600)
    with edgekit.open(tmp_path / "fake") as runtime:
        assert runtime.load_prefixes(tmp_path / "fake.prefixes") > 0
        answer = runtime.generate("def add(a, b):\n    return a + b\n" * 2, max_tokens=8)
        assert list(answer.tokens) == json.loads((BEFORE / "answer.json").read_text())
        assert answer.timings.cached_tokens > 0


def test_an_old_plan_opens() -> None:
    plan = read_plan(BEFORE / "plan.json")
    assert (plan.target, plan.device, plan.recipe.name) == ("onnx", "raspberry-pi-5-8gb", "s4-g64")
    assert plan.gpu_layers is None
    # It has 45 figures of its target's memory, of which those stay that are no longer in the target's code.
    assert plan.memory.scale_bits == 32 and not hasattr(plan.memory, "mapped_share")
    assert len(explain(plan, plugins.load_target(plan.target).memory)) == 10


def test_old_neutral_weights_open() -> None:
    manifest = read_manifest(BEFORE / "neutral")
    assert manifest.recipe.name == "s4-g64"
    assert manifest.weights_sha256.startswith("dc8fc605006a9245")


DEMO = Path(__file__).parents[2] / "examples" / "training" / "demo" / "target"


# Prints the private bytes of an open tokenizer, and the most while it was read.
MEASURE = """
import sys, tokenizers
from edgekit.common.footprint import return_unused
from edgekit.common.proc import memory_sizes
from edgekit.model.tokenizer_file import read_tokenizer
from pathlib import Path
status = Path("/proc/self/status")
return_unused()
before = memory_sizes(status)
tokenizer = read_tokenizer(Path(sys.argv[1]))
tokenizer.get_added_tokens_decoder()
highest = memory_sizes(status)
return_unused()
after = memory_sizes(status)
mapped = after["RssFile"] - before["RssFile"]
print(after["RssAnon"] - before["RssAnon"], highest["VmHWM"] - before["VmRSS"] - mapped)
"""


def larger(folder: Path) -> Path:
    """The bundled tokenizer with 100,000 more tokens."""
    document = json.loads((DEMO / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary |= {f"padding {number}": len(vocabulary) + number for number in range(100_000)}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this OS does not report memory")
@pytest.mark.parametrize("is_large", [False, True])
def test_the_memory_is_as_predicted(tmp_path: Path, is_large: bool) -> None:
    folder = larger(tmp_path) if is_large else DEMO
    command = [sys.executable, "-c", MEASURE, str(folder / "tokenizer.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    held, most = map(int, done.stdout.split())
    found = tokenizer_memory(folder)
    assert found is not None
    assert 0.7 * found.held < held < 1.15 * found.held
    assert 0.5 * sum(found) < most < 1.15 * sum(found)


def test_without_a_tokenizer_nothing_is_predicted(tmp_path: Path) -> None:
    assert tokenizer_memory(tmp_path) is None
    for text in ("{}", "not JSON", '{"model": {"vocab": 3}}', '{"model": {"vocab": [[3]]}}', '{"model": []}'):
        (tmp_path / "tokenizer.json").write_text(text)
        assert tokenizer_memory(tmp_path) is None
