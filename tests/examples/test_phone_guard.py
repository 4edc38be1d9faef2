"""The crash guard of the Android example writes Python's file and decides as Python does.

It needs a JDK and kotlinc, which KOTLINC may name.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_artifacts import install, make_artifact

from edgekit.artifact.artifact import read_manifest
from edgekit.runtime.guard import CrashGuard, GuardRecord, settings_of

SOURCE = Path(__file__).parents[2] / "examples/android/app/src/main/java/com/example/edgekit/CrashGuard.kt"
STARTS = ["begin", "begin opened", "begin opened before", "begin opened before 3", "begin opened before 3 5",
          "begin opened before 1 end", "begin opened before 9 before 2"]  # fmt: skip

# One start of an app: file, sha256 of the artifact, settings and calls; returns the step and the note.
Start = Callable[[Path, str, list[str], str], tuple[int, str]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    compiler, java = os.environ.get("KOTLINC") or shutil.which("kotlinc"), shutil.which("java")
    if compiler is None or java is None:
        pytest.skip("kotlinc and java are not installed")
    made = tmp_path_factory.mktemp("guard") / "guard.jar"
    sources = [str(SOURCE), str(Path(__file__).with_name("GuardSteps.kt"))]
    command = ["bash", compiler, "-Werror", *sources, "-include-runtime", "-d", str(made)]
    compiled = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert compiled.returncode == 0, compiled.stderr
    program = [java, "-Dfile.encoding=UTF-8", "-cp", str(made), "GuardStepsKt"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8") as running:
        assert running.stdin is not None and running.stdout is not None
        told, said = running.stdin, running.stdout

        def call(file: Path, artifact: str, settings: list[str], calls: str) -> tuple[int, str]:
            print(file, artifact, "|".join(settings), calls, sep="\t", file=told, flush=True)
            step, _, note = said.readline().rstrip("\n").partition("\t")
            return int(step), note

        yield call
        told.close()


def start_in_python(file: Path, artifact: Path, calls: str) -> tuple[int, str]:
    guard = CrashGuard(file, artifact)
    named = {
        "begin": guard.begin,
        "opened": guard.opened,
        "before": guard.before_step,
        "end": lambda: guard.after_step(0, has_answered=True),
    }
    for each in calls.split():
        if each in named:
            named[each]()
        else:
            guard.after_step(int(each), has_answered=False)
    return guard.record.step, guard.record.note


@pytest.mark.slow
def test_kotlin_and_python_write_one_file(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "target", monkeypatch)
    artifact = read_manifest(make_artifact(tmp_path / "artifact", context=2048))
    settings = [each.what for each in settings_of(artifact, None)]
    of_python, of_kotlin, of_both = (tmp_path / name for name in ("python", "kotlin", "both"))
    choose, reached = random.Random(0), set()
    for trip in range(80):
        if trip % 16 == 0:  # as if the app had been installed anew
            for file in (of_python, of_kotlin, of_both):
                file.unlink(missing_ok=True)
        calls = choose.choice(STARTS[: 1 + trip % len(STARTS)])
        expected = start_in_python(of_python, artifact.folder, calls)
        assert start(of_kotlin, artifact.sha256, settings, calls) == expected
        if choose.random() < 0.5:
            assert start(of_both, artifact.sha256, settings, calls) == expected
        else:
            assert start_in_python(of_both, artifact.folder, calls) == expected
        assert of_python.read_bytes() == of_kotlin.read_bytes() == of_both.read_bytes()
        reached.add(expected[0])
    assert reached == {0, 1, 2}


@pytest.mark.slow
def test_kotlin_keeps_any_note_and_starts_anew_from_damage(start: Start, tmp_path: Path) -> None:
    file, sha256, settings = tmp_path / "guard", "a" * 64, ['große "Karte" \\n', "small"]
    notes = [start(file, sha256, settings, "begin") for _ in range(4)]
    assert [step for step, _ in notes] == [0, 0, 1, 1]
    assert notes[2][1] == f"2 starts in a row died, the last while it was opened ({settings[0]}); opened smaller: small"
    assert notes[3][1].endswith("(small); there is nothing smaller to open")
    assert GuardRecord.model_validate_json(file.read_bytes()).note == notes[3][1]
    long = GuardRecord(artifact=sha256, step=1, state="ended well", note='"' * 10_000)
    file.write_text(long.model_dump_json())
    assert start(file, sha256, settings, "begin opened before 8") == (1, long.note)
    assert GuardRecord.model_validate_json(file.read_bytes()) == long
    for damage in ("", "{}", "[1]", long.model_dump_json()[:-1], GuardRecord(artifact="0" * 64).model_dump_json()):
        file.write_text(damage)
        assert start(file, sha256, settings, "begin") == (0, "")
