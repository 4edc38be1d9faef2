"""Linears and the embedding as torch modules that hold the neutral integers, so that nothing is rounded again.

The arithmetic is spelled out in the operators that ExecuTorch's lowering recognises: activations to 8 bits for each
token, weights 4-bit in groups (S4) or 8-bit with one scale a row (S8). Knows nothing of layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from edgekit.errors import Unsupported
from edgekit.weights.neutral import NeutralWeights

_INT8 = (-128, 127, torch.int8)


class QuantisedLinear(nn.Module):
    """Rows of integers with their scales; `group` values of a row share one, or a whole row does.

    Its input has been rounded to 8 bits for each token.
    """

    def __init__(
        self, integers: NDArray[np.int8], scales: NDArray[np.float32], group: int | None,
        bias: NDArray[np.float32] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.group = group
        scale = torch.from_numpy(np.ascontiguousarray(scales))
        self.register_buffer("weight", torch.from_numpy(np.ascontiguousarray(integers)))
        self.register_buffer("scales", scale if group else scale[:, 0].contiguous())
        self.register_buffer("zeros", torch.zeros_like(self.scales, dtype=torch.int32))
        self.bias = None if bias is None else fixed(bias)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return functional.linear(values, self.dequantised(), self.bias)

    def dequantised(self) -> torch.Tensor:
        ops = torch.ops.quantized_decomposed
        if self.group is None:
            found: torch.Tensor = ops.dequantize_per_channel(self.weight, self.scales, self.zeros, 0, *_INT8)
            return found
        found = ops.dequantize_per_channel_group(
            self.weight, self.scales, self.zeros, -8, 7, torch.int8, self.group, torch.float32
        )
        return found


class Rounded(nn.Module):
    """What a layer's linears take: activations to 8 bits for each token where integers follow, unchanged where floats do.

    Linears that read the same values share one rounding, as their kernels do.
    """

    def __init__(self, *linears: nn.Module) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, values: torch.Tensor) -> list[torch.Tensor]:
        if not any(isinstance(linear, QuantisedLinear) for linear in self.linears):
            return [linear(values) for linear in self.linears]
        rounded = round_tokens(values)
        return [linear(rounded if isinstance(linear, QuantisedLinear) else values) for linear in self.linears]


def round_tokens(values: torch.Tensor) -> torch.Tensor:
    """Each token [token, value] rounded to 8 bits, asymmetrically, and back."""
    ops = torch.ops.quantized_decomposed
    scale, zero = ops.choose_qparams_per_token_asymmetric(values, torch.int8)
    rounded = ops.quantize_per_token(values, scale, zero, *_INT8)
    found: torch.Tensor = ops.dequantize_per_token(rounded, scale, zero, *_INT8, torch.float32)
    return found


class QuantisedEmbedding(nn.Module):
    """A table of 8-bit rows with one scale each."""

    def __init__(self, integers: NDArray[np.int8], scales: NDArray[np.float32]) -> None:
        super().__init__()
        self.register_buffer("weight", torch.from_numpy(np.ascontiguousarray(integers)))
        self.register_buffer("scales", torch.from_numpy(np.ascontiguousarray(scales)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.quantized_decomposed.embedding_byte(
            self.weight, self.scales, None, -128, 127, tokens
        )
        return found


def linear(weights: NeutralWeights, module: str, rows: slice | None = None, *, integers: bool = True) -> nn.Module:
    """The matrix of a module, or some rows of it; without `integers`, dequantised."""
    stored, bias = weights.format_of(module), _bias(weights, module, rows)
    if integers and not stored.is_float:
        return QuantisedLinear(weights.integers(module, rows), weights.scales(module, rows), stored.group, bias)
    values = weights.dequantised(module, rows)
    with torch.device("meta"):
        made = nn.Linear(values.shape[1], values.shape[0], bias=bias is not None)
    made.weight = fixed(values)
    made.bias = None if bias is None else fixed(bias)  # type: ignore[assignment]
    return made


def embedding(weights: NeutralWeights, module: str, *, integers: bool = True) -> nn.Module:
    """The table of tokens; without `integers`, dequantised."""
    stored = weights.format_of(module)
    if integers and not stored.is_float:
        if stored.kind != "s8":
            raise Unsupported(
                f"executorch: {module} as {stored}: the table of tokens takes 8 bits or floats; choose a recipe with that"
            )
        return QuantisedEmbedding(weights.integers(module), weights.scales(module))
    shape = weights.tensor_of(module).shape
    with torch.device("meta"):
        made = nn.Embedding(shape[0], shape[1])
    made.weight = fixed(weights.dequantised(module))
    return made


def fixed(values: NDArray[Any]) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(np.array(values, np.float32)), requires_grad=False)


def _bias(weights: NeutralWeights, module: str, rows: slice | None) -> NDArray[np.float32] | None:
    name = f"{module}.bias"
    there = any(tensor.name == name for tensor in weights.model.tensors())
    return weights.floats(name, rows) if there else None
