"""Arbitrary configs and model folders give a model or a one-line error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from configs import SMALL, TINY, Config, write_config

from edgekit.errors import EdgekitError, InvalidInput, Unsupported
from edgekit.model.families import model_from_config
from edgekit.model.source import open_source

LLAMA = SMALL | {"model_type": "llama"}

# field, value, words of the message
REFUSED: dict[str, tuple[Config, str, Any, str]] = {
    "a negative size": (LLAMA, "hidden_size", -4, "whole number from 1"),
    "no size": (LLAMA, "hidden_size", None, "missing"),
    "a text": (LLAMA, "hidden_size", "32", "whole number"),
    "a truth": (LLAMA, "num_hidden_layers", True, "whole number"),
    "a thousand and more layers": (LLAMA, "num_hidden_layers", 1025, "1024"),
    "a hidden size beyond bounds": (LLAMA, "hidden_size", (1 << 20) + 1, "1048576"),
    "a vocabulary beyond bounds": (LLAMA, "vocab_size", (1 << 24) + 1, "16777216"),
    "heads that KV heads do not divide": (LLAMA, "num_key_value_heads", 3, "does not divide the 4"),
    "a hidden size that heads do not divide": (
        {**LLAMA, "head_dim": None}, "hidden_size", 33, "is not a multiple of the 4",
    ),
    "an odd head": (LLAMA, "head_dim", 7, "even number"),
    "a head beyond bounds": (LLAMA, "head_dim", 1 << 20, "8192"),
    "an epsilon that is none": (LLAMA, "rms_norm_eps", float("nan"), "number from 0"),
    "an epsilon without end": (LLAMA, "rms_norm_eps", float("inf"), "number from 0"),
    "a theta of zero": (LLAMA, "rope_theta", 0, "number from 1"),
    "a tie that is a number": (LLAMA, "tie_word_embeddings", 1, "neither true nor false"),
    "a rope that is a list": (LLAMA, "rope_scaling", [1], "not an object"),
    "a rope that nobody knows": (LLAMA, "rope_scaling", {"rope_type": "spiral"}, "supported: default"),
    "a linear rope without factor": (LLAMA, "rope_scaling", {"rope_type": "linear"}, "factor: is missing"),
    "a linear rope that divides by zero": (LLAMA, "rope_scaling", {"rope_type": "linear", "factor": 0}, "factor: 0"),
    "a dynamic rope on tiny heads": (
        {**LLAMA, "head_dim": 2}, "rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, "too small",
    ),
    "a llama3 rope with its bounds swapped": (
        LLAMA, "rope_scaling",
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "not above",
    ),
    "an mrope": (LLAMA, "rope_scaling", {"rope_type": "default", "mrope_section": [1, 1, 2]}, "not supported"),
    "a part of a head where the whole turns": (LLAMA, "partial_rotary_factor", 0.5, "only 1.0"),
    "too few long factors": (TINY["phi3"], "rope_scaling", {"type": "longrope", "short_factor": [1.0] * 4,
                             "long_factor": [1.0] * 3}, "has 3 values where 4"),
    "a long factor of zero": (TINY["phi3"], "rope_scaling", {"type": "longrope", "short_factor": [1.0] * 4,
                              "long_factor": [1.0, 0, 1.0, 1.0]}, "holds 0"),
    "a long factor that is none": (TINY["phi3"], "rope_scaling", {"type": "longrope", "long_factor": [1.0] * 4,
                                   "short_factor": [1.0, float("nan"), 1.0, 1.0]}, "holds nan"),
    "an activation that nobody knows": (LLAMA, "hidden_act", "mish", "supported: silu"),
    "a window of zero": (TINY["mistral"], "sliding_window", 0, "whole number from 1"),
    "too few kinds of layer": (TINY["qwen3"], "layer_types", ["full_attention"], "has 1 values where 6"),
    "a kind of layer that nobody knows": (TINY["qwen3"], "layer_types", ["linear_attention"] * 6, "supported: full"),
    "too few marks of rope": (TINY["smollm3"], "no_rope_layers", [1, 0], "has 2 values where 6"),
    "marks of rope that are neither": (TINY["smollm3"], "no_rope_layers", [2] * 6, "holds 2"),
    "a token id below zero": (LLAMA, "eos_token_id", -1, "not a token id"),
    "a list of token ids in words": (LLAMA, "eos_token_id", [2, "</s>"], "not a token id"),
    "more active experts than there are": (TINY["mixtral"], "num_experts_per_tok", 5, "more than the 4"),
    "a million experts": (TINY["mixtral"], "num_local_experts", 10**6, "1024"),
    "a softcap of zero": (TINY["gemma2"], "attn_logit_softcapping", 0.0, "number from"),
    "a scale below zero": (TINY["gemma2"], "query_pre_attn_scalar", -1, "number from"),
    "a flat rope where two are needed": (TINY["gemma3"], "rope_parameters", {"rope_type": "default"}, "one entry for"),
    "more shared layers than there are": (TINY["gemma3n"], "num_kv_shared_layers", 6, "none of their kind"),
    "too few feed-forward sizes": (TINY["gemma3n"], "intermediate_size", [48, 32], "has 2 values where 6"),
    "layers that differ in what cannot": (TINY["gemma4"], "per_layer_config", {"1": {"bias": True}}, "cannot differ"),
    "no family": (LLAMA, "model_type", None, "missing"),
    "a wrapped model without text": (LLAMA, "model_type", "gemma3", "text_config: is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_absurd_value_is_one_line_with_file_field_value_and_fix(case: str) -> None:
    config, field, value, words = REFUSED[case]
    with pytest.raises((InvalidInput, Unsupported)) as caught:
        model_from_config({**config, field: value}, "model", "folder/config.json")
    message = str(caught.value)
    assert message.startswith("folder/config.json: ")
    assert field in message or "factor" in message or "text_config" in message or "head_dim" in message
    assert words in message
    assert "\n" not in message
    assert len(message) < 400


def _refused(folder: Path, kind: type[EdgekitError] = InvalidInput) -> str:
    with pytest.raises(kind) as caught:
        open_source(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not valid JSON"),
        (json.dumps(LLAMA).encode()[:-20], "is the file complete"),
        (b"[1, 2]", "expected an object"),
        (b"\xff\xfe{", "not valid JSON"),
        (b'{"model_type": "llama", "rms_norm_eps": NaN}', "NaN is not a number"),
        (b'{"model_type": "llama", "model_type": "phi3"}', "occurs twice"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"{" + b" " * (9 << 20) + b"}", "allowed"),
    ],
    ids=["empty", "truncated", "a list", "not text", "NaN", "a key twice", "nested", "5000 digits", "9 MiB"],
)
def test_a_damaged_config_file_is_one_line(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(data)
    message = _refused(tmp_path)
    assert message.startswith(f"{tmp_path}/config.json: ")
    assert words in message


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    assert "No such file" in _refused(tmp_path)
    assert str(tmp_path / "config.json") in _refused(tmp_path)


def test_a_link_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    elsewhere = write_config(tmp_path / "elsewhere", LLAMA)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").symlink_to(elsewhere / "config.json")
    assert "leaves the model's folder" in _refused(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    assert "cannot be read" in _refused(folder)
    (folder / "config.json").unlink()
    write_config(folder, LLAMA)
    (folder / "tokenizer.json").symlink_to("/etc/passwd")
    assert "tokenizer.json: is a link that leaves" in _refused(folder)


def test_a_damaged_generation_config_is_named(tmp_path: Path) -> None:
    write_config(tmp_path, LLAMA)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, ')
    assert "generation_config.json: not valid JSON" in _refused(tmp_path)


@pytest.mark.parametrize("name", ["no/such/folder", "../up", "", "a\0b", "org/na me", "https://x/y", "org/name/more"])
def test_a_name_that_is_neither_folder_nor_hub_id_is_one_line(name: str) -> None:
    with pytest.raises(InvalidInput, match="a Hugging Face folder") as caught:
        open_source(name)
    assert "\n" not in str(caught.value)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    write_config(tmp_path, LLAMA)
    assert "is a file, not a folder" in _refused(tmp_path / "config.json")
