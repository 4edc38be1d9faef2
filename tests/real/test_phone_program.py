"""SmolLM2's program for a phone: ExecuTorch's own runner and the native library write Python's texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_files import Export, edgekit as run_command, require
from vendors_runner import greedy_texts

import edgekit
from edgekit.apps.native.build import build, executorch_folder, missing

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.executorch, pytest.mark.quantize, pytest.mark.long]
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
