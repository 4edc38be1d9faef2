"""GGUF metadata as a Hugging Face config: every family, every kind of rope, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_files as files
import numpy as np
import pytest
from gguf_files import ARRAY, BOOL, F32, FAMILIES, I32, STRING, U32, Stored, Value

from edgekit.errors import InvalidInput, Unsupported
from edgekit.formats.gguf_tensors import GgufTensors, open_shards
from edgekit.model.families import model_from_config
from edgekit.model.gguf_config import HuggingFaceModel, huggingface_model
from edgekit.model.parts import Rope
from edgekit.model.rope import frequencies
from edgekit.model.spec import ModelSpec

SMALL = {**FAMILIES["llama"], "num_hidden_layers": 1}


def described(path: Path) -> HuggingFaceModel:
    """The config and views of the file at `path`."""
    (shard,) = open_shards(path)
    with shard:
        shapes = {name: tensor.shape for name, tensor in shard.tensors.items()}
        return huggingface_model(
            shard.metadata, shapes, lambda name: [float(str(value)) for value in shard.rows(name)[0]], str(path)
        )


def config_of(folder: Path, family: str = "llama", **changed: Any) -> dict[str, Any]:
    """The config of a small model, with metadata or tensors changed."""
    path = folder / "model.gguf"
    config = {**FAMILIES[family], "num_hidden_layers": changed.pop("layers", 1)}
    path.write_bytes(files.model_file(config, files.random_tensors(config), **changed))
    return described(path).config


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return model_from_config(config, "tiny", "tiny")


def rope_of(folder: Path, family: str = "llama", **changed: Any) -> Rope:
    ropes = spec_of(config_of(folder, family, **changed)).ropes
    return ropes.get("full") or ropes["default"]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_the_config_and_weights_of_the_original(tmp_path: Path, family: str) -> None:
    """Written as llama.cpp's converter does (renamed, permuted, norms raised), read back equal to the bit."""
    path = tmp_path / "model.gguf"
    weights = files.write_family(path, family)
    found = described(path)
    assert spec_of(found.config) == spec_of(FAMILIES[family])
    with GgufTensors(open_shards(path), found.views) as tensors:
        assert tensors.entries.keys() == weights.keys()
        for name, values in weights.items():
            assert np.array_equal(tensors.floats(name), values), name
            assert np.array_equal(tensors.floats(name, slice(3, 17)), values[3:17]), name


def test_float32_keys_read_as_they_were_written(tmp_path: Path) -> None:
    config = config_of(tmp_path, extra={"llama.attention.layer_norm_rms_epsilon": Value(F32, 1e-5)})
    assert config["rms_norm_eps"] == 1e-5, "not 9.999999747378752e-06"


def test_a_missing_head_means_tied_embeddings(tmp_path: Path) -> None:
    assert config_of(tmp_path, "llama")["tie_word_embeddings"] is True
    assert config_of(tmp_path, "qwen3")["tie_word_embeddings"] is False


def test_values_for_each_layer_must_be_the_same(tmp_path: Path) -> None:
    same = {"llama.attention.head_count_kv": Value(ARRAY, [2, 2], I32)}
    assert config_of(tmp_path, extra=same)["num_key_value_heads"] == 2
    with pytest.raises(Unsupported, match=r"llama\.feed_forward_length: .* differs from layer to layer"):
        config_of(tmp_path, extra={"llama.feed_forward_length": Value(ARRAY, [96, 64], I32)})


LLAMA3 = {
    "theta": 500000.0, "dim": 16, "kind": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_positions": 8192,
}  # fmt: skip


def factors(values: list[float]) -> Stored:
    return Stored(0, (len(values),), np.array(values, "<f4").tobytes())


def test_factors_of_llama_3_become_its_rope(tmp_path: Path) -> None:
    rope = Rope.model_validate(LLAMA3)
    plain, _ = frequencies(Rope(theta=rope.theta, dim=rope.dim), 100)
    stretched, _ = frequencies(rope, 100)
    stored = factors([one / other for one, other in zip(plain, stretched, strict=True)])
    extra = {"llama.rope.freq_base": Value(F32, 500000.0)}
    assert rope_of(tmp_path, extra=extra, more={"rope_freqs.weight": stored}) == rope


def test_other_factors_become_a_long_rope_with_the_same_frequencies(tmp_path: Path) -> None:
    values = [1.0, 1.0, 1.25, 1.5, 2.0, 3.0, 3.5, 4.0]
    rope = rope_of(tmp_path, more={"rope_freqs.weight": factors(values)})
    plain, _ = frequencies(Rope(theta=10000.0, dim=16), 100)
    for context in (16, 100_000):
        found, scale = frequencies(rope, context)
        assert scale == 1.0
        assert found == pytest.approx([one / other for one, other in zip(plain, values, strict=True)], rel=1e-12)


@pytest.mark.parametrize("values", [[1.0] * 7, [1.0] * 7 + [0.0], [1.0] * 7 + [-1.0]])
def test_invalid_rope_factors_are_refused(tmp_path: Path, values: list[float]) -> None:
    with pytest.raises(InvalidInput, match=r"rope_freqs\.weight does not hold 8 factors"):
        config_of(tmp_path, more={"rope_freqs.weight": factors(values)})


def test_factors_beside_another_scaling_are_refused(tmp_path: Path) -> None:
    scaling = {"llama.rope.scaling.type": Value(STRING, "yarn"), "llama.rope.scaling.factor": Value(F32, 4.0)}
    with pytest.raises(Unsupported, match=r"occurs beside rope_freqs\.weight"):
        config_of(tmp_path, extra=scaling, more={"rope_freqs.weight": factors([1.0] * 8)})


def scaling(architecture: str = "llama", **values: Any) -> dict[str, Value]:
    kinds = {str: STRING, float: F32, int: U32, bool: BOOL}
    return {f"{architecture}.rope.scaling.{key}": Value(kinds[type(value)], value) for key, value in values.items()}


def test_linear_and_yarn_ropes(tmp_path: Path) -> None:
    linear = Rope(theta=10000.0, dim=16, kind="linear", factor=4.0)
    assert rope_of(tmp_path, extra=scaling(type="linear", factor=4.0)) == linear
    assert rope_of(tmp_path, extra=scaling(factor=4.0)) == linear, "llama.cpp takes a bare factor as linear"
    assert rope_of(tmp_path, extra={"llama.rope.scale_linear": Value(F32, 4.0)}) == linear
    assert rope_of(tmp_path, "gemma3", extra=scaling("gemma3", type="linear", factor=8.0)).factor == 8.0
    assert rope_of(tmp_path, extra=scaling(type="none", factor=1.0)).kind == "default"
    yarn = scaling(type="yarn", factor=4.0, original_context_length=32)
    assert rope_of(tmp_path, extra=yarn) == Rope(theta=10000.0, dim=16, kind="yarn", factor=4.0, original_positions=32)
    more = yarn | scaling(attn_factor=0.5, yarn_beta_fast=16.0, yarn_beta_slow=2.0)
    found = rope_of(tmp_path, extra=more)
    assert (found.beta_fast, found.beta_slow) == (16.0, 2.0)
    assert frequencies(found, 64)[1] == pytest.approx(0.5 * frequencies(rope_of(tmp_path, extra=yarn), 64)[1])


@pytest.mark.parametrize(
    "values",
    [
        {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_ext_factor": 0.5},
        {"type": "longrope", "factor": 4.0},
        {"type": "none", "attn_factor": 1.5},
        {"type": "linear", "factor": 2.0, "attn_factor": 1.5},
    ],
)
def test_ropes_without_an_exact_counterpart_are_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match=r"rope\.scaling"):
        config_of(tmp_path, extra=scaling(**values))


def test_phi_3_has_long_ropes_and_partial_heads(tmp_path: Path) -> None:
    short, long = [1.0 + index / 8 for index in range(6)], [2.0 + index for index in range(6)]
    more = {"rope_factors_long.weight": factors(long), "rope_factors_short.weight": factors(short)}
    extra = scaling("phi3", original_context_length=32, attn_factor=1.25) | {
        "phi3.rope.dimension_count": Value(U32, 12),
        "phi3.attention.sliding_window": Value(U32, 0),
    }
    config = config_of(tmp_path, "phi3", extra=extra, more=more)
    assert config["sliding_window"] is None
    assert rope_of(tmp_path, "phi3", extra=extra, more=more) == Rope(
        theta=10000.0,
        dim=12,
        kind="longrope",
        factor=4.0,
        original_positions=32,
        attention_factor=1.25,
        short_factor=tuple(short),
        long_factor=tuple(long),
    )
    with pytest.raises(InvalidInput, match="a long rope needs rope_factors_long, rope_factors_short"):
        config_of(tmp_path, "phi3", extra=extra, more={"rope_factors_long.weight": factors(long)})
    with pytest.raises(Unsupported, match=r"rope\.dimension_count: 8 is not the 16 dimensions of a head"):
        config_of(tmp_path, "llama", extra={"llama.rope.dimension_count": Value(U32, 8)})


def test_windows_of_gemma(tmp_path: Path) -> None:
    kinds = config_of(tmp_path, "gemma2", layers=4)["layer_types"]
    assert kinds == ["sliding_attention", "full_attention"] * 2
    kinds = config_of(tmp_path, "gemma3", layers=7)["layer_types"]
    assert [kind == "full_attention" for kind in kinds] == [False] * 5 + [True, False]
    stated = {"gemma3.attention.sliding_window_pattern": Value(U32, 2)}
    kinds = config_of(tmp_path, "gemma3", layers=3, extra=stated)["layer_types"]
    assert kinds == ["sliding_attention", "full_attention", "sliding_attention"]
    listed = {"gemma3.attention.sliding_window_pattern": Value(ARRAY, [False, True], BOOL)}
    kinds = config_of(tmp_path, "gemma3", layers=2, extra=listed)["layer_types"]
    assert kinds == ["full_attention", "sliding_attention"]
    with pytest.raises(InvalidInput, match="does not have one value for each of 3 layers"):
        config_of(tmp_path, "gemma3", layers=3, extra=listed)
    none = {"gemma3.attention.sliding_window": Value(U32, 0)}
    assert set(config_of(tmp_path, "gemma3", layers=2, extra=none)["layer_types"]) == {"full_attention"}


def test_softcaps_and_attention_scales_of_gemma(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gemma2")
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)
    extra = {"gemma2.attn_logit_softcapping": Value(F32, 20.0), "gemma2.final_logit_softcapping": Value(F32, 10.0)}
    config = config_of(tmp_path, "gemma2", extra=extra)
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (20.0, 10.0)
    assert config["query_pre_attn_scalar"] == 32
    # llama.cpp scales the largest models by their embedding over their heads, 64 / 4 here, and knows them by layers.
    assert config_of(tmp_path, "gemma2", layers=46)["query_pre_attn_scalar"] == 16
    assert config_of(tmp_path, "gemma3", layers=62)["query_pre_attn_scalar"] == 16
    local = config_of(tmp_path, "gemma3", extra={"gemma3.rope.freq_base_swa": Value(F32, 20000.0)})
    assert local["rope_local_base_freq"] == 20000.0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": (
        {"extra": {"general.architecture": Value(STRING, "mamba")}},
        "general.architecture 'mamba' is not supported; supported: llama, ",
    ),
    "an adapter": ({"extra": {"general.type": Value(STRING, "adapter")}}, "general.type is 'adapter'"),
    "an importance matrix": ({"extra": {"imatrix.datasets": files.strings("a")}}, "belongs to no language model"),
    "an unknown key": (
        {"extra": {"llama.attention.scale": Value(F32, 0.1)}},
        "'llama.attention.scale' = 0.1 is not known in this architecture",
    ),
    "a window that its family has not": (
        {"extra": {"llama.attention.sliding_window": Value(U32, 64)}},
        "sliding_window' = 64 is not known",
    ),
    "experts": ({"extra": {"llama.expert_count": Value(U32, 8)}}, "expert_count: 8 makes a mixture of experts"),
    "an encoder": ({"extra": {"llama.attention.causal": Value(BOOL, False)}}, "makes an encoder of it"),
    "heads of two sizes": ({"extra": {"llama.attention.value_length": Value(U32, 8)}}, "value_length: 8 is not"),
    "an unknown tensor": (
        {"more": {"blk.0.attn_sinks.weight": factors([1.0])}},
        "tensor 'blk.0.attn_sinks.weight' is not known in this architecture",
    ),
    "a bias that its family has not": (
        {"more": {"blk.0.attn_norm.bias": factors([1.0])}},
        "tensor 'blk.0.attn_norm.bias' is not known",
    ),
    "a tensor with a strange number": ({"more": {"blk.00.attn_q.weight": factors([1.0])}}, "is not known"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_metadata_that_changes_the_model_is_refused_by_name(tmp_path: Path, case: str) -> None:
    changed, message = REFUSED[case]
    with pytest.raises(Unsupported, match=message):
        config_of(tmp_path, **changed)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a context that is a text": (
        {"extra": {"llama.context_length": Value(STRING, "128")}},
        r"llama\.context_length: '128' is not a whole number",
    ),
    "no layers": ({"extra": {"llama.block_count": Value(U32, 0)}}, r"block_count: 0 is not a whole number from 1"),
    "a thousand thousand layers": ({"extra": {"llama.block_count": Value(U32, 10**6)}}, "is more than 1,024 layers"),
    "a base that is not finite": (
        {"extra": {"llama.rope.freq_base": Value(F32, float("nan"))}},
        r"rope\.freq_base: nan is not a finite number",
    ),
    "another vocabulary": ({"extra": {"llama.vocab_size": Value(U32, 4)}}, "vocab_size: 4 is not the 320 rows"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_refused_with_key_and_value(tmp_path: Path, case: str) -> None:
    changed, message = WRONG[case]
    with pytest.raises(InvalidInput, match=message):
        config_of(tmp_path, **changed)


def test_missing_keys_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for key in ("block_count", "embedding_length", "attention.head_count", "attention.layer_norm_rms_epsilon"):
        metadata = {name: value for name, value in files.metadata_of("llama", SMALL).items() if name != f"llama.{key}"}
        path.write_bytes(files.gguf_bytes(metadata, {}))
        with pytest.raises(InvalidInput, match=key.replace(".", r"\.")):
            described(path)


def test_keys_of_other_tools_and_zero_experts_are_ignored(tmp_path: Path) -> None:
    extra = {
        "quantize.imatrix.file": Value(STRING, "x.dat"),
        "general.quantized_by": Value(STRING, "somebody"),
        "llama.expert_count": Value(U32, 0),
        "llama.attention.causal": Value(BOOL, True),
    }
    assert spec_of(config_of(tmp_path, extra=extra)) == spec_of(SMALL)
