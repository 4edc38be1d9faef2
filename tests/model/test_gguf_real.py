"""Two real models read from GGUF: weights, logits, tokens and templates against other people's readers.

`gguf_texts.json` holds what llama.cpp (build 11549) made of the same files: hashes of the ids of 500 texts, with bos
and special tokens, and the log probabilities of one text's tokens, computed in float32 from the dequantised values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from edgekit.model.source import ModelSource, open_source, open_tensors
from edgekit.runtime.generation.chat_template import read_template
from edgekit.runtime.generation.tokenizer import read_codec, read_eos
from examples.small_models import RealModelMissing, gemma3, smollm2

pytestmark = [pytest.mark.real, pytest.mark.slow]

TEXTS = json.loads((Path(__file__).parent / "gguf_texts.json").read_text())
MODELS: dict[str, Callable[[], Path]] = {"smollm2": smollm2, "gemma3": gemma3}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[str, Path]:
    try:
        return request.param, MODELS[request.param]()
    except RealModelMissing as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def source(model: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelSource]:
    """Open the model with newly written companion files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEKIT_HOME", str(tmp_path_factory.mktemp("home")))
        yield open_source(model[1], need_weights=True)


def test_every_stored_value_is_read_to_the_bit(model: tuple[str, Path], source: ModelSource) -> None:
    """Each tensor against the `gguf` package; llama.cpp's order of rows and raised norms are undone by hand here."""
    stored = {tensor.name: tensor for tensor in GGUFReader(model[1]).tensors}
    spec = source.spec
    names = {"q_proj": ("attn_q", spec.heads), "k_proj": ("attn_k", spec.kv_heads)}
    with open_tensors(source.weights) as tensors:
        assert len(tensors.entries) == len(stored)
        for layer in (0, len(spec.layers) - 1):
            for name, (other, heads) in names.items():
                expected = _values(stored[f"blk.{layer}.{other}.weight"])
                if model[0] == "smollm2":
                    pairs = expected.reshape(heads, spec.head_dim // 2, 2, -1)
                    expected = pairs.swapaxes(1, 2).reshape(expected.shape)
                assert np.array_equal(tensors.floats(f"model.layers.{layer}.self_attn.{name}.weight"), expected)
            for name, other in (("mlp.down_proj", "ffn_down"), ("self_attn.o_proj", "attn_output")):
                expected = _values(stored[f"blk.{layer}.{other}.weight"])
                assert np.array_equal(tensors.floats(f"model.layers.{layer}.{name}.weight"), expected)
        norm = _values(stored["output_norm.weight"]) - np.float32(1 if model[0] == "gemma3" else 0)
        assert np.array_equal(tensors.floats("model.norm.weight"), norm)
        rows = dequantize(stored["token_embd.weight"].data[700:800], stored["token_embd.weight"].tensor_type)
        assert np.array_equal(tensors.floats("model.embed_tokens.weight", slice(700, 800)), rows)


def _values(tensor: object) -> np.ndarray:
    return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)  # type: ignore[attr-defined]


def test_tokens_are_those_of_llama_cpp(model: tuple[str, Path], source: ModelSource) -> None:
    codec = read_codec(source.folder)
    expected = TEXTS[model[0]]
    assert len(expected) == len(TEXTS["texts"]) == 500
    different = []
    for text, digest in zip(TEXTS["texts"], expected, strict=True):
        ids = codec.encode(text, add_special_tokens=True)
        if hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:12] != digest:
            different.append(text)
    assert different == []


@pytest.mark.quantize
def test_logits_are_those_of_llama_cpp_in_float32(model: tuple[str, Path], source: ModelSource) -> None:
    """The file's values in float32, run by the reference decoder here and by llama.cpp there.

    llama.cpp takes GELU from a table of float16, which is all that Gemma differs by.
    """
    torch = pytest.importorskip("torch")
    from edgekit.quant.reference_decoder import logits
    from edgekit.quant.shards import reader

    tokens = read_codec(source.folder).encode(TEXTS["text"], add_special_tokens=True)
    expected = torch.tensor(TEXTS["log_probabilities"][model[0]], dtype=torch.float64)
    with torch.inference_mode(), open_tensors(source.weights) as tensors:
        found = torch.log_softmax(logits(source.spec, reader(tensors, source.spec), tokens).double(), -1)
    chosen = found[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert float((chosen - expected).abs().max()) < (0.02 if model[0] == "gemma3" else 1e-4)


def test_a_chat_is_rendered_and_ends(model: tuple[str, Path], source: ModelSource) -> None:
    template = read_template(source.folder)
    codec = read_codec(source.folder)
    try:
        if model[0] == "gemma3":
            assert not template.exists, "a base model"
            assert source.spec.eos_ids == (1, 106)
            return
        shown = template.render([{"role": "user", "content": "hi"}])
        assert shown.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
        assert codec.decode([2], skip_special=False) == "<|im_end|>"
        assert read_eos(source.folder, source.spec.eos_ids) == {0, 2}
    finally:
        template.close()
