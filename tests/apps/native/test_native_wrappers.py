"""The Kotlin and Swift classes over the C API give Python's texts.

Kotlin needs a JDK and kotlinc, Swift needs swiftc; KOTLINC and SWIFTC may name the compilers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import edgekit
from edgekit.apps.native.build import SOURCES, build, run
from edgekit.apps.native.library import NativeModel, onnxruntime_library

pytestmark = [pytest.mark.onnx, pytest.mark.quantize, pytest.mark.slow]
PROMPT = "class Größe 🙂:"
MESSAGES = [{"role": "system", "content": "Kürze 🙂"}, {"role": "user", "content": "Add two numbers."}]
KOTLIN_ONLY = {"reason": "OUT_OF_LENGTH", "cancelled": "CANCELLED", "closed": "this model is closed"}
SWIFT_ONLY = {
    "reason": "outOfLength",
    "cancelled": "cancelled",
    "second": "this model is answering another request; wait, or open it twice",
}


def kotlin_program(folder: Path) -> list[str]:
    """Compile Answers.kt; return the command that starts it."""
    compiler, java = os.environ.get("KOTLINC") or shutil.which("kotlinc"), shutil.which("java")
    if compiler is None or java is None:
        pytest.skip("kotlinc and java are not installed")
    if "NATIVE_SANITIZE" in os.environ:
        pytest.skip("a JVM does not start with sanitizers")
    home = Path(java).resolve().parents[1]
    if not (home / "include/jni.h").is_file():
        pytest.skip("jni.h of the JDK is not installed")
    shutil.copy(build(), folder)
    headers = [f"-I{each}" for each in (SOURCES, home / "include", home / "include/linux", home / "include/darwin")]
    options = ["-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *headers, "-Wl,-rpath,$ORIGIN"]
    made = folder / "libedgekit_jni.so"
    library = folder / "libedgekit_native.so"
    run(os.environ.get("CXX", "c++"), *options, SOURCES / "jvm/edgekit_jni.cpp", library, "-o", made)
    sources = (SOURCES / "jvm/NativeModel.kt", Path(__file__).with_name("Answers.kt"))
    run("bash", compiler, "-Werror", *sources, "-include-runtime", "-d", folder / "answers.jar")
    return [java, "-Xcheck:jni", f"-Djava.library.path={folder}", "-cp", str(folder / "answers.jar"), "AnswersKt"]


def swift_program(folder: Path) -> list[str]:
    """Compile the Swift module and Answers.swift; return the command that starts it."""
    compiler = os.environ.get("SWIFTC") or shutil.which("swiftc")
    if compiler is None:
        pytest.skip("swiftc is not installed")
    if "NATIVE_SANITIZE" in os.environ:
        pytest.skip("the program is linked without sanitizers")
    shutil.copy(build(), folder)
    places = ["-I", SOURCES / "swift/Sources/CEdgekit", "-I", folder, "-L", folder, "-Xlinker", f"-rpath={folder}"]
    options = ["-swift-version", "6", "-warnings-as-errors", "-parse-as-library", *places]
    module = ["-emit-library", "-emit-module", "-emit-module-path", folder / "Edgekit.swiftmodule"]
    source = SOURCES / "swift/Sources/Edgekit/NativeModel.swift"
    run(compiler, *options, "-module-name", "Edgekit", *module, source, "-o", folder / "libEdgekit.so")
    program = folder / "answers"
    run(compiler, *options, "-lEdgekit", Path(__file__).with_name("Answers.swift"), "-o", program)
    return [str(program)]


@pytest.mark.parametrize(
    ("program", "expected"),
    [pytest.param(kotlin_program, KOTLIN_ONLY, id="kotlin"), pytest.param(swift_program, SWIFT_ONLY, id="swift")],
)
def test_texts_are_those_of_python(
    program: Callable[[Path], list[str]],
    expected: dict[str, str],
    tmp_path: Path,
    demo_artifact: Path,
    runtime: edgekit.Runtime,
    model: NativeModel,
) -> None:
    words = [str(demo_artifact), str(onnxruntime_library()), PROMPT, json.dumps(MESSAGES, ensure_ascii=False)]
    done = subprocess.run([*program(tmp_path), *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr  # of -Xcheck:jni
    lines = (line.split(" ") for line in done.stdout.splitlines())
    found = {" ".join(name): bytes.fromhex(text).decode() for *name, text in lines}
    greedy = runtime.generate(PROMPT, max_tokens=40, temperature=0)
    assert greedy.finish_reason == "length"
    sampled = runtime.generate(
        PROMPT, max_tokens=40, temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, typical_p=0.95,
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1, seed=1_000_000_000_007,
        stop=("zzz", "é🙂"),
    )  # fmt: skip
    option, template, folder = (found.pop(name) for name in ("option", "template", "folder"))
    assert option.startswith("top_p: 0")
    assert template
    assert "/nowhere/🙂" in folder and found.pop("verified") == folder
    same = ("greedy", "streamed", "async", "after it")
    assert {name: text for name, text in found.items() if name in same} == {
        name: greedy.text for name in same if name != "async" or program is swift_program
    }
    assert {name: text for name, text in found.items() if name not in same} == expected | {
        "tokens": " ".join(map(str, greedy.tokens)),
        "sampled": sampled.text,
        "cache": str(model.memory().cache),
        "rendered": model.template.render(MESSAGES),
        "chat": runtime.chat(MESSAGES, max_tokens=30, temperature=0.8, seed=5).text,
        "listener": "the listener 🙂 failed",
    }
