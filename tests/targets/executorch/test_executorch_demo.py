"""The bundled model as a program: memory as predicted, and the texts and logits of others."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("executorch")
pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import torch
from edgekit_executorch.decoder import Append, ExecutorchDecoder
from edgekit_executorch.layout import MAX_ROWS
from edgekit_executorch.operators import register_for_tracing
from edgekit_executorch.quiet import quiet_output
from executorch_models import in_order, in_pieces
from vendors_runner import greedy_texts

import edgekit
from edgekit.apps.bench.peers.subjects import weights_of
from edgekit.artifact.artifact import open_artifact
from edgekit.artifact.export import export
from edgekit.contracts.engine import Chunk
from edgekit.contracts.recipe import named_recipe
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest

pytestmark = [pytest.mark.executorch, pytest.mark.quantize, pytest.mark.slow]

DEVICE = "laptop-x86-16gb"
ROOT = Path(edgekit.__file__).parents[1]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(home))


@pytest.fixture(scope="module")
def program(home: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEKIT_HOME", str(home))
        wish = PlanRequest(target="executorch", recipe=named_recipe("s4-g64"), context=1024, exits=(2,), sequences=2)
        return export(make_plans("demo", [DEVICE], wish)[0], home / "program").folder


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
context = int(sys.argv[2])
with edgekit.open(sys.argv[1], sequences=1, prefixes=0, context=context) as runtime:
    runtime.complete([place % 4000 for place in range(context - 24)], max_tokens=8, ignore_eos=True)
    found = anonymous()
    predicted = runtime.memory().predicted_private_bytes
print(json.dumps([imported, found, predicted]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("context", [1024, 256])
def test_private_memory_within_five_percent_of_plan(program: Path, context: int) -> None:
    """The cache has the exported size, also for smaller requests."""
    command = [sys.executable, "-c", CHILD, str(program), str(context)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported, found, predicted = json.loads(done.stdout.splitlines()[-1])
    runtime = open_artifact(program).plan.memory.runtime_bytes
    # What imports take depends on how torch was built; the model's own part does not.
    own, expected = found - imported, predicted - runtime
    assert abs(own - expected) < 0.15 * own + (4 << 20)
    if version("torch").endswith("+cpu"):
        assert abs(predicted / found - 1) < 0.05, (predicted, found)


def test_executorchs_own_runner_gives_the_same_text(program: Path) -> None:
    """Also for a prompt that takes several chunks."""
    prompts = ["import numpy as np\n", (ROOT / "examples/training/demo/README.md").read_text()[:2400]]
    with edgekit.open(program, sequences=1, prefixes=0) as runtime:
        assert len(runtime.encode(prompts[1])) > open_artifact(program).plan.chunk_tokens
        expected = [runtime.generate(prompt, max_tokens=24, temperature=0.0).text for prompt in prompts]
    assert greedy_texts(program, 24, prompts) == expected


def test_held_out_logits_equal_torch_with_sums_in_order(program: Path) -> None:
    """Bitwise with sums in order; with torch's own order, as close as torch is to itself in other pieces."""
    held_out = (ROOT / "edgekit/_demo/held_out.jsonl").read_text().splitlines()
    text = "\n".join(json.loads(line)["text"] for line in held_out[:40])
    register_for_tracing()
    with quiet_output(), torch.no_grad():
        decoder = ExecutorchDecoder(weights_of(open_artifact(program)), slots=1024, context=1024)
    with edgekit.open(program, sequences=1, prefixes=0) as runtime:
        tokens, state = runtime.encode(text)[:1024], runtime.engine.start(open_artifact(program).plan.storage)
        found = np.concatenate(
            [runtime.engine.forward([Chunk(state, tokens[at : at + 256], 256)])[0] for at in range(0, 1024, 256)]
        )
        state.close()

    plain = in_pieces(Append(decoder), tokens, ((at, 256) for at in range(0, 1024, 256)))
    same = found.argmax(-1) == plain.argmax(-1)
    assert len(tokens) == 1024 and same.mean() > 0.975, same.mean()
    # As the engine feeds tokens whose rows are all asked for.
    pieces = ((at, MAX_ROWS) for at in range(0, 512, MAX_ROWS))
    assert np.array_equal(found[:512], in_pieces(in_order(decoder), tokens, pieces))
