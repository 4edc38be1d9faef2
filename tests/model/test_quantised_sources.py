"""Models quantised by other tools: all but integer × scale is refused by name, hostile values in one line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantised_folders as folders
from hypothesis import given, settings, strategies as st
from quantised_folders import LAYOUTS, Tensors

from edgekit.errors import EdgekitError, InvalidInput, Unsupported
from edgekit.formats.int_packing import float32_to_bf16
from edgekit.model.source import open_source, open_tensors

QPROJ = "model.layers.0.self_attn.q_proj"


def with_weights(**changed: Any) -> dict[str, Any]:
    """compressed-tensors' config with other arguments of its weights."""
    config = copy.deepcopy(folders.compressed_config(4, 32))
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= changed
    return config


def with_group(**changed: Any) -> dict[str, Any]:
    config = copy.deepcopy(folders.compressed_config(4, 32))
    config["quantization_config"]["config_groups"]["group_0"] |= changed
    return config


def stating(layout: str, **changed: Any) -> dict[str, Any]:
    config = copy.deepcopy(LAYOUTS[layout].config(4, 32))
    section = "quantization" if layout == "mlx" else "quantization_config"
    config[section] = config[section] | changed
    return config


# Refused settings by name.
REFUSED = {
    "awq, gemv": (stating("awq", version="gemv"), "version: 'gemv'"),
    "awq, 8 bits": (stating("awq", bits=8), "bits: 8"),
    "fp8": ({"quantization_config": {"quant_method": "fp8"}}, "quant_method: 'fp8'"),
    "activation order": (with_weights(actorder="group"), "weights.actorder: 'group'"),
    "float 8": (with_weights(type="float"), "weights.type: 'float'"),
    "one scale for all": (with_weights(strategy="tensor"), "weights.strategy: 'tensor'"),
    "blocks": (with_weights(block_structure=[128, 128]), "weights.block_structure"),
    "3 bits": (with_weights(num_bits=3), "weights.num_bits: 3"),
    "dynamic": (with_weights(dynamic="local"), "weights.dynamic"),
    "unknown argument": (with_weights(rotation="hadamard"), "weights.rotation: 'hadamard'"),
    "activations": (with_group(input_activations={"num_bits": 8}), "group_0.input_activations"),
    "another format of a group": (with_group(format="marlin-24"), "group_0.format: 'marlin-24'"),
    "2:4": (stating("compressed-tensors", sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    "transforms": (stating("compressed-tensors", transform_config={"config_groups": {"R1": {}}}), "transform_config"),
    "a cache's scheme": (stating("compressed-tensors", kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    "int-quantized": (stating("compressed-tensors", format="int-quantized"), "format: 'int-quantized'"),
    "unknown key": (stating("compressed-tensors", secret=1), "secret: 1"),
    "gptq, marlin": (stating("gptq", checkpoint_format="marlin"), "checkpoint_format: 'marlin'"),
    "gptq, 3 bits": (stating("gptq", bits=3), "bits: 3"),
    "gptq, by module": (stating("gptq", dynamic={"-:.*": {}}), "dynamic"),
    "gptq, unknown key": (stating("gptq", codebook=[1]), "codebook"),
    "mlx, mxfp4": (stating("mlx", mode="mxfp4"), "mode: 'mxfp4'"),
    "mlx, 6 bits": (stating("mlx", bits=6), "bits: 6"),
    "mlx, 3 bits in a module": (stating("mlx", **{QPROJ: {"bits": 3, "group_size": 32}}), f"{QPROJ}.bits: 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_schemes_are_refused_by_name_and_can_be_planned(case: str, tmp_path: Path) -> None:
    config, named = REFUSED[case]
    folders.write(tmp_path / "tiny", "compressed-tensors", config=config)
    reason = open_source(tmp_path / "tiny").spec.exportable
    assert reason is not None and reason.startswith("its weights are quantised already: ")
    assert named in reason and "\n" not in reason and len(reason) < 400


def zero_point(tensors: Tensors) -> None:
    tensors[f"{QPROJ}.weight_zero_point"] = ("I32", np.zeros((8, 3), np.int32))


def order(tensors: Tensors) -> None:
    tensors[f"{QPROJ}.weight_g_idx"] = ("I32", np.zeros(64, np.int32))


def gptq_order(tensors: Tensors) -> None:
    kind, values = tensors[f"{QPROJ}.g_idx"]
    tensors[f"{QPROJ}.g_idx"] = (kind, values[::-1].copy())


SURPLUS: dict[str, tuple[str, Callable[[Tensors], None], str]] = {
    "zero points": (
        "compressed-tensors",
        zero_point,
        r"q_proj.weight_zero_point' is I32 \[8, 3\], expected I32 \[8, 2\]",
    ),
    "an order": ("compressed-tensors", order, r"q_proj'.weight_g_idx: an order of activation is not read"),
    "gptq's order": ("gptq", gptq_order, r"q_proj.g_idx': columns are stored in order of activation"),
}


@pytest.mark.parametrize("case", SURPLUS)
def test_tensors_that_add_more_than_a_scale_are_refused_when_the_model_is_opened(case: str, tmp_path: Path) -> None:
    layout, changed, message = SURPLUS[case]
    folders.write(tmp_path / "tiny", layout, changed=changed)
    with pytest.raises((InvalidInput, Unsupported), match=message):
        open_source(tmp_path / "tiny")


def test_one_bias_that_is_no_zero_point_gives_a_matrix_minima(tmp_path: Path) -> None:
    def changed(tensors: Tensors) -> None:
        kind, values = tensors[f"{QPROJ}.biases"]
        altered = values.copy()
        altered[-1, -1] += 1
        tensors[f"{QPROJ}.biases"] = (kind, altered)

    expected = folders.write(tmp_path / "tiny", "mlx", changed=changed)
    with open_tensors(tmp_path / "tiny") as tensors:
        assert tensors.integer_formats[f"{QPROJ}.weight"].minima
        assert not np.array_equal(tensors.floats(f"{QPROJ}.weight"), expected[f"{QPROJ}.weight"].floats)


def test_desc_act_with_static_groups_is_in_natural_order(tmp_path: Path) -> None:
    expected = folders.write(tmp_path / "tiny", "gptq", config=stating("gptq", desc_act=True, static_groups=True))
    with open_tensors(tmp_path / "tiny") as tensors:
        assert np.array_equal(tensors.floats(f"{QPROJ}.weight"), expected[f"{QPROJ}.weight"].floats)


def test_gptqs_second_version_stores_the_zero_point_itself(tmp_path: Path) -> None:
    folders.write(tmp_path / "tiny", "gptq", changed=lambda tensors: _all_zeros(tensors, 0x88888888),
                  config=stating("gptq", checkpoint_format="gptq_v2"))  # fmt: skip
    assert open_source(tmp_path / "tiny").quantised_as == "GPTQ 4-bit, BF16"


def _all_zeros(tensors: Tensors, word: int) -> None:
    for name, (kind, values) in tensors.items():
        if name.endswith(".qzeros"):
            tensors[name] = (kind, np.full_like(values.view(np.uint32), word).view(np.int32))


def test_groups_that_no_target_holds_are_refused(tmp_path: Path) -> None:
    folders.write(tmp_path / "tiny", "compressed-tensors", group=16)
    with pytest.raises(Unsupported, match="one scale for each 16 values; 4 bits are held in groups that 32 divides"):
        open_source(tmp_path / "tiny")


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    def changed(tensors: Tensors) -> None:
        tensors[f"{QPROJ}.weight_scale"] = ("BF16", float32_to_bf16(np.full((64, 2), np.inf, np.float32)))

    folders.write(tmp_path / "tiny", "compressed-tensors", changed=changed)
    with open_tensors(tmp_path / "tiny") as tensors, pytest.raises(InvalidInput, match="a scale that is not finite"):
        tensors.floats(f"{QPROJ}.weight")


@settings(deadline=None, max_examples=60)
@given(data=st.data(), layout=st.sampled_from(sorted(LAYOUTS)))
def test_mutated_tensors_are_read_or_refused_in_one_line(
    data: st.DataObject, layout: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Wrong shapes and types, missing and surplus tensors: either an error or the right numbers."""

    def changed(tensors: Tensors) -> None:
        name = data.draw(st.sampled_from(sorted(each for each in tensors if each.startswith(QPROJ))))
        kind, values = tensors[name]
        how = data.draw(st.sampled_from(["cut", "narrow", "flat", "type", "gone", "noise"]))
        if how == "gone":
            del tensors[name]
        elif how == "type":
            tensors[name] = ("U8", np.zeros(values.shape, np.uint8))
        elif how == "noise":
            noise = np.frombuffer(data.draw(st.binary(min_size=values.nbytes, max_size=values.nbytes)), values.dtype)
            tensors[name] = (kind, noise.reshape(values.shape))
        else:
            cut = {"cut": values[:-1], "narrow": values[..., :-1], "flat": values.reshape(-1)}[how]
            tensors[name] = (kind, np.ascontiguousarray(cut))

    place = tmp_path_factory.mktemp("mutated") / "tiny"
    folders.write(place, layout, changed=changed)
    refusal = ""
    try:
        source = open_source(place)
        with open_tensors(source.weights) as tensors:
            found = tensors.floats(f"{QPROJ}.weight")
        assert found.shape == (64, 64)
        assert np.isfinite(found).all()
    except EdgekitError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert len(refusal) < 600
