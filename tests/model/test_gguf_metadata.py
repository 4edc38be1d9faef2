"""Config and tokenizer of a GGUF file's metadata; what changes the model is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from time import process_time
from typing import Any

import gguf_files as files
import numpy as np
import pytest
from gguf_files import ARRAY, BOOL, F32, FAMILIES, I32, STRING, U32, Stored, Value
from tokenizers import Tokenizer

from edgekit.errors import InvalidInput, Unsupported
from edgekit.formats.gguf import GgufFile
from edgekit.formats.gguf_tensors import GgufTensors, open_shards
from edgekit.model.families import model_from_config
from edgekit.model.gguf_config import HuggingFaceModel, huggingface_model
from edgekit.model.gguf_splits import SPLITS
from edgekit.model.gguf_tokenizer import token_ids, tokenizer_files
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
    with pytest.raises(Unsupported, match=r"occurs next to rope_freqs\.weight"):
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


@pytest.mark.parametrize("case", REFUSED | WRONG)
def test_metadata_that_changes_the_model_and_wrong_values_are_refused_by_name(tmp_path: Path, case: str) -> None:
    changed, message = (REFUSED | WRONG)[case]
    with pytest.raises(Unsupported if case in REFUSED else InvalidInput, match=message):
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


BYTES = files.byte_level_tokenizer(320)


PIECES = files.sentence_piece_tokenizer(320)


KEY = "tokenizer.ggml."


def made(folder: Path, metadata: Mapping[str, Value | None]) -> dict[str, bytes]:
    """The files of a tokenizer; None leaves a key out."""
    path = folder / "model.gguf"
    kept = {key: value for key, value in metadata.items() if value is not None}
    path.write_bytes(files.gguf_bytes(kept, {}))
    with GgufFile.open(path) as file:
        return tokenizer_files(file.metadata, str(path))


def built(folder: Path, metadata: Mapping[str, Value | None]) -> Tokenizer:
    return Tokenizer.from_buffer(made(folder, metadata)["tokenizer.json"])


def tokens_of(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    found: list[str] = tokenizer.encode(text, **options).tokens
    return found


def test_byte_level_tokens_follow_the_merges(tmp_path: Path) -> None:
    tokenizer = built(tmp_path, BYTES)
    assert tokens_of(tokenizer, "the the") == ["the", "Ġthe"]
    assert tokens_of(tokenizer, "in er") == ["in", "Ġ", "er"]
    assert tokens_of(tokenizer, "01 1") == ["0", "1", "Ġ", "1"], "single digits are never merged"
    assert tokens_of(tokenizer, "a<|im_end|><tool>b") == ["a", "<|im_end|>", "<tool>", "b"]
    text = "naïve 👋 the\r\n"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.decode([2, 3 + 256 + 8]) == "<tool>", "control tokens are special, user-defined ones are not"


def test_padding_tokens_are_no_added_tokens(tmp_path: Path) -> None:
    tokenizer = built(tmp_path, BYTES)
    assert tokenizer.get_vocab_size(with_added_tokens=True) == 320
    assert len(tokens_of(tokenizer, "[PAD300]")) == 8
    assert {token.content for token in tokenizer.get_added_tokens_decoder().values()} == {
        "<|endoftext|>", "<s>", "<|im_end|>", "<tool>",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "in1234 the", ["in", "1", "2", "3", "4", "Ġthe"]),
        ("smollm", "in0101", ["in", "0", "1", "0", "1"]),
        ("gpt-2", "0101", ["01", "01"]),
        ("qwen2", "0101", ["0", "1", "0", "1"]),
        ("llama-bpe", "0101", ["01", "0", "1"]),
        ("smaug-bpe", "0101", ["01", "0", "1"]),
        ("gpt-4o", "0101", ["01", "0", "1"]),
        ("tekken", "0101", ["0", "1", "0", "1"]),
        ("gpt-2", "x/\n", ["x", "/", "Ċ"]),
    ],
)
def test_text_is_split_by_the_files_pre_tokenizer(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    tokenizer = built(tmp_path, BYTES | {f"{KEY}pre": Value(STRING, pre)})
    assert tokens_of(tokenizer, text, add_special_tokens=False) == expected


@pytest.mark.parametrize("pre", SPLITS)
def test_every_known_pre_tokenizer_works(tmp_path: Path, pre: str) -> None:
    tokenizer = built(tmp_path, BYTES | {f"{KEY}pre": Value(STRING, pre)})
    text = "Wir're 12345 the ÉTÉ… \n\n\tx  y"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_unicode_is_composed_if_the_family_does(tmp_path: Path) -> None:
    decomposed = "e\u0301"
    for pre, expected in (("qwen2", "é"), ("llama-bpe", decomposed)):
        tokenizer = built(tmp_path, BYTES | {f"{KEY}pre": Value(STRING, pre)})
        assert tokenizer.decode(tokenizer.encode(decomposed, add_special_tokens=False).ids) == expected


def test_bos_and_eos_follow_the_file_or_its_tokenizer_kind(tmp_path: Path) -> None:
    plain = {key: value for key, value in BYTES.items() if key != f"{KEY}add_bos_token"}
    assert tokens_of(built(tmp_path, plain), "in") == ["in"]
    llama = plain | {f"{KEY}pre": Value(STRING, "llama-bpe")}
    assert tokens_of(built(tmp_path, llama), "in") == ["<s>", "in"], "llama.cpp's default for this kind"
    told = llama | {f"{KEY}add_bos_token": Value(BOOL, False)}
    assert tokens_of(built(tmp_path, told), "in") == ["in"]
    ended = plain | {f"{KEY}add_eos_token": Value(BOOL, True)}
    assert tokens_of(built(tmp_path, ended), "in") == ["in", "<|im_end|>"]
    assert tokens_of(built(tmp_path, PIECES), "the")[0] == "<s>"
    with pytest.raises(InvalidInput, match="is to be added and has no id"):
        made(tmp_path, ended | {f"{KEY}eos_token_id": None})


def test_sentence_piece_merges_the_best_score_first(tmp_path: Path) -> None:
    tokenizer = built(tmp_path, PIECES)
    assert tokens_of(tokenizer, "the", add_special_tokens=False) == ["▁the"]
    # "▁th" (score -1) is better than "he" (-5), so it is made first and stays.
    assert tokens_of(tokenizer, "theth", add_special_tokens=False) == ["▁the", "th"]
    assert tokens_of(tokenizer, "ethe", add_special_tokens=False) == ["▁", "e", "the"]
    assert tokens_of(tokenizer, "é", add_special_tokens=False) == ["▁", "<0xC3>", "<0xA9>"]
    assert tokens_of(tokenizer, "<start_of_turn>in", add_special_tokens=False) == ["<start_of_turn>", "▁", "in"]
    text = "the rain in e"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    bare = built(tmp_path, files.sentence_piece_tokenizer(320, add_space=False))
    assert tokens_of(bare, "the the", add_special_tokens=False) == ["the", "▁the"]
    assert tokens_of(bare, "e    in", add_special_tokens=False) == ["e", "  ", "  ", "in"]


def test_phi_3_tokens_remove_spaces_after_them(tmp_path: Path) -> None:
    phi = PIECES | {"general.architecture": Value(STRING, "phi3")}
    text = "<start_of_turn>\n in"
    for metadata, rest in ((phi, ["▁", "in"]), (PIECES, ["▁", "<0x0A>", "▁", "in"])):
        tokenizer = built(tmp_path, metadata)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert [tokenizer.id_to_token(index) for index in ids] == ["<start_of_turn>", *rest]


def test_files_beside_the_tokenizer(tmp_path: Path) -> None:
    found = made(tmp_path, BYTES)
    assert found["chat_template.jinja"].decode() == BYTES["tokenizer.chat_template"].value
    config = json.loads(found["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<s>", "<|im_end|>", "<|endoftext|>")
    assert config["clean_up_tokenization_spaces"] is False
    assert "chat_template.jinja" not in made(tmp_path, PIECES)
    assert token_ids({f"{KEY}{key}": value for key, value in _read(tmp_path, BYTES).items()}, "x") == {
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip


def _read(folder: Path, metadata: Mapping[str, Value]) -> dict[str, Any]:
    path = folder / "model.gguf"
    path.write_bytes(files.gguf_bytes(metadata, {}))
    file = GgufFile.open(path)  # stays open: texts are read from it
    return {key.removeprefix(KEY): value for key, value in file.metadata.items() if key.startswith(KEY)}


def test_every_control_token_that_ends_a_text_is_listed(tmp_path: Path) -> None:
    assert json.loads(made(tmp_path, BYTES)["generation_config.json"])["eos_token_id"] == [2, 0]
    turned = BYTES | {f"{KEY}eot_token_id": Value(U32, 7), f"{KEY}eos_token_id": Value(U32, 1)}
    assert json.loads(made(tmp_path, turned)["generation_config.json"])["eos_token_id"] == [1, 7, 2, 0]
    plain = BYTES | {f"{KEY}token_type": Value(ARRAY, [1, 1, 3, *BYTES[f"{KEY}token_type"].value[3:]], I32)}
    ends = json.loads(made(tmp_path, plain)["generation_config.json"])["eos_token_id"]
    assert ends == [2], "<|endoftext|> is a plain text here"


def test_token_ids_outside_the_vocabulary_are_ignored(tmp_path: Path) -> None:
    found = made(tmp_path, BYTES | {f"{KEY}padding_token_id": Value(U32, (1 << 32) - 1)})
    assert "pad_token" not in json.loads(found["tokenizer_config.json"])


def changed_tokens(index: int, token: str | bytes, metadata: Mapping[str, Value] = BYTES) -> dict[str, Value]:
    tokens = list(metadata[f"{KEY}tokens"].value)
    tokens[index] = token
    return {**metadata, f"{KEY}tokens": files.strings(*tokens)}


REFUSED_OF_GGUF_TOKENIZER: dict[str, tuple[dict[str, Value | None], str]] = {
    "another kind of tokenizer": (BYTES | {f"{KEY}model": Value(STRING, "bert")}, "'bert' is not supported"),
    "another way to split": (
        BYTES | {f"{KEY}pre": Value(STRING, "deepseek-llm")},
        "'deepseek-llm' is a way to split text that is not supported; supported: gpt-2, ",
    ),
    "no way to split": (BYTES | {f"{KEY}pre": None}, "pre: '' is a way to split text that is not supported"),
    "an unknown key": (BYTES | {f"{KEY}precompiled_charsmap": Value(STRING, "x")}, "is not known"),
    "a separator": (BYTES | {f"{KEY}add_sep_token": Value(BOOL, True)}, "add_sep_token is true"),
    "spaces removed": (PIECES | {f"{KEY}remove_extra_whitespaces": Value(BOOL, True)}, "whitespaces is true"),
    "a prefix before bytes": (BYTES | {f"{KEY}add_space_prefix": Value(BOOL, True)}, "add_space_prefix is true"),
    "an unknown kind of token": (
        BYTES | {f"{KEY}token_type": Value(ARRAY, [9] * 320, I32)},
        "token_type: 9 is not a known type",
    ),
}


WRONG_OF_GGUF_TOKENIZER: dict[str, tuple[dict[str, Value | None], str]] = {
    "no tokens": (BYTES | {f"{KEY}tokens": None}, "tokens: None is not a list"),
    "tokens that are numbers": (BYTES | {f"{KEY}tokens": Value(ARRAY, [1, 2], I32)}, "is not a list of 1 to"),
    "an empty list": (BYTES | {f"{KEY}tokens": files.strings()}, "is not a list of 1 to"),
    "a token twice": (changed_tokens(310, "the"), "the token 'the' occurs twice"),
    "a token that is no UTF-8": (changed_tokens(310, b"\xff"), "token 310, b'\\\\xff', is not UTF-8"),
    "too few kinds": (BYTES | {f"{KEY}token_type": Value(ARRAY, [1], I32)}, "one number for each of 320"),
    "no scores": (PIECES | {f"{KEY}scores": None}, "scores: None is missing"),
    "no merges": (BYTES | {f"{KEY}merges": None}, "merges: None is not a list of texts"),
    "a merge into nothing": (BYTES | {f"{KEY}merges": files.strings("t h", "q q")}, "merge 1, b'q q', is not of two"),
    "a merge of one": (BYTES | {f"{KEY}merges": files.strings("the")}, "merge 0, b'the', is not of two"),
    "an id that is a text": (BYTES | {f"{KEY}bos_token_id": Value(STRING, "1")}, "'1' is not a token's id"),
    "a flag that is a number": (BYTES | {f"{KEY}add_bos_token": Value(U32, 1)}, "1 is neither true nor false"),
    "a template that is a number": (BYTES | {"tokenizer.chat_template": Value(U32, 1)}, "1 is not a text"),
    "bytes that are missing": (
        changed_tokens(BYTES[f"{KEY}tokens"].value.index("q"), "[PAD]"),
        "a text comes back as .* after encoding",
    ),
}  # fmt: skip


def with_tokens(tokens: list[str], kind: int) -> dict[str, Value | None]:
    """The SentencePiece tokenizer with more tokens of a kind."""
    old = PIECES[f"{KEY}tokens"].value
    count = len(old) + len(tokens)
    return PIECES | {
        f"{KEY}tokens": files.strings(*old, *tokens),
        f"{KEY}token_type": Value(ARRAY, [*PIECES[f"{KEY}token_type"].value, *[kind] * len(tokens)], I32),
        f"{KEY}scores": Value(ARRAY, [0.0] * count, F32),
    }


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (with_tokens(["x" * 4000 + str(index) for index in range(20)], 1), "too many long tokens"),
        (with_tokens(["x" * 4000 + str(index) for index in range(300)], 4), "too many tokens as control"),
        (with_tokens([f"x{index}" for index in range(70_000)], 3), "too many tokens as control"),
    ],
)
def test_a_vocabulary_made_to_take_hours_is_refused_at_once(
    tmp_path: Path, metadata: Mapping[str, Value | None], message: str
) -> None:
    began = process_time()
    with pytest.raises(InvalidInput, match=message):
        made(tmp_path, metadata)
    assert process_time() - began < 1


@pytest.mark.parametrize("case", REFUSED_OF_GGUF_TOKENIZER | WRONG_OF_GGUF_TOKENIZER)
def test_metadata_that_changes_the_tokenizer_and_wrong_values_are_refused_by_name(tmp_path: Path, case: str) -> None:
    metadata, message = (REFUSED_OF_GGUF_TOKENIZER | WRONG_OF_GGUF_TOKENIZER)[case]
    with pytest.raises(Unsupported if case in REFUSED_OF_GGUF_TOKENIZER else InvalidInput, match=message):
        made(tmp_path, metadata)
