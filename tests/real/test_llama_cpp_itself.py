"""Our GGUF files in llama.cpp itself: its high-level API gives our engine's text, and our integers are read back.

Of the models' own files, the logits that we compute are llama.cpp's in float32.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgekit_llamacpp import library
from real_files import manifest

import edgekit
from edgekit.artifact.artifact import open_artifact
from edgekit.model.source import open_source, open_tensors
from edgekit.quant.pipeline import neutral_weights

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


@pytest.mark.long
def test_the_exported_file_reads_back_with_the_same_integers(smollm2_file: Path, export: Export) -> None:
    artifact = export(smollm2_file, "llamacpp", "--effort", "quick", "--context", "512")
    recipe = open_artifact(artifact).plan.recipe
    weights = neutral_weights(open_source(smollm2_file, need_weights=True), recipe, method="rtn")  # in the store by now
    assert weights.manifest.weights_sha256 == manifest(artifact)["weights_sha256"]
    quantised = [module for module in weights.modules() if not weights.format_of(module).is_float]
    assert len(quantised) == 211
    with open_tensors(artifact / "model.gguf") as tensors:
        for module in quantised:
            found, scales = tensors.integers(f"{module}.weight", slice(None)), weights.scales(module)
            assert np.array_equal(found.integers, weights.integers(module)), module
            # llama.cpp has a scale for each block of 32, and edgekit one for each group or row.
            blocks = found.scales.shape[1] // scales.shape[1]
            assert np.array_equal(found.scales, scales.repeat(blocks, axis=1)), module


@pytest.mark.long
@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_logits_of_a_file_are_those_of_llama_cpp(model: str, request: pytest.FixtureRequest) -> None:
    file: Path = request.getfixturevalue(f"{model}_file")
    script = [sys.executable, "-m", "examples.benchmarks.gguf_against_llama"]
    command = [*script, str(file), "--library", str(library.load().path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["text"] for row in rows] == ["code", "prose"]
    assert all(row["tokens"] == 256 and row["kl_mean"] < 1e-5 for row in rows), rows
