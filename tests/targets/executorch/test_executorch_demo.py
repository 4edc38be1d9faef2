"""The bundled model as a program: weights equal those of other targets, memory as predicted, drafts change nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import measured
import pytest

pytest.importorskip("executorch")
pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import torch
from edgekit_executorch.decoder import Append, ExecutorchDecoder
from edgekit_executorch.layout import MAX_ROWS, PROGRAM
from edgekit_executorch.operators import register_for_tracing
from edgekit_executorch.quiet import quiet_output
from executorch_models import in_order, in_pieces
from vendors_runner import greedy_texts

import edgekit
from edgekit import QuantOptions
from edgekit.apps.bench.parity import Parity, parity
from edgekit.apps.bench.peers.subjects import weights_of
from edgekit.artifact.artifact import open_artifact
from edgekit.artifact.export import ExportOptions, export
from edgekit.calibrating import calibration_for
from edgekit.common.progress import no_progress
from edgekit.contracts.engine import Chunk
from edgekit.contracts.recipe import named_recipe
from edgekit.model.source import open_source
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.quant.effort import DEFAULT_TEXT

pytestmark = [pytest.mark.executorch, pytest.mark.quantize, pytest.mark.slow]

DEVICE = "laptop-x86-16gb"
ROOT = Path(edgekit.__file__).parents[1]
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
        wish = PlanRequest(target=target, recipe=named_recipe(recipe), context=1024, exits=exits, sequences=2)
        export(make_plans("demo", [DEVICE], wish)[0], place)
    return place


@pytest.fixture(scope="module")
def program(home: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEKIT_HOME", str(home))
        return exported(home, "executorch")


@pytest.mark.onnx
def test_weights_equal_onnx_artifact_bitwise(home: Path, program: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx_ir")
    other = exported(home, "onnx")

    def compared(path: Path) -> Parity:
        return parity([other, path], tokens=200, progress=no_progress)[0]

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
def test_weights_equal_mlx_artifact_bitwise(home: Path, program: Path) -> None:
    pytest.importorskip("mlx.core")
    found = parity([exported(home, "mlx"), program], tokens=64, progress=no_progress)[0]
    assert {finding.what: finding.same for finding in found.findings}["weights"]


@pytest.mark.onnx
@pytest.mark.long
def test_smoothed_weights_equal_onnx_artifact_bitwise(home: Path) -> None:
    """Each target calibrates and smooths by itself."""
    pytest.importorskip("onnx_ir")
    recipe, source, artifacts = named_recipe("balanced-smooth"), open_source("demo", need_weights=True), []
    for target in ("onnx", "executorch"):
        text = calibration_for(source, [recipe], QuantOptions(calibrate=DEFAULT_TEXT, samples=4))
        plan = make_plans("demo", [DEVICE], PlanRequest(target=target, recipe=recipe))[0]
        artifacts.append(home / f"{target}-smoothed")
        options = ExportOptions(store=home / f"{target}-weights")
        export(plan, artifacts[-1], options, source=source, calibration=text)
    found = {finding.what: finding for finding in parity(artifacts, tokens=64, progress=no_progress)[0].findings}
    assert found["weights"].detail.endswith("are equal bit for bit") and found["answers"].same


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
        decoder = ExecutorchDecoder(weights_of(open_artifact(program)), slots=1024, positions=1024, context=1024)
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


@pytest.mark.parametrize("draft", ["ngram", "early-exit"])
def test_drafts_do_not_change_exact_text(program: Path, draft: str) -> None:
    answers = []
    for drafter in ("off", draft):
        with edgekit.open(program, exact=True, draft=drafter) as runtime:
            answers.append(runtime.complete(PROMPT, max_tokens=40).text)
    assert answers[0] == answers[1]


VERSIONS = {"executorch": "1.5.1", "torch": "2.13.0+cpu", "torchao": "0.18.0"}


def said(*arguments: str) -> str:
    """The error line that the command prints."""
    line = measured.refused(lambda: measured.invoked(list(arguments)))
    assert "\n" not in line and len(line) < 500, line
    return line


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--context", "9000"], r"9000 tokens exceed the capacity of 1024; .*export again with `--context 9000`"),
        (["--window", "9000"], r"9000 tokens exceed the capacity of 1024; .*export again with `--window 9000`"),
        (
            ["--kv-bits", "8"],
            "this artifact cannot store 8 bits; it can store 32; export with --kv-bits for another width",
        ),
        (["--adapter", "mine=."], "merge it into the weights before quantising"),
    ],
    ids=["context", "window", "bits", "adapter"],
)
def test_larger_context_than_exported_is_refused(program: Path, options: list[str], line: str) -> None:
    assert re.search(line, said("run", str(program), "def f", *options))


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ({}, r"executorch is not installed; pip install 'edgekit\[executorch\]'"),
        ({**VERSIONS, "torch": "2.9.1"}, r"built for torch 2\.13, found 2\.9\.1; pip install 'torch~=2\.13\.0'"),
        ({**VERSIONS, "executorch": "2.0.0"}, r"2\.0\.0 was never tested with this edgekit.*pip install"),
    ],
    ids=["nothing", "another torch", "another executorch"],
)
def test_incompatible_versions_are_refused(
    program: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, str], line: str
) -> None:
    monkeypatch.setattr("edgekit_executorch.versions.versions", lambda: found)
    assert re.search(line, said("run", str(program), "def f"))


def test_incompatible_torchao_stops_export(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgekit_executorch.versions.versions", lambda: {**VERSIONS, "torchao": "0.14.0"})
    asked = ["export", "demo", "--target", "executorch", "--recipe", "s4-g64", "--device", DEVICE]
    assert re.search(r"built for torchao 0\.18, found 0\.14\.0; pip install", said(*asked, "-o", str(tmp_path / "new")))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (b"ET12", b"ET13", "file format 'ET13', this edgekit reads ET12; export it again"),
        (
            b"llama::custom_sdpa",
            b"llama::custom_sdpb",
            r"calls 'llama::custom_sdpb\.out', which ExecuTorch .* not have",
        ),
        (b"XnnpackBackend", b"VulkanBackend\0", r"lowered to \S*vulkan\S*, which this build .* export for xnnpack"),
        (None, None, "is cut short: its header asks for more bytes"),
    ],
    ids=["another format", "another version's operator", "a backend of elsewhere", "cut short"],
)
def test_program_of_absent_backend_is_refused(
    program: Path, tmp_path: Path, old: bytes | None, new: bytes | None, line: str
) -> None:
    def change(folder: Path) -> None:
        data = (folder / PROGRAM).read_bytes()
        (folder / PROGRAM).write_bytes(data[: len(data) // 2] if old is None or new is None else data.replace(old, new))

    measured.resealed(program, tmp_path / "changed", change)
    assert re.search(line, said("run", str(tmp_path / "changed"), "def f"), re.IGNORECASE)


def test_coreml_without_coremltools_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "coremltools", None)
    asked = ["export", "demo", "--target", "executorch", "--device", "iphone-16", "--recipe", "float16"]
    assert "pip install 'edgekit[coreml]'" in said(*asked, "-o", str(tmp_path / "new"))
    assert not list(tmp_path.iterdir())
