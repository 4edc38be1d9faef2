"""The native library, built with ExecuTorch: a phone's program gives the texts that Python's runtime gives with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("executorch")

from click.testing import CliRunner
from executorch_models import sealed_program
from executorch_wheel import attention_library, installed_folder
from native_answers import native_answers, with_plan, with_window

import edgekit
from edgekit.apps.native.build import build, missing
from edgekit.apps.native.library import NativeLibrary
from edgekit.cli import command
from edgekit.errors import InvalidInput, TargetMissing

pytestmark = [
    pytest.mark.executorch, pytest.mark.quantize, pytest.mark.long,
    pytest.mark.skipif("NATIVE_SANITIZE" in os.environ, reason="ExecuTorch is linked without sanitizers"),
]  # fmt: skip
WINDOW = {"window": 32, "sinks": 4, "block": 5}
PROMPTS = ("import numpy", "Größe 🙂", "abc abc abc abc", "a" * 40, "x")  # the fourth has several chunks
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 0.0, "stop": ["e", "th"]},
)
WAYS: tuple[dict[str, Any], ...] = (
    {}, {"draft_tokens": 6}, {"reuses_prefix": 1}, {"draft_tokens": 30, "reuses_prefix": 1},
)  # fmt: skip


@pytest.fixture(scope="module")
def with_executorch() -> Path:
    return pytest.skip(reason) if (reason := missing()) else build(executorch=installed_folder())


@pytest.fixture(scope="module", params=[32, 8])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sealed_program(tmp_path_factory.mktemp("program"), "qwen2", "s4-g32", request.param).folder


def compare(library: Path, artifact: Path, ways: tuple[dict[str, Any], ...] = WAYS[:1], *, exact: bool = False) -> int:
    """Compare texts; return the number of drafted tokens that the native library accepted."""
    asked = [
        {"prompt": prompt, **options, "max_tokens": 40, "seed": seed}
        for seed, prompt in enumerate(PROMPTS)
        for options in OPTIONS
    ]
    with edgekit.open(artifact, draft="off", prefixes=0, exact=exact) as runtime:
        texts = [runtime.generate(request["prompt"], ignore_eos=True, **without_prompt(request)) for request in asked]
    accepted = 0
    for way in ways:
        requests = [{**request, **way, "ignores_ends": 1} for request in asked]
        operators = str(attention_library())
        answers = native_answers(library, artifact, requests, operators=operators, exact=exact)
        for request, native, python in zip(requests, answers, texts, strict=True):
            assert (native["text"], tuple(native["tokens"])) == (python.text, python.tokens), request
            assert native["finish_reason"] == python.finish_reason
            accepted += native["accepted_tokens"]
    return accepted


def without_prompt(request: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in request.items() if name != "prompt"}


def test_texts_are_those_of_python(with_executorch: Path, program: Path) -> None:
    compare(with_executorch, program)


def test_exact_texts_do_not_depend_on_drafts_or_prefixes(with_executorch: Path, program: Path) -> None:
    assert compare(with_executorch, program, WAYS, exact=True) > 5


def test_windows_evict_where_python_evicts(with_executorch: Path, program: Path, tmp_path: Path) -> None:
    """Keys of 8 bits are rotated back as floats and quantised again."""
    compare(with_executorch, with_window(program, tmp_path / "windowed", **WINDOW), exact=True)


@pytest.mark.usefixtures("with_executorch")
def test_the_command_runs_programs_and_counts_their_memory(program: Path) -> None:
    with edgekit.open(program, draft="off", prefixes=0) as runtime:
        python = runtime.generate(PROMPTS[0], max_tokens=30, temperature=0.8, seed=2)
    words = ["run", str(program), PROMPTS[0], "--raw", "--max-tokens", "30", "--temperature", "0.8", "--seed", "2"]
    told = subprocess.run(
        [sys.executable, "-m", "edgekit", *words, "--native", "--json"], capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    answer = json.loads(told.stdout)
    assert (answer["text"], answer["finish_reason"]) == (python.text, python.finish_reason)
    plan = json.loads((program / "manifest.json").read_bytes())["plan"]
    memory = answer["statistics"]["memory"]
    values = 4 if plan["storage"]["kv_bits"] == 32 else 1
    a_token = sum(
        2 * layer["kv_heads"] * (values * layer["head_dim"] + (5 if values == 1 else 0))
        for layer in plan["model"]["layers"]
    )
    held = answer["statistics"]["prompt_tokens"] + answer["tokens"] - 1
    assert memory["states_used_bytes"] == held * a_token
    assert memory["states_allocated_bytes"] == plan["storage"]["capacity_tokens"] * a_token
    classes = {each["name"]: each["measured_bytes"] for each in memory["classes"]}
    assert all(classes[name] > 0 for name in ("mapped weights", "runtime and private weights"))


def test_without_the_library_one_line_says_how_to_compile_it(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    result = CliRunner().invoke(command, ["run", str(program), "x", "--native"])
    assert isinstance(result.exception, TargetMissing) and "edgekit.apps.native.build --executorch" in str(
        result.exception
    )


def test_a_library_without_executorch_refuses_programs(library: NativeLibrary, program: Path) -> None:
    with pytest.raises(InvalidInput, match="for 'executorch'; export it for onnx on a CPU, or build this library with"):
        library.open(program)


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "another program": lambda plan: plan["model"].update(vocab_size=100),
    "more layers": lambda plan: plan["model"]["layers"].append(plan["model"]["layers"][0]),
    "a larger cache": lambda plan: plan["storage"].update(capacity_tokens=4096),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_program_that_is_not_the_plans_is_refused(
    with_executorch: Path, program: Path, tmp_path: Path, name: str
) -> None:
    folder = with_plan(program, tmp_path / "changed", DAMAGE[name])
    with pytest.raises(AssertionError, match="its program is not the one of its plan"):
        native_answers(with_executorch, folder, [])
