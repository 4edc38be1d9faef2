"""`edgekit doctor`: vendor libraries are really tried, conflicts are named with their fix, and nothing crashes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edgekit.cli import main
from edgekit.contracts.device import DeviceProfile
from edgekit.device.load import load_profile
from edgekit.doctor import Finding, Practice, examine, packages, probes
from edgekit.doctor.packages import Extra
from edgekit.doctor.probes import ProbeOutcome, try_out
from edgekit.errors import Unsupported

NEEDED = [
    "numpy>=1.26",
    "onnx-ir<2,>=1.1; extra == 'onnx'",
    "onnxruntime<1.32,>=1.31; extra == 'onnx'",
    "onnx-ir<2,>=1.1; extra == 'cuda'",
    "onnxruntime-gpu[cuda,cudnn]<1.32,>=1.31; extra == 'cuda'",
    "mlx<0.33,>=0.32; (sys_platform == 'plan9') and extra == 'mlx'",
    "executorch<1.6,>=1.5; extra == 'executorch'",
    "torch<2.14,>=2.13; extra == 'executorch'",
    "torchao<0.19,>=0.18; extra == 'executorch'",
    "this is no requirement; extra == 'quantize'",
]
ONNX = {"onnxruntime": "1.31.1", "onnx-ir": "1.1.0"}
FINE = {
    "onnxruntime": {"version": "1.31.1", "available": ["CPU"], "used": ["CPUExecutionProvider"], "works": True},
    "torch": {"version": "2.13.0", "cuda": False, "works": True},
    "target": {"missing": None, "works": True},
}


def practice(
    installed: dict[str, str],
    outcomes: dict[str, ProbeOutcome] | None = None,
    machine: str = "macbook-m4-16gb",
    system: str = "Linux",
    unmet: dict[str, list[str]] | None = None,
) -> Practice:
    """Make a machine with these packages and probe outcomes."""

    def probe(arguments: Sequence[str], timeout_s: float) -> ProbeOutcome:
        return (outcomes or {}).get(arguments[0]) or ProbeOutcome(FINE.get(arguments[0], {"works": True}))

    return Practice(
        installed=installed.get,
        extras=lambda: packages.extras(NEEDED, installed.get),
        unmet=lambda name: (unmet or {}).get(name, []),
        targets=lambda: ["onnx"],
        probe=probe,
        machine=lambda: load_profile(machine),
        system=system,
    )


def finding(findings: Sequence[Finding], subject: str) -> Finding:
    return next(each for each in findings if each.subject == subject)


def test_a_machine_where_all_works_is_healthy() -> None:
    diagnosis = examine(practice(ONNX))
    assert diagnosis.is_healthy
    assert finding(diagnosis.findings, "edgekit[onnx]").status == "installed"
    assert finding(diagnosis.findings, "onnxruntime on the CPU").status == "works"
    assert finding(diagnosis.findings, "target onnx").status == "works"
    assert "edgekit[cuda]" not in {each.subject for each in diagnosis.findings}


@pytest.mark.parametrize(
    ("change", "found", "cure"),
    [
        ({"platform": "win32"}, "xllamacpp's library for Windows does not export", "use --target onnx here"),
        ({"_opens_libgomp": lambda: False}, "the system lacks libgomp.so.1", "apt-get install libgomp1"),
    ],
)
def test_why_llamacpp_cannot_run_is_one_line(
    change: dict[str, Any], found: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip("edgekit_llamacpp.library")
    monkeypatch.setattr(sys, "platform", change.pop("platform", "linux"))
    ready = {"version_of": lambda name: library.PINNED, "_library_of_package": lambda: Path("/lib.so")}
    for name, value in {**ready, "_has_avx2": lambda: True, **change}.items():
        monkeypatch.setattr(library, name, value)
    diagnosis = examine(practice({}, {"target": ProbeOutcome(probes.target("llamacpp"))}))
    told = finding(diagnosis.findings, "target onnx")  # the one target of this practice
    assert told.status == "missing" and found in told.found and cure in str(told.cure)
    assert "\n" not in f"{told.found}{told.cure}"


def test_a_missing_package_has_an_install_command_and_is_no_trouble() -> None:
    diagnosis = examine(practice({}))
    found = finding(diagnosis.findings, "edgekit[executorch]")
    assert (found.status, found.cure) == ("missing", "pip install 'edgekit[executorch]'")
    assert "torchao" in found.found and diagnosis.is_healthy


def test_an_extra_for_other_platforms_needs_nothing() -> None:
    found = finding(examine(practice({})).findings, "edgekit[mlx]")
    assert found.status == "missing" and found.cure is None and "platform" in found.found


def test_both_onnxruntimes_are_a_conflict_with_a_cure() -> None:
    both = ONNX | {"onnxruntime-gpu": "1.31.1"}
    diagnosis = examine(practice(both))
    found = finding(diagnosis.findings, "onnxruntime and onnxruntime-gpu")
    assert not diagnosis.is_healthy
    assert found.cure == "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'edgekit[onnx]'"
    with_gpu = examine(practice(both, machine="rtx-4090"))
    cure = finding(with_gpu.findings, "onnxruntime and onnxruntime-gpu").cure
    assert cure is not None and cure.endswith("pip install 'edgekit[cuda]'")


def test_an_unsupported_version_is_a_conflict() -> None:
    diagnosis = examine(practice({"executorch": "1.5.1", "torch": "2.9.0", "torchao": "0.18.0"}))
    found = finding(diagnosis.findings, "edgekit[executorch]")
    assert found.status == "conflict" and "torch 2.9.0 (wanted <2.14,>=2.13)" in found.found
    assert not diagnosis.is_healthy


def test_local_version_suffix_is_accepted() -> None:
    there = {"executorch": "1.5.1", "torch": "2.13.0+cpu", "torchao": "0.18.0"}
    assert finding(examine(practice(there)).findings, "edgekit[executorch]").status == "installed"


def test_unmet_requirements_of_a_package_are_a_conflict() -> None:
    unmet = {"torchao": ["torch 2.9.0 (wanted >=2.13)"]}
    diagnosis = examine(practice({"torchao": "0.18.0"}, unmet=unmet))
    assert finding(diagnosis.findings, "torchao").status == "conflict" and not diagnosis.is_healthy


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(ProbeOutcome({}, "the process was ended by signal 11"), id="crash"),
        pytest.param(ProbeOutcome({}, "did not answer within 120 s"), id="hang"),
        pytest.param(ProbeOutcome({"version": "1.31.1", "works": False}), id="wrong answer"),
        pytest.param(ProbeOutcome({}), id="no facts"),
    ],
)
def test_a_library_that_does_not_work_is_broken_with_a_cure(outcome: ProbeOutcome) -> None:
    diagnosis = examine(practice(ONNX, {"onnxruntime": outcome}))
    found = finding(diagnosis.findings, "onnxruntime on the CPU")
    assert found.status == "broken" and found.cure is not None and "pip install" in found.cure
    assert not diagnosis.is_healthy


def test_cuda_that_silently_falls_back_is_broken() -> None:
    installed = {"onnxruntime-gpu": "1.31.1", "onnx-ir": "1.1.0"}
    diagnosis = examine(practice(installed, machine="rtx-4090"))
    found = finding(diagnosis.findings, "onnxruntime on CUDA")
    assert found.status == "broken" and "fell back to CPUExecutionProvider" in found.found


def test_the_target_explains_why_it_is_missing() -> None:
    facts = {"missing": "onnxruntime is not installed; pip install 'edgekit[onnx]'", "works": False}
    found = finding(examine(practice({}, {"target": ProbeOutcome(facts)})).findings, "target onnx")
    assert (found.status, found.cure) == ("missing", "pip install 'edgekit[onnx]'")


def test_doctor_explains_wired_memory_on_a_mac() -> None:
    assert any("iogpu.wired_limit_mb" in note for note in examine(practice({}, system="Darwin")).notes)
    assert examine(practice({})).notes == ()


def test_a_machine_that_cannot_be_detected_does_not_stop_the_rest() -> None:
    def undetectable() -> DeviceProfile:
        raise Unsupported("Plan9: cannot be detected")

    diagnosis = examine(practice(ONNX)._replace(machine=undetectable))
    assert diagnosis.machine is None and diagnosis.is_healthy
    assert "Plan9" in finding(diagnosis.findings, "this machine").found


@pytest.mark.parametrize(
    ("script", "message"),
    [
        pytest.param("import os; os.abort()", "signal 6", id="abort"),
        pytest.param("import os; os.kill(os.getpid(), 11)", "signal 11", id="segfault"),
        pytest.param("raise ImportError('libcudnn.so.9: cannot open')", "libcudnn.so.9", id="exception"),
        pytest.param("import time; time.sleep(60)", "did not answer within", id="hang"),
        pytest.param("import sys; sys.exit(7)", "exited with 7", id="exit"),
        pytest.param("print('loaded')", "without an answer", id="no JSON"),
        pytest.param("print([1])", "something else", id="other JSON"),
    ],
)
def test_a_crashing_or_hanging_probe_gives_a_result(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    outcome = try_out(["mlx"], 2.0)
    assert outcome.failure is not None and message in outcome.failure


def test_missing_python_gives_a_failed_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert "could not be started" in (try_out(["mlx"], 2.0).failure or "")


@pytest.mark.onnx
def test_onnxruntime_is_really_tried() -> None:
    pytest.importorskip("onnxruntime")
    outcome = try_out(["onnxruntime", ""], 60.0)
    assert outcome.failure is None and outcome.facts["works"] is True
    assert outcome.facts["used"] == ["CPUExecutionProvider"]


@pytest.mark.parametrize("name", ["mlx", "executorch", "torch", "torchao", "onnxruntime"])
def test_import_error_is_the_probes_failure(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{name}.py").write_text("raise ImportError('libvendor.so.9: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "libvendor.so.9" in (try_out([name], 60.0).failure or "")


def test_targets_are_probed_in_their_own_process() -> None:
    outcome = try_out(["target", "onnx"], 60.0)
    assert outcome.failure is None and "missing" in outcome.facts
    assert "no-such-target" in (try_out(["target", "no-such-target"], 60.0).failure or "")


def test_requirements_are_read_from_package_metadata() -> None:
    there = {"a": "1.0", "b": "0.5", "c": "not a version"}
    needs = ["b>=1", "c", "c>2", "d", "e; extra == 'x'", "f; sys_platform == 'plan9'", "not a requirement"]
    assert packages.unmet("a", needs, there.get) == [
        "b 0.5 (wanted >=1)",
        "c not a version (wanted >2)",
        "d is not installed (wanted any version)",
    ]
    assert packages.unmet("absent", needs, there.get) == []


def test_the_extras_are_those_of_the_package() -> None:
    assert {extra.name for extra in packages.extras()} == set(packages.EXTRAS)
    assert all(isinstance(extra, Extra) and extra.total >= 0 for extra in packages.extras())
    assert {"onnx", "cuda", "executorch"} <= {extra.name for extra in packages.extras() if extra.total}


def test_every_probe_has_a_name_that_the_command_knows() -> None:
    assert set(probes.PROBES) == {"onnxruntime", "mlx", "executorch", "torch", "torchao", "target"}


@pytest.mark.parametrize(("installed", "code"), [(ONNX, 0), (ONNX | {"onnxruntime-gpu": "1.31.1"}, 1)])
def test_the_command_answers_in_json_and_with_its_exit_code(
    installed: dict[str, str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edgekit.cli.doctor.examine", lambda: examine(practice(installed, system="Darwin")))
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json"])
    body = json.loads(capsys.readouterr().out)
    assert ended.value.code == code
    assert any(each["status"] == "conflict" for each in body["findings"]) == (code == 1)
    assert body["machine"]["name"] == "macbook-m4-16gb" and "wired_limit_mb" in body["notes"][0]
