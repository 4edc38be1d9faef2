"""Exports of whole models: each target's is sealed and answers; on a phone's, other runners write Python's texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_files import Export, edgekit as run_command, manifest, require
from vendors_runner import greedy_texts

import edgekit
from edgekit.apps.native.build import build, executorch_folder, missing

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.quantize, pytest.mark.long]
# target → the package that it needs, and a device for which a plan chooses it. llamacpp is chosen only where it is
# measured to be the fastest, so it is asked for.
TARGETS = {
    "onnx": ("onnxruntime", ["laptop-x86-8gb"]),
    "mlx": ("mlx", ["macbook-m4-16gb"]),
    "executorch": ("executorch", ["pixel-9"]),
    "llamacpp": ("xllamacpp", ["this", "--target", "llamacpp"]),
}
PROMPTS = ("def fibonacci(n):\n", "The capital of France is")


@pytest.fixture
def artifact(smollm2_file: Path, export: Export) -> Path:
    require("executorch")
    return export(smollm2_file, "executorch", "--recipe", "s4-g32", "--method", "rtn", "--context", "512")


def test_executorchs_own_runner_gives_pythons_texts(artifact: Path) -> None:
    """And the text of the token that ends a chat's answer, which an app leaves out."""
    chat = json.loads(run_command("inspect", artifact, "--chat-format"))
    asked = chat["first"] + "What is the capital of France? One word." + chat["last"]
    with edgekit.open(artifact, draft="off", prefixes=0) as runtime:
        expected = [runtime.generate(each, max_tokens=64, temperature=0.0) for each in (*PROMPTS, asked)]
    assert "<|im_end|>" in chat["ends"] and "stop" in [each.finish_reason for each in expected]
    for text, answer in zip(greedy_texts(artifact, 64, (*PROMPTS, asked)), expected, strict=True):
        ends = chat["ends"] if answer.finish_reason == "stop" else [""]
        assert text in [answer.text + end for end in ends]


def test_the_command_gives_pythons_texts(artifact: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    build(executorch=executorch_folder())
    for prompt in PROMPTS:
        for options in ((), ("--temperature", "0.8", "--top-p", "0.9", "--seed", "5")):
            asked = ("run", artifact, prompt, "--raw", "--max-tokens", "16", "--draft", "off", "--json", *options)
            python, native = (json.loads(run_command(*asked, *more)) for more in ((), ("--native",)))
            assert python["text"] == native["text"] and python["tokens"] == native["tokens"] > 0, (prompt, options)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_default_export_is_sealed_and_answers(
    model: str, target: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    package, device = TARGETS[target]
    require(package)
    file: Path = request.getfixturevalue(f"{model}_file")
    run_command("export", file, "--device", *device, "-o", tmp_path / "artifact")
    sealed = manifest(tmp_path / "artifact")
    assert sealed["plan"]["target"] == target
    assert sealed["self_check"].startswith("KL ")
    asked = ("The capital of France is", "--raw", "--max-tokens", "6", "--json")
    assert "Paris" in json.loads(run_command("run", tmp_path / "artifact", *asked))["text"]
