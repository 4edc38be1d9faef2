"""The runtime with a real engine: the bundled model gives sensible answers, and its prefixes are kept."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("torch")

import edgekit
from edgekit.artifact.export import export
from edgekit.planner.make import make_plans

pytestmark = [pytest.mark.onnx, pytest.mark.quantize, pytest.mark.slow]

SAMPLED = {"max_tokens": 80, "temperature": 0.7, "seed": 5}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEKIT_HOME", str(folder / "home"))
        made = make_plans("demo", ["this-cpu"])
        export(made[0], folder / "artifact")
        yield folder / "artifact"


def test_prefixes_of_a_real_model_survive_a_restart(artifact: Path, tmp_path: Path) -> None:
    prompt = "class Stack:\n    def" + " push(self, item):\n" * 12
    with edgekit.open(artifact, exact=True, prefixes="64MiB") as runtime:
        expected = runtime.generate(prompt, **SAMPLED).tokens
        written = runtime.save_prefixes(tmp_path / "prefixes")
    with edgekit.open(artifact, exact=True, prefixes="64MiB") as runtime:
        assert runtime.load_prefixes(tmp_path / "prefixes") == written > 0
        assert runtime.generate(prompt, **SAMPLED).tokens == expected
        assert runtime.metrics().cached_tokens == len(runtime.encode(prompt)) - 1


def test_the_model_writes_python(artifact: Path) -> None:
    with edgekit.open(artifact) as runtime:
        answer = runtime.generate("import numpy as np\n", max_tokens=30, stop=["\n\n", "\ndef", "\nclass"])
    lines = ("import numpy as np\n" + answer.text).splitlines()
    ast.parse("\n".join(lines[:-1]))
