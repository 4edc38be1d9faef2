"""`edgekit quantize` and `edgekit inspect`, as people and scripts use them."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import shapes
from click.testing import CliRunner, Result
from tiny_models import write_tiny

pytest.importorskip("torch")

from edgekit.calibrating import calibration_for
from edgekit.cli import command
from edgekit.common.files import boot_id
from edgekit.common.progress import Reporter
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.recipe import named_recipe
from edgekit.errors import EdgekitError
from edgekit.model.source import open_source
from edgekit.quant import effort
from edgekit.quant.effort import DEFAULT_TEXT, calibration_text
from edgekit.quant.options import QuantOptions

pytestmark = [pytest.mark.quantize, pytest.mark.usefixtures("home")]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def refusal(*arguments: object) -> str:
    result = call(*arguments)
    assert isinstance(result.exception, EdgekitError), result.exception
    return str(result.exception)


def events(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_without_text_weights_are_rounded_with_a_note(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = call("quantize", "demo-draft", "--recipe", "s4-g32", "--method", "rtn", "--compute", "cpu", "-o", out)
    assert result.exit_code == 0, result.output
    assert "by rtn" in result.stdout
    weights = NeutralWeights.open(out, verify=True)
    assert weights.sha256 in result.stdout
    assert weights.manifest.method == "rtn"
    assert not any("computed" in note for note in weights.manifest.notes), "the processor is the usual device"


def test_with_text_it_calibrates_and_prints_json_events(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = call(
        "quantize", "demo-draft", "-r", "s4-g64", "--calibrate", "default",
        "--bits-per-weight", 7, "--json", "-o", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    told = events(result.stdout)
    assert {event["event"] for event in told} == {"progress", "done"}
    assert any("layer 1 (rounding error of the last one" in event.get("what", "") for event in told)
    done = told[-1]
    assert done["method"] == "gptq"
    assert 6.6 < done["bits_per_weight"] <= 7
    assert "24 × 512 tokens" in done["calibration"]
    assert done["sha256"] == NeutralWeights.open(out).sha256


def test_chats_are_rendered_with_the_models_template(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    message = {"role": "user", "content": "def add(a, b):\n    return a + b\n" * 30}
    chats.write_text("\n".join([json.dumps({"messages": [message, {"role": "assistant", "content": "pass"}]})] * 3))
    out = tmp_path / "out"
    result = call("quantize", "demo-draft", "-r", "s4-g64", "--calibrate", chats, "-o", out)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "chat template" not in result.stderr
    assert "chats.jsonl" in result.stdout


def test_earlier_weights_are_reused(tmp_path: Path) -> None:
    asked = ("quantize", "demo-draft", "--effort", "quick", "--json", "-o")
    call(*asked, tmp_path / "one")
    result = call(*asked, tmp_path / "two")
    assert [event["event"] for event in events(result.stdout)] == ["done"], "nothing had to be made"
    assert NeutralWeights.open(tmp_path / "one").sha256 == NeutralWeights.open(tmp_path / "two").sha256


def test_any_failing_system_call_leaves_the_folder_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The N-th fsync or rename of copying fails, for every N until none does."""
    out, parent = tmp_path / "out", tmp_path / "place"
    call("quantize", "demo-draft", "--recipe", "s8", "--effort", "quick", "-o", out)
    weights = NeutralWeights.open(out)
    for name in ("fsync", "rename"):
        failed = 0
        while True:
            place, calls = parent / f"{name}{failed}", 0
            real = getattr(os, name)

            def sometimes(*arguments: Any, real: Any = real, last: int = failed) -> Any:
                nonlocal calls
                calls += 1
                if calls == last + 1:
                    raise OSError(errno.EIO, "Input/output error")
                return real(*arguments)

            with monkeypatch.context() as broken:
                broken.setattr(os, name, sometimes)
                try:
                    weights.copy_to(place)
                except OSError:
                    failed += 1
                else:
                    break
            if place.exists():  # only making its name durable failed
                NeutralWeights.open(place, verify=True)
            assert not [path.name for path in parent.glob(".*")]
        assert failed >= (1 if name == "rename" else 5)
        NeutralWeights.open(place, verify=True)


def test_staging_of_a_killed_copy_is_removed_and_of_a_live_one_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", "pass"]) as dead:
        pass
    mark = f".out.{boot_id()[:8]}."
    names = {
        f"{mark}{dead.pid}.part": "left by a process that is dead",
        f"{mark}1.part": "of one that lives",
        ".out.elsewhere.1.part": "of another boot or machine, written just now",
        ".out.elsewhere.2.part": "of another boot or machine, long ago",
        f".out.more.{boot_id()[:8]}.{dead.pid}.part": "of another output",
        ".out.part": "nobody's",
    }
    for name in names:
        (tmp_path / name).mkdir()
    os.utime(tmp_path / ".out.elsewhere.2.part", (1e9, 1e9))
    assert "process 1 is writing it now" in refusal("quantize", "demo-draft", "--recipe", "s8", "-o", out)
    (tmp_path / f"{mark}1.part").rmdir()
    assert call("quantize", "demo-draft", "--recipe", "s8", "--effort", "quick", "-o", out).exit_code == 0
    (tmp_path / f"{mark}1.part").mkdir()
    removed = {told for name, told in names.items() if not (tmp_path / name).exists()}
    assert removed == {"left by a process that is dead", "of another boot or machine, long ago"}


def test_refusals_name_the_cure(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "--effort quick rounds" in refusal(
        "quantize", "demo-draft", "-r", "s4-g32", "--method", "gptq", "--effort", "quick", "-o", out
    )
    assert "needs at least" in refusal("quantize", "demo-draft", "-r", "s4-g32", "--bits-per-weight", 3, "-o", out)
    assert "unknown recipe" in refusal("quantize", "demo-draft", "-r", "s5", "-o", out)
    assert "nothing is ever overwritten" in refusal("quantize", "demo-draft", "-r", "s8", "-o", tmp_path)
    assert "edgekit quantize" in refusal("inspect", tmp_path)
    assert not out.exists()


@pytest.mark.parametrize("arguments", [("quantize", "--recipe", "s4-g32"), ("export", "--device", "this")], ids=str)
def test_a_device_that_is_not_here_is_refused_before_any_work(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    import torch

    missing = "mps" if torch.cuda.is_available() else "cuda"
    said = refusal(
        arguments[0], "demo-draft", *arguments[1:], "--effort", "quick", "--compute", missing, "-o", tmp_path / "out"
    )
    assert said == f"compute {missing}: torch {torch.__version__} finds no such device here; leave it out"
    assert not (tmp_path / "out").exists()


def test_inspect_shows_layers_formats_hashes_and_one_module(tmp_path: Path) -> None:
    out = tmp_path / "out"
    call("quantize", "demo-draft", "-r", "s4-g32", "--effort", "quick", "-o", out)
    shown = call("inspect", out).stdout
    for expected in ("model.layers.1.mlp.down_proj", "s4-g32", "no calibration", "made of tokenizer.json", "bits"):
        assert expected in shown
    facts = json.loads(call("inspect", out, "--verify", "--json").stdout)
    assert facts["sha256"] == NeutralWeights.open(out).sha256
    assert sum(row["bytes"] for row in facts["modules"]) < facts["weight_bytes"]
    module = json.loads(call("inspect", out, "--tensor", "model.layers.0.mlp.up_proj", "--json").stdout)
    assert module["integers"]["least"] == -8
    assert module["scales"]["least"] >= 2**-17
    assert "scales from" in call("inspect", out, "--tensor", "model.layers.0.mlp.up_proj").stdout
    assert "no module" in refusal("inspect", out, "--tensor", "model.layers.9")


@pytest.mark.slow
def test_ctrl_c_keeps_finished_layers_and_a_rerun_resumes(tmp_path: Path) -> None:
    out, model = tmp_path / "out", write_tiny(tmp_path / "tiny", layers=6)
    arguments = [
        sys.executable, "-m", "edgekit", "quantize", str(model), "-r", "s4-g32", "--calibrate", "default", "--json",
        "-o", str(out),
    ]  # fmt: skip
    environment = {**os.environ, "EDGEKIT_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, bufsize=1
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "layer 2" in line:
            break
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130, complaint
    assert "continues from there" in complaint
    assert "Traceback" not in complaint
    assert not out.exists()
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=True)
    assert events(done.stdout)[-1]["event"] == "done"
    NeutralWeights.open(out, verify=True)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_four_bits_are_calibrated_by_default_where_that_takes_a_quarter_of_an_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = open_source("demo")
    balanced, s8 = named_recipe("balanced"), named_recipe("s8")
    assert calibration_text(None, None, None, source, [s8, balanced]) == DEFAULT_TEXT
    assert calibration_text(None, None, None, source, [s8]) is None
    assert calibration_text(None, "gptq", None, source, [s8]) == DEFAULT_TEXT
    assert calibration_text(None, "rtn", None, source, [balanced]) is None
    assert QuantOptions(effort="quick").rounds_alone(source) and not QuantOptions().rounds_alone(source)
    large: Any = SimpleNamespace(spec=shapes.spec_of(shapes.LLAMA_32_1B), folder=source.folder, given="large")
    for operations_a_second, expected in ((4e11, DEFAULT_TEXT), (4e10, None)):
        monkeypatch.setattr(effort, "_speed", lambda multiply, speed=operations_a_second: speed)
        assert calibration_text(None, None, None, large, [balanced]) == expected
    told: list[str] = []
    assert calibration_for(large, [balanced], QuantOptions(report=Reporter(note=told.append))) is None
    (line,) = told
    assert re.search(r"rounded to the nearest.*takes about (1\.\d hours|\d+ minutes) here: effort normal$", line)
