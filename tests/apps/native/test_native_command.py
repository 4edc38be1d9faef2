"""`edgekit run --native`: Python's texts by the native loop, and a refusal for each option that it lacks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

import edgekit
from edgekit.apps.native.build import build
from edgekit.apps.native.library import API_VERSION, NativeLibrary
from edgekit.apps.native.loop import PACKAGE, NativeLoop, find_library
from edgekit.apps.native.wheel import MOST_BYTES, make_wheel, oldest_glibc, pack
from edgekit.cli import command
from edgekit.errors import EdgekitError, InvalidInput, TargetFailed, TargetMissing

pytestmark = [
    pytest.mark.onnx, pytest.mark.quantize, pytest.mark.slow,
    pytest.mark.skipif("NATIVE_SANITIZE" in os.environ, reason="the command finds the library without sanitizers"),
]  # fmt: skip
PROMPT = "import numpy as np"
ONLY_IN_PYTHON: dict[str, tuple[str, ...]] = {
    "--context": ("100",), "--window": ("90",), "--keep": ("scored",),
    "--memory": ("1GiB",), "--kv-bits": ("8",),
    "--schema": ("s.json",), "--regex": ("a+",), "--grammar": ("g.lark",),
    "--prefixes": ("p",), "--adapter": ("a=b",), "--batch": ("b.jsonl",),
    "--output": ("o",), "--sequences": ("2",), "--draft": ("early-exit",),
}  # fmt: skip


def run(artifact: Path, *arguments: str) -> str:
    result = CliRunner().invoke(command, ["run", str(artifact), *arguments, "--native"])
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(artifact: Path, *arguments: str) -> str:
    result = CliRunner().invoke(command, ["run", str(artifact), *arguments, "--native"])
    assert isinstance(result.exception, EdgekitError) and "\n" not in str(result.exception)
    return str(result.exception)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("options", "generation"),
    [
        ((), {}),
        (("--temperature", "0.9", "--top-p", "0.9", "--seed", "7"), {"temperature": 0.9, "top_p": 0.9, "seed": 7}),
        (("--temperature", "1", "--top-k", "9", "--min-p", "0.01", "--seed", "1"),
         {"temperature": 1.0, "top_k": 9, "min_p": 0.01, "seed": 1}),
        (("--repetition-penalty", "1.3"), {"repetition_penalty": 1.3}),
        (("--stop", "pytest", "--stop", "as"), {"stop": ("pytest", "as")}),
    ],
    ids=["greedy", "top-p", "filters", "penalty", "ends"],
)  # fmt: skip
def test_texts_are_those_of_the_python_loop(
    demo_artifact: Path, runtime: edgekit.Runtime, options: tuple[str, ...], generation: dict[str, object]
) -> None:
    python = runtime.generate(PROMPT, max_tokens=24, **generation)  # type: ignore[arg-type]
    assert run(demo_artifact, PROMPT, "--raw", "--max-tokens", "24", *options) == python.text + "\n"


@pytest.mark.usefixtures("library")
def test_a_chat_is_rendered_and_its_figures_are_shown(demo_artifact: Path, runtime: edgekit.Runtime) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add two numbers."}]
    python = runtime.chat(messages, max_tokens=20, temperature=0.8, seed=3)
    words = ("Add two numbers.", "--system", "Be brief.", "--max-tokens", "20", "--temperature", "0.8", "--seed", "3")
    found = json.loads(run(demo_artifact, *words, "--json"))
    assert (found["text"], found["finish_reason"], found["seed"]) == (python.text, python.finish_reason, 3)
    assert found["tokens"] == len(python.tokens) and found["statistics"]["prompt_tokens"] > 10
    result = CliRunner().invoke(command, ["run", str(demo_artifact), *words, "--stats", "--native"])
    assert result.stdout == python.text + "\n" and "predicted for laptop-x86-16gb" in result.stderr
    memory = {each["name"]: each["measured_bytes"] for each in found["statistics"]["memory"]["classes"]}
    assert set(memory) == {"mapped weights", "runtime and private weights", "cache", "activations"}
    assert all(memory.values()) and memory["cache"] == found["statistics"]["memory"]["states_used_bytes"]
    assert re.search(r"\n +mapped weights +[\d.]+ MiB +[\d.]+ [KM]iB\n", result.stderr)
    assert "--system" in refusal(demo_artifact, "x", "--raw", "--system", "y")


@pytest.mark.usefixtures("library")
def test_weights_are_packed_once_unless_that_is_turned_off(
    demo_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = find_library()
    monkeypatch.setattr("edgekit.apps.native.loop.find_library", lambda target: compiled)
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    private, kept = [], []
    for setting in ("off", "1MiB", "1GiB"):
        monkeypatch.setenv("EDGEKIT_PACKED", setting)
        memory = json.loads(run(demo_artifact, PROMPT, "--raw", "--json"))["statistics"]["memory"]
        private += [row["predicted_bytes"] for row in memory["classes"] if row["name"] == "runtime and private weights"]
        kept.append(any(tmp_path.glob("packed/*/weights/packed.txt")))
    assert private[0] == private[1] > private[2]
    (head,) = tmp_path.glob("packed/*/weights/head.bin")
    head.write_bytes(head.read_bytes()[:-1])
    run(demo_artifact, PROMPT, "--raw")  # packed again
    assert kept == [False, False, True]


@pytest.mark.parametrize("name", ONLY_IN_PYTHON)
def test_what_the_native_loop_lacks_is_refused_by_name(demo_artifact: Path, name: str) -> None:
    assert "native" in (message := refusal(demo_artifact, PROMPT, name, *ONLY_IN_PYTHON[name])) and name in message


def test_every_option_is_known_or_refused() -> None:
    from edgekit.cli._native import _KNOWN
    from edgekit.cli.run import command as run_command

    options = {name for each in run_command.params for name in each.opts if name.startswith("--")}
    assert options == _KNOWN | ONLY_IN_PYTHON.keys()


def test_without_a_library_one_line_says_what_to_do(
    demo_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    assert "pip install edgekit-native" in refusal(demo_artifact, PROMPT)


@pytest.mark.usefixtures("library")
def test_ctrl_c_ends_the_answer(demo_artifact: Path) -> None:
    words = ["run", str(demo_artifact), "def add(a, b):", "--raw", "--native"]
    with subprocess.Popen([sys.executable, "-m", "edgekit", *words], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read().decode()
        assert process.wait(60) == 130
    assert rest.endswith("\n")


@pytest.mark.usefixtures("library")
def test_an_error_of_the_library_reaches_the_reader(demo_artifact: Path) -> None:
    loop = NativeLoop(demo_artifact, "onnx")
    stream = loop.stream("x " * 2000)
    assert "".join(stream) == ""
    with pytest.raises(InvalidInput, match="the context holds"):
        stream.answer()
    loop.close()


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_bytes(b"x")
    with pytest.raises(TargetMissing, match="not edgekit's native library"):
        NativeLibrary(tmp_path / "x.so")


@pytest.mark.usefixtures("library")
def test_the_library_of_a_wheel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = build()
    wheels = [
        pack(compiled, tmp_path / name, "py3-none-any") for name in ("one", "two") if not (tmp_path / name).mkdir()
    ]
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    zipfile.ZipFile(wheels[0]).extractall(tmp_path / "site")
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    with pytest.raises(TargetMissing, match=r"python -m edgekit\.apps\.native\.build"):
        find_library()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert find_library() == tmp_path / "site" / PACKAGE / compiled.name


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_a_library_names_the_systems_that_have_its_symbols(tmp_path: Path, library: NativeLibrary) -> None:
    assert 17 <= oldest_glibc(build()) < 60
    (tmp_path / "other.cpp").write_text("int other() { return 1; }")
    (tmp_path / "more.cpp").write_text("int other(); int more() { return other(); }")
    for name, linked in (("other", []), ("more", [f"{tmp_path}/libother.so"])):
        options = ["-shared", "-fPIC", f"{tmp_path}/{name}.cpp", *linked, "-o", f"{tmp_path}/lib{name}.so"]
        subprocess.run([os.environ.get("CXX", "c++"), *options], check=True)
    with pytest.raises(TargetFailed, match="libother"):
        oldest_glibc(tmp_path / "libmore.so")


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="wheels are made on Linux")
def test_the_wheel_runs_in_an_environment_of_its_own(library: NativeLibrary, tmp_path: Path) -> None:
    import platform
    import venv

    wheel = make_wheel(tmp_path, platform.machine(), "c++")
    assert "manylinux_2_" in wheel.name and wheel.stat().st_size < MOST_BYTES
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    path = f"{PACKAGE}.__path__[0] + '/libedgekit_native.so'"
    code = f"import ctypes, {PACKAGE}; print(ctypes.CDLL({path}).edgekit_api_version())"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == f"{API_VERSION}\n"
