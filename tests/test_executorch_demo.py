"""The bundled model as a program: one model with other targets' artifacts, as large as predicted, drafted or not."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import measured
import pytest

pytest.importorskip("executorch")
pytest.importorskip("torch")

from edgekit_executorch.layout import PROGRAM

import edgekit
from edgekit.artifact import open_artifact
from edgekit.export import export
from edgekit.measure.parity import Parity, parity
from edgekit.measure.peers.entering import weights_of
from edgekit.planning import make_plans
from edgekit.recipe import named_recipe
from edgekit.resolve import Wish
from edgekit.weights.quantise import quiet

pytestmark = [pytest.mark.executorch, pytest.mark.quantize, pytest.mark.slow]

DEVICE = "laptop-x86-16gb"
PROMPT = "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(home))


def exported(home: Path, target: str, recipe: str = "s4-g64") -> Path:
    place = home / f"{target}-{recipe}"
    if not place.exists():
        exits = (2,) if target == "executorch" else ()
        wish = Wish(target=target, recipe=named_recipe(recipe), context=1024, exits=exits, sequences=2)
        export(make_plans("demo", [DEVICE], wish)[0], place)
    return place


@pytest.fixture(scope="module")
def program(home: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEKIT_HOME", str(home))
        return exported(home, "executorch")


@pytest.mark.onnx
def test_it_is_one_model_with_the_onnx_artifact_bit_for_bit(home: Path, program: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx_ir")
    other = exported(home, "onnx")

    def compared(path: Path) -> Parity:
        return parity([other, path], tokens=200, progress=quiet)[0]

    found = compared(program)
    assert found.is_same
    assert {finding.what: finding.detail for finding in found.findings}["weights"].endswith("are equal bit for bit")

    def flip(folder: Path) -> None:
        data = bytearray((folder / PROGRAM).read_bytes())
        stored = weights_of(open_artifact(program)).packed("model.layers.3.mlp.down_proj").tobytes()
        data[data.index(stored) + 5] ^= 0x30
        (folder / PROGRAM).write_bytes(bytes(data))

    measured.resealed(program, tmp_path / "damaged", flip)
    different = {each.what: each.detail for each in compared(tmp_path / "damaged").findings if each.same is False}
    assert "model.layers.3.mlp.down_proj.weight[0, 11]" in different["weights"]
    assert "1 of" in different["weights"]


@pytest.mark.mlx
def test_it_is_one_model_with_the_mlx_artifact_bit_for_bit(home: Path, program: Path) -> None:
    pytest.importorskip("mlx.core")
    found = parity([exported(home, "mlx"), program], tokens=64, progress=quiet)[0]
    assert {finding.what: finding.same for finding in found.findings}["weights"]


CHILD = """
import json, sys
from pathlib import Path
import edgekit
from edgekit_executorch.operators import register_for_running

def anonymous():
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) << 10

register_for_running()
imported = anonymous()
with edgekit.open(sys.argv[1], sequences=1, prefixes=0) as runtime:
    runtime.complete([place % 4000 for place in range(1000)], max_tokens=8, ignore_eos=True)
    found = anonymous()
    predicted = runtime.memory().predicted_private_bytes
print(json.dumps([imported, found, predicted]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_private_memory_is_within_five_percent_of_what_was_predicted(program: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, str(program)], capture_output=True, text=True, check=True)
    imported, found, predicted = json.loads(done.stdout.splitlines()[-1])
    runtime = open_artifact(program).plan.memory.runtime_bytes
    # What imports take depends on how torch was built; the model's own part does not.
    own, expected = found - imported, predicted - runtime
    assert abs(own - expected) < 0.15 * own + (4 << 20)
    if version("torch").endswith("+cpu"):
        assert abs(predicted / found - 1) < 0.05, (predicted, found)


@pytest.mark.parametrize("draft", ["ngram", "early-exit"])
def test_drafts_change_no_text_in_exact_mode(program: Path, draft: str) -> None:
    answers = []
    for drafter in ("off", draft):
        with edgekit.open(program, exact=True, draft=drafter) as runtime:
            answers.append(runtime.complete(PROMPT, max_tokens=40).text)
    assert answers[0] == answers[1]
