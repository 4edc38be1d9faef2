"""A small model as other tools quantise it: random integers and scales as W4A16, GPTQ, AWQ, MLX and GGUF."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf_files
import numpy as np
import tiny_models
from numpy.typing import NDArray

from edgekit.formats.int_packing import float32_to_bf16, pack
from edgekit.formats.safetensors import TensorFolder
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.model.families import model_from_config
from edgekit.model.spec import ModelSpec

Tensors = dict[str, tuple[str, NDArray[Any]]]


class Integers(NamedTuple):
    """The integers [out, in], scales and zero points [out, in/group] that a file was made of.

    Zero points are less by the middle, as the integers are; None: all are 0. `minima` are the values of the integer -8.
    """

    integers: NDArray[np.int8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.float32] | None = None
    minima: NDArray[np.float32] | None = None

    @property
    def floats(self) -> NDArray[np.float32]:
        if self.minima is not None:
            scales, minima = (np.repeat(each, 32, axis=1) for each in (self.scales, self.minima))
            return (self.integers + np.float32(8)) * scales + minima
        zeros = np.zeros_like(self.scales) if self.zeros is None else self.zeros
        scales, zeros = (np.repeat(each, self.integers.shape[1] // each.shape[1], 1) for each in (self.scales, zeros))
        return (self.integers - zeros) * scales


def drawn(
    shape: tuple[int, int],
    bits: int,
    group: int,
    draw: np.random.Generator,
    dtype: str = "BF16",
    *,
    signed: bool = False,
    zeros: bool = False,
) -> Integers:
    """Random integers, all of them used, with scales that their type holds; signed ones have both signs and zeros.

    With `zeros`, scales have few bits, so that their type holds their products with zero points too.
    """
    low = -(1 << (bits - 1))
    integers = draw.integers(low, -low, shape, dtype=np.int8)
    integers[0, :2] = low, -low - 1
    scales = draw.uniform(0.002, 0.02, (shape[0], shape[1] // group)).astype(np.float32) * np.float32(16 / (1 << bits))
    if dtype == "BF16":
        scales = (float32_to_bf16(scales).astype(np.uint32) << 16).view(np.float32)
    elif dtype == "F16":
        scales = scales.astype(np.float16).astype(np.float32)
    if zeros:
        mantissas, powers = np.frexp(scales)
        scales = np.ldexp(np.round(mantissas * 16) / 16, powers).astype(np.float32)
        return Integers(integers, scales, draw.integers(low + 1, -low, scales.shape).astype(np.float32))
    if signed:
        scales *= draw.choice(np.array([-1, 1], np.float32), scales.shape)
        scales[-1, 0] = 0
    return Integers(integers, scales)


def as_dtype(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    return {"BF16": float32_to_bf16, "F16": lambda v: v.astype(np.float16), "F32": lambda v: v}[dtype](values)


class Layout(NamedTuple):
    """A layout: its config, and the tensors of one matrix."""

    config: Callable[[int, int | None], dict[str, Any]]
    tensors: Callable[[str, Integers, int, str], Tensors]
    of_linears_alone: bool = True


def compressed_config(bits: int, group: int | None) -> dict[str, Any]:
    """As llmcompressor writes it."""
    weights = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": group, "num_bits": bits,
        "observer": "minmax", "observer_kwargs": {}, "strategy": "group" if group else "channel", "symmetric": True,
        "type": "int",
    }  # fmt: skip
    group_0 = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "quantization_config": {
            "config_groups": {"group_0": group_0}, "format": "pack-quantized", "global_compression_ratio": 1.5,
            "ignore": ["lm_head"], "kv_cache_scheme": None, "quant_method": "compressed-tensors",
            "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {}, "version": "0.10.2",
        }
    }  # fmt: skip


def compressed_tensors(module: str, held: Integers, bits: int, dtype: str) -> Tensors:
    return {
        f"{module}.weight_packed": ("I32", pack(held.integers, bits).view("<i4")),
        f"{module}.weight_scale": (dtype, as_dtype(held.scales, dtype)),
        f"{module}.weight_shape": ("I64", np.array(held.integers.shape, np.int64)),
    } | (
        {}
        if held.zeros is None
        else {f"{module}.weight_zero_point": ("I32", np.ascontiguousarray(pack(held.zeros.T, bits).view("<i4").T))}
    )


def gptq_config(bits: int, group: int | None) -> dict[str, Any]:
    """As GPTQModel writes it."""
    return {
        "quantization_config": {
            "bits": bits, "group_size": group or -1, "desc_act": False, "sym": True, "lm_head": False,
            "quant_method": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32", "dynamic": None,
            "meta": {"quantizer": ["gptqmodel:2.2.0"], "damp_percent": 0.05, "static_groups": False},
        }
    }  # fmt: skip


def gptq_tensors(module: str, held: Integers, bits: int, dtype: str) -> Tensors:
    """The first version, which stores zero points less one."""
    outputs, inputs = held.integers.shape
    groups = held.scales.shape[1]
    raised = (held.integers.astype(np.int64) + (1 << (bits - 1))).T.reshape(-1, 32 // bits, outputs)
    words = (raised << (np.arange(32 // bits, dtype=np.int64) * bits)[None, :, None]).sum(axis=1)
    zeros = np.zeros((outputs, groups)) if held.zeros is None else held.zeros
    return {
        f"{module}.qweight": ("I32", words.astype(np.uint32).view("<i4")),
        f"{module}.qzeros": ("I32", pack(zeros.T - 1, bits).view("<i4")),
        f"{module}.scales": (dtype, np.ascontiguousarray(as_dtype(held.scales, dtype).T)),
        f"{module}.g_idx": ("I32", np.arange(inputs, dtype="<i4") // (inputs // groups)),
    }


def awq_config(bits: int, group: int | None) -> dict[str, Any]:
    """As AutoAWQ writes it."""
    stated = {"bits": bits, "group_size": group, "zero_point": True, "version": "gemm", "quant_method": "awq"}
    return {"quantization_config": stated | {"modules_to_not_convert": None}}


def awq_tensors(module: str, held: Integers, bits: int, dtype: str) -> Tensors:
    """Eight neighbouring outputs share a word, in this order from its lowest bits."""

    def words(values: NDArray[Any]) -> NDArray[Any]:
        order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
        return pack(values.reshape(len(values), -1, 8)[:, :, order].reshape(len(values), -1), bits).view("<i4")

    zeros = np.zeros_like(held.scales) if held.zeros is None else held.zeros
    return {
        f"{module}.qweight": ("I32", words(held.integers.T)),
        f"{module}.qzeros": ("I32", words(zeros.T)),
        f"{module}.scales": (dtype, np.ascontiguousarray(as_dtype(held.scales, dtype).T)),
    }


def mlx_config(bits: int, group: int | None) -> dict[str, Any]:
    stated = {"group_size": group, "bits": bits, "mode": "affine"}
    return {"quantization": stated, "quantization_config": stated}


def mlx_tensors(module: str, held: Integers, bits: int, dtype: str) -> Tensors:
    middle = np.float32(1 << (bits - 1)) + (0 if held.zeros is None else held.zeros)
    return {
        f"{module}.weight": ("U32", pack(held.integers, bits).view("<u4")),
        f"{module}.scales": (dtype, as_dtype(held.scales, dtype)),
        f"{module}.biases": (dtype, as_dtype(held.scales * -middle, dtype)),
    }


LAYOUTS = {
    "compressed-tensors": Layout(compressed_config, compressed_tensors),
    "gptq": Layout(gptq_config, gptq_tensors),
    "awq": Layout(awq_config, awq_tensors),
    "mlx": Layout(mlx_config, mlx_tensors, of_linears_alone=False),
}


def write(
    folder: Path, layout: str, *, bits: int = 4, group: int | None = 32, dtype: str = "BF16", signed: bool = False,
    zeros: bool = False, changed: Callable[[Tensors], None] = lambda tensors: None,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Integers]:  # fmt: skip
    """Write the model and return its integers by tensor; `changed` alters the tensors, `config` is what it states."""
    found = LAYOUTS[layout]
    tiny_models.write_tiny(folder)
    stated = json.loads((folder / "config.json").read_text()) | (config or found.config(bits, group))
    (folder / "config.json").write_text(json.dumps(stated))
    draw, tensors, integers = np.random.default_rng(5), Tensors(), dict[str, Integers]()
    with TensorFolder.open(folder) as floats:
        for tensor in spec_of(folder).tensors():
            is_held = tensor.role == "linear" or (tensor.role == "embedding" and not found.of_linears_alone)
            if not is_held:
                tensors[tensor.name] = ("BF16", float32_to_bf16(floats.floats(tensor.name)))
                continue
            outputs, inputs = tensor.shape
            held = drawn((outputs, inputs), bits, group or inputs, draw, dtype, signed=signed, zeros=zeros)
            integers[tensor.name] = held
            tensors |= found.tensors(tensor.module, held, bits, dtype)
    changed(tensors)
    (folder / "model.safetensors").unlink()
    described = {name: (kind, values.shape) for name, (kind, values) in tensors.items()}
    with TensorWriter(folder / "model.safetensors", described) as writer:
        for name, (_, values) in tensors.items():
            writer.write(name, np.ascontiguousarray(values))
        writer.seal()
    return integers


def spec_of(folder: Path) -> ModelSpec:
    config = json.loads((folder / "config.json").read_text())
    plain = {key: value for key, value in config.items() if not key.startswith("quantization")}
    return model_from_config(plain, folder.name, str(folder))


def write_gguf(path: Path, *, head: str = "Q8_0", linears: str = "Q4_0") -> dict[str, Integers]:
    """A small Llama whose linears are Q4_0 by llama.cpp's rule, with negative scales and zeros, or Q4_1."""
    config = gguf_files.FAMILIES["llama"]
    weights = gguf_files.random_tensors(config)
    weights["model.layers.0.self_attn.q_proj.weight"][3] = 0  # a row of zeros has scales of zero
    kinds = {
        name: gguf_files.GGMLQuantizationType[head if "embed" in name else linears]
        for name, values in weights.items()
        if values.ndim == 2
    }
    path.write_bytes(gguf_files.model_file(config, weights, types=kinds))
    return {
        name: _blocks(gguf_files.quantize(weights[name], kind), kind.name)
        for name, kind in kinds.items()
        if kind.name in ("Q4_0", "Q4_1", "Q8_0")
    }


def _blocks(stored: NDArray[np.uint8], kind: str) -> Integers:
    """Unpack blocks one by one, as llama.cpp's structs describe them."""
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    rows = stored.reshape(len(stored), -1, size)
    scales = np.ascontiguousarray(rows[..., :2]).view("<f2")[..., 0].astype(np.float32)
    minima = np.ascontiguousarray(rows[..., 2:4]).view("<f2")[..., 0].astype(np.float32)
    if kind == "Q8_0":
        values = rows[..., 2:].view(np.int8)
    else:
        packed = rows[..., size - 16 :]
        values = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int8) - 8
    if kind == "Q4_1":
        return Integers(values.reshape(len(stored), -1), scales, None, minima)
    return Integers(values.reshape(len(stored), -1), scales)
