"""The native library on real models: SmolLM2's and Gemma 3's tokens, and SmolLM2's texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_files import Export
from tokenizers import Tokenizer
from varied_texts import varied_texts

import edgekit
from edgekit.apps.native.build import build, missing
from edgekit.apps.native.library import NativeLibrary
from edgekit.model.source import open_source

pytestmark = [pytest.mark.real, pytest.mark.slow]
PROMPTS = (
    "def fibonacci(n):\n",
    "The capital of France is",
    "Once upon a time there was a small robot who",
    "Größe 🙂:",
)


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    reason = missing()
    if reason:
        pytest.skip(reason)
    return NativeLibrary(build())


@pytest.mark.parametrize("name", ["smollm2_file", pytest.param("gemma3_file", marks=pytest.mark.long)])
def test_tokens_are_those_of_the_tokenizers_library(
    library: NativeLibrary, name: str, request: pytest.FixtureRequest
) -> None:
    data = (open_source(str(request.getfixturevalue(name))).folder / "tokenizer.json").read_bytes()
    vendor, native = Tokenizer.from_buffer(data), library.read_tokenizer(data)
    special = [token["content"] for token in json.loads(data)["added_tokens"]]
    for text in varied_texts(10_000, 3, special[:20]):
        tokens = vendor.encode(text).ids
        assert native.encode(text, add_special_tokens=True) == tokens
        assert native.decode(tokens[len(tokens) // 3 :], skip_special=False) == vendor.decode(
            tokens[len(tokens) // 3 :], skip_special_tokens=False
        )
    native.close()


@pytest.mark.onnx
@pytest.mark.quantize
def test_texts_are_those_of_python(library: NativeLibrary, smollm2_file: Path, export: Export) -> None:
    """Through two graphs of a body, since the artifact has an early exit."""
    artifact = export(smollm2_file, "onnx", "--recipe", "balanced", "--method", "rtn", "--exit", "15")
    model = library.open(artifact)
    with edgekit.open(artifact, draft="off", prefixes=0) as runtime:
        for seed, prompt in enumerate(PROMPTS):
            tokens = model.tokenizer.encode(prompt, add_special_tokens=True)
            for options in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}):
                native = model.generate(tokens, max_tokens=24, seed=seed, **options)
                python = runtime.generate(prompt, max_tokens=24, seed=seed, **options)
                assert (native.text, native.tokens) == (python.text, python.tokens)
        chat = [{"role": "user", "content": "Größe 🙂?"}, {"role": "assistant", "content": ""}]
        assert model.template.render(chat) == runtime.render(chat)
    model.close()
