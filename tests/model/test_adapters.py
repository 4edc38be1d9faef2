"""LoRA folders: values equal to PEFT's, or a refusal that names the field or tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from edgekit.errors import EdgekitError, InvalidInput, Unsupported
from edgekit.formats.safetensors import TensorFolder
from edgekit.model.lora import WEIGHTS, adaptable, check_adapter_name, read_adapter
from edgekit.model.spec import ModelSpec
from edgekit.testing import fake_model, write_adapter


@pytest.fixture
def model() -> ModelSpec:
    return fake_model()


def first(model: ModelSpec) -> str:
    return next(iter(adaptable(model)))


def test_a_plain_adapter_is_alpha_over_rank_times_its_product(tmp_path: Path, model: ModelSpec) -> None:
    adapter = read_adapter(write_adapter(tmp_path, model, rank=4, config={"lora_alpha": 12}), model)
    assert set(adapter.modules) == set(adaptable(model)) and adapter.rank == 4
    with TensorFolder.open(tmp_path / WEIGHTS) as stored:
        module = first(model)
        a, b = (stored.floats(f"base_model.model.{module}.lora_{side}.weight") for side in "AB")
    assert np.array_equal(adapter.modules[module].a, a)
    np.testing.assert_allclose(adapter.modules[module].b, b * 3, rtol=1e-6)


SCALES: dict[str, tuple[dict[str, Any], float]] = {
    "alpha over rank": ({}, 8 / 4),
    "by the root of the rank": ({"use_rslora": True}, 8 / 2),
    "an alpha of its own, by the end of its name": ({"alpha_pattern": {"q_proj": 4}}, 4 / 4),
    "an alpha of its own, by its whole name": ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 2}}, 2 / 4),
    "a pattern for others": ({"alpha_pattern": {"v_proj": 4}}, 8 / 4),
    "the rank that it would have anyhow": ({"rank_pattern": {"layers.0.self_attn.q_proj": 4}}, 8 / 4),
    "harmless fields that are new": ({"something_new": None, "peft_version": "0.18", "lora_dropout": 0.1}, 8 / 4),
}


@pytest.mark.parametrize(("config", "scale"), SCALES.values(), ids=SCALES)
def test_scales_are_those_of_peft(tmp_path: Path, model: ModelSpec, config: dict[str, Any], scale: float) -> None:
    module = "model.layers.0.self_attn.q_proj"
    write_adapter(tmp_path, model, rank=4, only=lambda name: name == module, config=config)
    found = read_adapter(tmp_path, model).modules[module]
    with TensorFolder.open(tmp_path / WEIGHTS) as stored:
        b = stored.floats(f"base_model.model.{module}.lora_B.weight")
    np.testing.assert_allclose(found.b, b * scale, rtol=1e-6)


REFUSED: dict[str, dict[str, Any]] = {
    "another method": {"peft_type": "IA3"},
    "another task": {"task_type": "SEQ_CLS"},
    "DoRA": {"use_dora": True},
    "biases": {"bias": "all"},
    "biases of the adapter": {"lora_bias": True},
    "whole modules": {"modules_to_save": ["lm_head"]},
    "rows of the table": {"trainable_token_indices": [1, 2]},
    "repeated layers": {"layer_replication": [[0, 2]]},
    "turned weights": {"fan_in_fan_out": True},
    "a base that moved": {"init_lora_weights": "pissa_niter_4"},
    "bare parameters": {"target_parameters": ["experts"]},
    "a field that nobody knows": {"use_magic": True},
    "an expression for ranks": {"rank_pattern": {"(a+)+$": 4}},
    "no rank": {"r": 0},
    "a rank of text": {"r": "4"},
    "a rank of true": {"r": True},
    "a huge rank": {"r": 1 << 20},
    "an alpha that is none": {"lora_alpha": "much"},
    "an alpha of 400 digits": {"lora_alpha": 10**400},
    "another rank than the tensors": {"r": 5},
    "other targets than the tensors": {"target_modules": ["q_proj"]},
    "targets that are a number": {"target_modules": 3},
}


@pytest.mark.parametrize("config", REFUSED.values(), ids=REFUSED)
def test_unsupported_options_are_refused_by_name(tmp_path: Path, model: ModelSpec, config: dict[str, Any]) -> None:
    write_adapter(tmp_path, model, config=config)
    with pytest.raises(EdgekitError) as caught:
        read_adapter(tmp_path, model)
    field = next(iter(config))
    assert field in str(caught.value) or "shape" in str(caught.value)


def test_a_rank_beyond_the_plan_names_the_export_option(tmp_path: Path, model: ModelSpec) -> None:
    write_adapter(tmp_path, model, rank=6)
    with pytest.raises(Unsupported, match="--adapter-rank 6"):
        read_adapter(tmp_path, model, most_rank=4)


def rewritten(place: Path, model: ModelSpec, change: Any) -> Path:
    write_adapter(place, model)
    with TensorFolder.open(place / WEIGHTS) as stored:
        tensors = {name: stored.floats(name) for name in stored.entries}
    change(tensors)
    (place / WEIGHTS).write_bytes(save(tensors))
    return place


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
WRONG: dict[str, tuple[Any, str]] = {
    "NaN": (lambda tensors: tensors[A].__setitem__((0, 0), np.nan), "NaN"),
    "infinity": (lambda tensors: tensors[A].__setitem__((0, 0), np.inf), "infinity"),
    "values near the largest": (lambda tensors: tensors[A].__setitem__((0, 0), 3e38), "holds 3e[+]38"),
    "one side alone": (lambda tensors: tensors.pop(A), "only one of"),
    "another shape": (lambda tensors: tensors.update({A: tensors[A][:, 1:].copy()}), "shape"),
    "nothing": (lambda tensors: tensors.clear(), "no tensors"),
    "an embedding": (
        lambda tensors: tensors.update({"base_model.model.model.embed_tokens.lora_embedding_A": tensors[A]}),
        "embeddings",
    ),
    "the head": (lambda tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": tensors[A]}), "head"),
    "a magnitude": (lambda tensors: tensors.update({"x.lora_magnitude_vector.weight": tensors[A]}), "DoRA"),
    "a module of another model": (
        lambda tensors: tensors.update({"base_model.model.model.layers.99.mlp.up_proj.lora_A.weight": tensors[A]}),
        "does not have",
    ),
}


@pytest.mark.parametrize(("change", "word"), WRONG.values(), ids=WRONG)
def test_wrong_tensors_are_refused_by_name(tmp_path: Path, model: ModelSpec, change: Any, word: str) -> None:
    with pytest.raises(EdgekitError, match=word):
        read_adapter(rewritten(tmp_path, model, change), model)


def test_pickled_adapters_are_refused_by_type(tmp_path: Path, model: ModelSpec) -> None:
    write_adapter(tmp_path, model)
    (tmp_path / WEIGHTS).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(Unsupported, match="pickled"):
        read_adapter(tmp_path, model)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a" * 65, "a b", "ü", "a\n"])
def test_adapter_names_are_checked(name: str) -> None:
    with pytest.raises(InvalidInput, match="adapter name"):
        check_adapter_name(name)


def test_equal_adapters_have_equal_hashes(tmp_path: Path, model: ModelSpec) -> None:
    hashes = [
        read_adapter(write_adapter(tmp_path / str(i), model, seed=seed), model).sha256
        for i, seed in enumerate((1, 1, 2))
    ]
    assert hashes[0] == hashes[1] != hashes[2]
