"""The Kotlin class over the C API gives Python's texts on a JVM; needs a JDK and kotlinc, which KOTLINC may name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from edgekit_native.build import SOURCES, build, run
from edgekit_native.library import NativeModel, onnxruntime_library

import edgekit

pytestmark = [pytest.mark.onnx, pytest.mark.quantize, pytest.mark.slow]
PROMPT = "class Größe 🙂:"
MESSAGES = [{"role": "system", "content": "Kürze 🙂"}, {"role": "user", "content": "Add two numbers."}]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that starts the compiled program."""
    compiler, java = os.environ.get("KOTLINC") or shutil.which("kotlinc"), shutil.which("java")
    if compiler is None or java is None:
        pytest.skip("kotlinc and java are not installed")
    if "NATIVE_SANITIZE" in os.environ:
        pytest.skip("a JVM does not start with sanitizers")
    home = Path(java).resolve().parents[1]
    if not (home / "include/jni.h").is_file():
        pytest.skip("jni.h of the JDK is not installed")
    folder = tmp_path_factory.mktemp("kotlin")
    shutil.copy(build(), folder)
    headers = [f"-I{each}" for each in (SOURCES, home / "include", home / "include/linux", home / "include/darwin")]
    options = ["-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *headers, "-Wl,-rpath,$ORIGIN"]
    made = folder / "libedgekit_jni.so"
    library = folder / "libedgekit_native.so"
    run(os.environ.get("CXX", "c++"), *options, SOURCES / "jvm/edgekit_jni.cpp", library, "-o", made)
    sources = (SOURCES / "jvm/NativeModel.kt", Path(__file__).with_name("Answers.kt"))
    run("bash", compiler, "-Werror", *sources, "-include-runtime", "-d", folder / "answers.jar")
    return [java, "-Xcheck:jni", f"-Djava.library.path={folder}", "-cp", str(folder / "answers.jar"), "AnswersKt"]


def test_texts_of_kotlin_are_those_of_python(
    program: list[str], demo_artifact: Path, runtime: edgekit.Runtime, model: NativeModel
) -> None:
    words = [*program, str(demo_artifact), str(onnxruntime_library()), PROMPT, json.dumps(MESSAGES, ensure_ascii=False)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr  # of -Xcheck:jni
    lines = (line.split(" ") for line in done.stdout.splitlines())
    found = {" ".join(name): bytes.fromhex(text).decode() for *name, text in lines}
    greedy = runtime.generate(PROMPT, max_tokens=40, temperature=0)
    sampled = runtime.generate(
        PROMPT, max_tokens=40, temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, typical_p=0.95,
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1, seed=1_000_000_000_007,
        stop=("zzz", "é🙂"),
    )  # fmt: skip
    assert found == {
        "greedy": greedy.text,
        "streamed": greedy.text,
        "tokens": " ".join(map(str, greedy.tokens)),
        "reason": "OUT_OF_LENGTH" if greedy.finish_reason == "length" else "STOPPED",
        "sampled": sampled.text,
        "rendered": model.template.render(MESSAGES),
        "chat": runtime.chat(MESSAGES, max_tokens=30, temperature=0.8, seed=5).text,
        "cancelled": "CANCELLED",
        "listener": "the listener 🙂 failed",
        "after it": greedy.text,
        "option": found["option"],
        "template": found["template"],
        "folder": found["folder"],
        "closed": "this model is closed",
    }
    assert found["option"].startswith("top_p: 0") and "/nowhere/🙂" in found["folder"] and found["template"]
