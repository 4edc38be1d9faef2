"""The format of each tensor in an MLX folder: packed words with scales, or floats.

A row's integers are a little-endian stream of `bits` bits each. MLX computes `scale × q + bias` with an unsigned q, so
symmetric integers have the bias -2^(bits-1) × scale.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.contracts.neutral import is_module, on_disk
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import GROUPS, INTEGER_BITS, Format, Recipe
from edgekit.errors import Unsupported
from edgekit.formats.int_packing import bf16_to_float32, float32_to_bf16
from edgekit.model.parts import Experts
from edgekit.model.spec import ModelSpec
from edgekit.model.tensors import Tensor

WEIGHTS = "model.safetensors"

FloatType = Literal["F32", "F16", "BF16"]


class MlxPacking(NamedTuple):
    """The packing of a module's integers: their bits, the number of values that share a scale, and MLX's mode."""

    bits: int
    group: int
    mode: str = "affine"

    @property
    def has_biases(self) -> bool:
        return self.mode == "affine"

    def config(self) -> dict[str, Any]:
        """Return the packing's fields in `config.json`."""
        return {"group_size": self.group, "bits": self.bits, "mode": self.mode}


def float_type(plan: Plan) -> FloatType:
    """Return the type of scales and activations: 16 bits on Metal; 32 on CPUs, whose 16-bit kernels are slow."""
    if plan.backend != "metal":
        return "F32"
    kinds: dict[str, FloatType] = {"float16": "F16", "bfloat16": "BF16"}
    return kinds.get(plan.recipe.float_format.kind, "F32")


def packing_of(tensor: Tensor, stored: Format) -> MlxPacking | None:
    """Return the packing of a matrix; None for floats. Raises `Unsupported` if no group divides its rows."""
    if stored.is_float:
        return None
    inputs = tensor.shape[-1]
    if stored.kind in ("mxfp4", "nvfp4"):
        packing = MlxPacking(4, 32 if stored.kind == "mxfp4" else 16, stored.kind)
        if inputs % packing.group == 0:
            return packing
    else:
        bits = INTEGER_BITS.get(stored.kind) or int(stored.kind.removeprefix("affine"))
        # A row of s8 has one scale, which is repeated for each group: the largest group takes the fewest bytes.
        for group in (stored.group, *GROUPS):
            if group and group <= (stored.group or group) and inputs % group == 0:
                return MlxPacking(bits, group)
    raise Unsupported(
        f"mlx: {tensor.module} has {inputs} inputs, and MLX packs {stored.kind} in groups that must divide them; "
        "store it as float16"
    )


def module_on_disk(model: ModelSpec, tensor: Tensor) -> str:
    """Return the name of a tensor's module in the file."""
    return on_disk(model, tensor.name).removesuffix(".weight").removesuffix(".bias")


class FileTensor(NamedTuple):
    """A tensor of the file under the model's name, and the model's tensors in it: one, or one of every expert."""

    tensor: Tensor
    parts: tuple[Tensor, ...]


def file_tensors(model: ModelSpec) -> list[FileTensor]:
    """Return the tensors of the file: the model's own, with one stack for each projection of a layer's experts."""
    parts: dict[str, list[Tensor]] = {}
    for tensor in model.tensors():
        parts.setdefault(_name_in_file(model, tensor), []).append(tensor)
    return [
        FileTensor(
            Tensor(name, (len(each), *each[0].shape) if each[0].is_of_expert else each[0].shape, each[0].role),
            tuple(each),
        )
        for name, each in parts.items()
    ]


def _name_in_file(model: ModelSpec, tensor: Tensor) -> str:
    if model.experts and tensor.is_of_expert:
        return _stacked_name(model.experts, tensor)
    block, between, rest = tensor.name.partition(".feed_forward.")
    part, dot, kind = rest.partition(".")
    if model.family == "lfm2_moe" and part in _PARTS:  # mlx-lm renames the weights of its dense layers, not the scales
        return f"{block}{between}{_PARTS[part]}{dot}{kind}"
    return tensor.name


def _stacked_name(experts: Experts, tensor: Tensor) -> str:
    layer, _, _ = tensor.name.rpartition(f"{experts.block}.experts.")
    _, part, kind = tensor.name.removeprefix(f"{layer}{experts.block}.experts.").split(".")
    return f"{layer}{stack_module(experts, _PARTS.get(part, part))}.{kind}"


def stack_module(experts: Experts, part: str) -> str:
    """Return the module in a layer of the file that has one projection of all experts."""
    return f"{experts.block}.{'experts' if experts.layout == 'stacks' else 'switch_mlp'}.{part}"


_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # Mixtral's names


def module_names(model: ModelSpec) -> list[str]:
    """Return the names in the file of all modules with a matrix."""
    return [module_on_disk(model, each.tensor) for each in file_tensors(model) if is_module(each.tensor)]


def packings(model: ModelSpec, recipe: Recipe) -> dict[str, MlxPacking | None]:
    """Return the packing of every module, by its name in the file."""
    packed: dict[str, MlxPacking | None] = {}
    for tensor, parts in file_tensors(model):
        formats = list(dict.fromkeys(recipe.format_of(part) for part in parts)) if is_module(tensor) else []
        if len(formats) > 1:
            raise Unsupported(
                f"mlx: {tensor.module} has experts in {' and '.join(map(str, formats))}; give all of them one format"
            )
        if formats:
            packed[module_on_disk(model, tensor)] = packing_of(tensor, formats[0])
    return packed


def stored_tensors(
    model: ModelSpec, packed: dict[str, MlxPacking | None], floats: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and the shape of every tensor of the file."""
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensor, _ in file_tensors(model):
        name, module = on_disk(model, tensor.name), module_on_disk(model, tensor)
        packing = packed.get(module) if is_module(tensor) else None
        if packing is None:
            stored[name] = (floats, tensor.shape)
            continue
        *outputs, inputs = tensor.shape
        groups = (*outputs, inputs // packing.group)
        stored[name] = ("U32", (*outputs, inputs * packing.bits // 32))
        stored[f"{module}.scales"] = (floats if packing.has_biases else "U8", groups)
        if packing.has_biases:
            stored[f"{module}.biases"] = (floats, groups)
    return stored


def as_stored(values: NDArray[np.float32], floats: FloatType) -> NDArray[Any]:
    """Round float32 to `floats`; bfloat16 is returned as its bits."""
    if floats == "BF16":
        return float32_to_bf16(values)
    if floats == "F32":
        return values
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def as_read(stored: NDArray[Any], floats: FloatType) -> NDArray[np.float32]:
    """Return the exact float32 values of numbers from `as_stored`."""
    return bf16_to_float32(stored) if floats == "BF16" else stored.astype(np.float32)
