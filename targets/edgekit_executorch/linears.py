"""Linears and the embedding as torch modules that hold the neutral integers, so that no weight is rounded again.

The arithmetic is written in the operators that ExecuTorch's lowering recognises: activations in 8 bits for each token,
weights in 4 bits with a scale for each group (S4) or in 8 bits with a scale for each row (S8).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.recipe import Format
from edgekit.errors import Unsupported
from edgekit_executorch.capabilities import refuse_scales

# "integers": weights and activations; "weights": activations stay floats, which this version of XNNPACK computes wrong;
# "floats": both are floats.
Arithmetic = Literal["integers", "weights", "floats"]

_INT8 = (-128, 127, torch.int8)


class QuantisedLinear(nn.Module):
    """Rows of integers with scales: one for each `group` values of a row, or one for the row if `group` is None.

    Expects inputs that `round_tokens` has rounded.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

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
        return functional.linear(values, self.dequantised().to(values.dtype), self.bias)

    def dequantised(self) -> torch.Tensor:
        ops, stored = torch.ops.quantized_decomposed, (self.weight, self.scales, self.zeros)
        floats: torch.Tensor
        if self.group is None:
            floats = ops.dequantize_per_channel(*stored, 0, *_INT8)
        else:
            floats = ops.dequantize_per_channel_group(*stored, -8, 7, torch.int8, self.group, torch.float32)
        return floats


class RoundedLinear(nn.Module):
    """Linears that read the same inputs, which are rounded once to 8 bits for each token.

    Float linears among them read the inputs without rounding.
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
    """Quantise each token [token, value] to 8 bits, asymmetrically, and dequantise it."""
    ops = torch.ops.quantized_decomposed
    scale, zero = ops.choose_qparams_per_token_asymmetric(values, torch.int8)
    rounded = ops.quantize_per_token(values, scale, zero, *_INT8)
    dequantised: torch.Tensor = ops.dequantize_per_token(rounded, scale, zero, *_INT8, values.dtype)
    return dequantised


class QuantisedEmbedding(nn.Module):
    """A table of 8-bit rows with a scale for each row."""

    def __init__(self, integers: NDArray[np.int8], scales: NDArray[np.float32]) -> None:
        super().__init__()
        self.register_buffer("weight", torch.from_numpy(np.ascontiguousarray(integers)))
        self.register_buffer("scales", torch.from_numpy(np.ascontiguousarray(scales)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = torch.ops.quantized_decomposed.embedding_byte(
            self.weight, self.scales, None, -128, 127, tokens
        )
        return rows


def linear(
    weights: NeutralWeights, module: str, rows: slice | None = None, *, arithmetic: Arithmetic = "integers"
) -> nn.Module:
    """Return the linear of a module, or of some of its rows."""
    stored, bias = weights.format_of(module), _bias(weights, module, rows)
    if not stored.is_float:
        refuse_scales(module, weights.scales(module, rows))
    if arithmetic == "integers" and not stored.is_float:
        return QuantisedLinear(weights.integers(module, rows), weights.scales(module, rows), stored.group, bias)
    inputs, outputs = weights.tensor_of(module).shape[1], weights.tensor_of(module).shape[0]
    with torch.device("meta"):
        made = nn.Linear(inputs, rows.stop - rows.start if rows else outputs, bias=bias is not None)
    if arithmetic == "weights" and not stored.is_float:
        made.weight = integer_weight(weights.integers(module, rows), weights.scales(module, rows), stored)
    else:
        made.weight = fixed(weights.dequantised(module, rows))
    made.bias = None if bias is None else fixed(bias)  # type: ignore[assignment]
    return made


def embedding(weights: NeutralWeights, module: str, *, arithmetic: Arithmetic = "integers") -> nn.Module:
    """Return the token embedding: as 8-bit integers for integer kernels, else as floats."""
    stored = weights.format_of(module)
    if arithmetic == "integers" and not stored.is_float:
        if stored.kind != "s8":
            raise Unsupported(
                f"executorch: {module} as {stored}: the token embedding must be 8-bit or float; choose such a recipe"
            )
        return QuantisedEmbedding(weights.integers(module), weights.scales(module))
    shape = weights.tensor_of(module).shape
    with torch.device("meta"):
        made = nn.Embedding(shape[0], shape[1])
    made.weight = fixed(weights.dequantised(module))
    return made


def integer_weight(integers: NDArray[np.int8], scales: NDArray[np.float32], stored: Format) -> nn.Parameter:
    """Return a weight that torchao lowers as integers with float activations."""
    from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import IntxUnpackedToInt8Tensor

    scale = torch.from_numpy(np.ascontiguousarray(scales))
    tensor = IntxUnpackedToInt8Tensor(
        torch.from_numpy(np.ascontiguousarray(integers)),
        scale,
        torch.zeros_like(scale, dtype=torch.int8),
        torch.int4  # type: ignore[attr-defined]
        if stored.kind == "s4"
        else torch.int8,
        (1, stored.group or integers.shape[1]),
        torch.float32,
        None,
    )
    return nn.Parameter(tensor, requires_grad=False)


def fixed(values: NDArray[Any]) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(np.array(values, np.float32)), requires_grad=False)


def _bias(weights: NeutralWeights, module: str, rows: slice | None) -> NDArray[np.float32] | None:
    name = f"{module}.bias"
    exists = any(tensor.name == name for tensor in weights.model.tensors())
    return weights.floats(name, rows) if exists else None
