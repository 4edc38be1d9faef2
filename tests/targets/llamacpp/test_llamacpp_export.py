"""The llamacpp target writes the neutral weights bit for bit, and refuses by name what llama.cpp computes otherwise."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import family_models as models
import runtimes
from edgekit_llamacpp import LlamaCppTarget
from edgekit_llamacpp.layout import MODELFILE, WEIGHTS
from edgekit_llamacpp.offers import offer
from edgekit_llamacpp.tokens import stop_texts, tokenizer_metadata
from engines import llamacpp_model

from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.contracts.neutral import is_module, on_disk
from edgekit.contracts.recipe import named_recipe
from edgekit.contracts.stored_weights import stored_weight_bytes
from edgekit.device.load import load_profile
from edgekit.errors import Unsupported
from edgekit.formats.gguf import GgufFile
from edgekit.formats.gguf_types import TYPES
from edgekit.model.gguf_source import open_gguf_tensors
from edgekit.model.source import open_source
from edgekit.quant.neutral_gguf import gguf_name, read_back, refusal
from edgekit.testing import check_weights

pytestmark = [pytest.mark.llamacpp, pytest.mark.quantize]


@pytest.mark.parametrize("recipe", ["s4-g32", "s4-g64", "s8", "float16", "float32"])
@pytest.mark.parametrize("family", ["llama untied, with biases", "qwen3", "phi3", "gemma3"])
def test_file_holds_neutral_integers_and_scales(family: str, recipe: str) -> None:
    made = llamacpp_model(family, recipe)
    check_weights(LlamaCppTarget(), made.plan, made.files, made.weights)
    types = {"s4": "Q4_0", "s8": "Q8_0", "float16": "F16", "float32": "F32"}
    with GgufFile.open(made.files / WEIGHTS) as file:
        assert file.metadata["general.file_type"] == {"s8": 7, "float16": 1, "float32": 0}.get(recipe, 2)
        for tensor in made.plan.model.tensors():
            kind = made.weights.format_of(tensor.module).kind if is_module(tensor) else "float32"
            assert file.tensors[gguf_name(made.plan.model, tensor)].type_name == types[kind], tensor.name


@pytest.mark.parametrize("recipe", ["s4-g32", "s4-g64", "s4-g128", "s8", "float16"])
def test_plan_counts_the_bytes_of_the_file(recipe: str) -> None:
    made = llamacpp_model(models.WIDE_HEADS, recipe)
    facts = offer(made.plan.model, load_profile("laptop-x86-8gb"), "cpu", made.plan.recipe).memory
    with GgufFile.open(made.files / WEIGHTS) as file:
        stored = sum(
            math.prod(tensor.shape) // TYPES[tensor.type_id].values * TYPES[tensor.type_id].bytes
            for tensor in file.tensors.values()
        )
    assert stored_weight_bytes(made.plan.model, made.plan.recipe, facts) == pytest.approx(stored, rel=0.01)


@pytest.mark.parametrize("family", models.OF_TARGETS["llamacpp"])
def test_file_describes_the_planned_model(family: str) -> None:
    made = llamacpp_model(family)
    assert refusal(made.plan.model, made.plan.recipe, made.plan.context) is None
    read = read_back(made.plan.model, made.plan.context)
    assert [layer.kv_heads for layer in read.layers] == [layer.kv_heads for layer in made.plan.model.layers]
    with open_gguf_tensors(made.files / WEIGHTS) as tensors:
        assert set(tensors.entries) == {on_disk(made.plan.model, tensor.name) for tensor in made.plan.model.tensors()}


REFUSED = {
    "mistral with a window": "plan a context within its window",
    "qwen2 with windows": "plan a context within its window",
    "smollm3": "rotate by other frequencies",
    "phi3 with longrope": "longrope factors",
    "gemma2": "attention_scale",
    "gemma3": "attention_scale",
}


@pytest.mark.parametrize(("family", "named"), REFUSED.items())
def test_model_that_llamacpp_computes_differently_is_refused(family: str, named: str, tmp_path: Path) -> None:
    models.write_model(tmp_path / "model", *models.FAMILIES[family])
    found = refusal(models.spec_of(tmp_path / "model"), named_recipe("s4-g32"), 128)
    assert found is not None and named in found


def test_window_within_which_the_context_lies_is_accepted(tmp_path: Path) -> None:
    models.write_model(tmp_path / "model", *models.FAMILIES["mistral with a window"])
    assert refusal(models.spec_of(tmp_path / "model"), named_recipe("s4-g32"), 12) is None


def test_window_on_yarn_is_refused() -> None:
    plan = llamacpp_model("llama with yarn").plan
    windowed = plan.model_copy(update={"cache": KVEvictionPolicy.of(96, 4)})
    with pytest.raises(Unsupported, match="scales the keys"):
        LlamaCppTarget().check(windowed)


def test_tokenizer_is_written_and_encodes_alike(tmp_path: Path) -> None:
    tokenizer = runtimes.byte_level()
    model = llamacpp_model("llama").plan.model.model_copy(
        update={"vocab_size": tokenizer.get_vocab_size(with_added_tokens=True) + 3}
    )
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    found = tokenizer_metadata(model, tmp_path)
    assert found["tokenizer.ggml.model"] == "gpt2" and found["tokenizer.ggml.pre"] == "gpt-2"
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(kinds, np.ndarray)
    assert len(tokens) == len(kinds) == model.vocab_size
    assert kinds[-1] == 5 and tokens[-1].startswith("[PAD")


def test_bundled_model_has_tokenizer_template_and_stops() -> None:
    source = open_source("demo")
    found = tokenizer_metadata(source.spec, source.folder)
    assert "chat_template" in " ".join(found) and stop_texts(found)


def test_tokenizer_of_another_kind_is_left_out(tmp_path: Path) -> None:
    model = llamacpp_model("llama").plan.model
    assert tokenizer_metadata(model, tmp_path) == {"tokenizer.ggml.model": "none"}
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_metadata(model, tmp_path) == {"tokenizer.ggml.model": "none"}
    tokenizer = runtimes.byte_level()
    from tokenizers.pre_tokenizers import ByteLevel, Punctuation, Sequence

    tokenizer.pre_tokenizer = Sequence([Punctuation(), ByteLevel(add_prefix_space=False)])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    wide = model.model_copy(update={"vocab_size": 4096})
    assert tokenizer_metadata(wide, tmp_path) == {"tokenizer.ggml.model": "none"}


def test_modelfile_names_context_and_stops(tmp_path: Path) -> None:
    from edgekit_llamacpp.export import modelfile

    text = modelfile(llamacpp_model("llama").plan, ["<|im_end|>", 'a"b'])
    assert text.splitlines() == ["FROM ./model.gguf", "PARAMETER num_ctx 128", 'PARAMETER stop "<|im_end|>"']
    assert not (llamacpp_model("llama").files / MODELFILE).exists()  # its folder has no tokenizer
