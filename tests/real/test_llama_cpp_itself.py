"""Our GGUF files in llama.cpp itself: its high-level API gives our engine's text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from edgekit_llamacpp import library

import edgekit

Export = Any
runs = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
pytestmark = [pytest.mark.real, pytest.mark.llamacpp, pytest.mark.quantize, pytest.mark.slow, runs]

PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "Once upon a time, there was")
QUESTION = "What is the capital of France?"
TOKENS = 24

# Runs in another process, because edgekit refuses a second llama.cpp.
SERVER = """
import json, sys
import xllamacpp
path, tokens, prompts, question = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
asked = xllamacpp.CommonParams()
asked.model.path, asked.n_ctx, asked.n_parallel, asked.warmup = path, 512, 1, False
asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = 2
server = xllamacpp.Server(asked)
greedy = {"max_tokens": tokens, "temperature": 0.0, "top_k": 1, "cache_prompt": False, "stream": False}
texts = [server.handle_completions({"prompt": each, **greedy})["choices"][0]["text"] for each in prompts]
if question:
    chat = server.handle_chat_completions({"messages": [{"role": "user", "content": question}], **greedy})
    texts.append(chat["choices"][0]["message"]["content"])
print(json.dumps(texts))
"""


@pytest.mark.parametrize(
    ("model", "question"),
    [
        pytest.param("smollm2", QUESTION, id="smollm2"),
        pytest.param("gemma3", "", id="gemma3", marks=pytest.mark.long),  # a base model: it has no chat template
    ],
)
def test_greedy_texts_are_equal(model: str, question: str, request: pytest.FixtureRequest, export: Export) -> None:
    file: Path = request.getfixturevalue(f"{model}_file")
    artifact = export(file, "llamacpp", "--effort", "quick", "--context", "512")
    with edgekit.open(artifact, prefixes=0) as runtime:
        ours = [runtime.generate(each, max_tokens=TOKENS, temperature=0).text for each in PROMPTS]
        if question:
            ours.append(runtime.chat([{"role": "user", "content": question}], max_tokens=TOKENS, temperature=0).text)
    command = [sys.executable, "-c", SERVER, str(artifact / "model.gguf"), str(TOKENS), json.dumps(PROMPTS), question]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ours
    assert all(ours)
