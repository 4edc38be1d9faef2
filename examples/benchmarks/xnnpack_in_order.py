"""XNNPACK's arithmetic spelled out in torch to the bit: exact integer sums, floats in the order of its kernels.

With 8-bit activations, summing in another order changes one rounding now and then, and each change propagates, so a
program agrees with torch no better than torch with itself. Here nothing is summed in another order, so every
difference from a program is a mistake. Curves (activations, norms) are computed by XNNPACK itself, each lowered as a
program of one operator; attention and cache are ExecuTorch's operators, which torch can call. Only for checks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgekit_executorch.attention import Attention, Fused
from edgekit_executorch.decoder import Append, ExecutorchDecoder
from edgekit_executorch.layout import FORWARD
from edgekit_executorch.linears import QuantisedLinear, RoundedLinear, fixed
from edgekit_executorch.lowering import LoweredMethod, lower_xnnpack
from edgekit_executorch.program import pool_threads, runtime_with
from edgekit_executorch.quiet import quiet_stderr
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from edgekit.errors import TargetFailed, Unsupported, vendor_errors

_LARGEST = 1 << 24  # values that one call of a curve takes
_CURVES = (torch.sigmoid, torch.rsqrt, torch.tanh, functional.gelu)
# Kernels for unsigned bytes add 128 to their inputs, which changes the first term of their sums.
_OFFSETS = (128, 0)


class InOrderForward(nn.Module):
    """`Append` of a decoder, computed as the program's kernels do. It changes the decoder that it is given."""

    def __init__(self, decoder: ExecutorchDecoder) -> None:
        super().__init__()
        offset = kernel_offset()
        if offset is None:
            raise Unsupported("executorch: the order in which XNNPACK's kernels for this processor sum is not known")
        for module in list(decoder.modules()):
            if isinstance(module, Attention) and not isinstance(module, Fused):
                raise Unsupported(f"executorch: the order in which {type(module).__name__} attention sums is not known")
            for name, part in list(module.named_children()):
                if isinstance(part, RoundedLinear):
                    setattr(module, name, InOrderLinears(part, offset))
        self.decoder_forward = Append(decoder)

    def forward(self, tokens: torch.Tensor, start: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        with _KernelFunctions():
            logits: torch.Tensor = self.decoder_forward(tokens, start, rows)
        return logits


class InOrderLinears(nn.Module):
    """Linears that share the quantisation of their inputs [token, value] to 8 bits."""

    def __init__(self, linears: RoundedLinear, offset: int) -> None:
        super().__init__()
        self.linears, self.offset = linears.linears, offset

    def forward(self, values: torch.Tensor) -> list[torch.Tensor]:
        integers, zeros, scales = quantise_tokens(values)
        return [
            self._product(linear, integers, zeros, scales) if isinstance(linear, QuantisedLinear) else linear(values)
            for linear in self.linears
        ]

    def _product(
        self, linear: QuantisedLinear, integers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        weight = linear.weight.double()  # in which sums of integers are exact
        bias = torch.zeros(1) if linear.bias is None else linear.bias
        if linear.group is None:
            return multiply_add((((integers - zeros).double() @ weight.T).float() * scales), linear.scales, bias)
        group = linear.group
        blocks = [slice(start, start + group) for start in range(0, weight.shape[1], group)]
        # The kernels subtract the zero point of all groups before they add the first group.
        row_sums = torch.zeros(len(weight))
        for index, block in enumerate(blocks):
            row_sums = row_sums + weight[:, block].sum(1).float() * linear.scales[:, index]
        shifted = (integers + self.offset).double()
        total = -(zeros + self.offset) * row_sums
        for index, block in enumerate(blocks):
            total = multiply_add((shifted[:, block] @ weight[:, block].T).float(), linear.scales[:, index], total)
        return total * scales + bias


def quantise_tokens(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers, zero points and scales of each token: asymmetric, with zero represented exactly."""
    low, high = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
    # torch computes a number over a tensor as the number times its reciprocal, which rounds twice.
    steps = torch.where(high == low, torch.ones_like(high), torch.full_like(high, 255.0) / (high - low))
    lowest, highest = low * steps, high * steps
    zeros = torch.where((lowest - 128) + (highest + 127) > 0, -128 - lowest, 127 - highest).clamp(-128, 127).round()
    integers = ((values * steps).round() + zeros).clamp(-128, 127)
    return integers, zeros, torch.ones_like(steps) / steps


def multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a × b + c, rounded once: the product of two floats is exact in double precision."""
    return (a.double() * b.double() + c.double()).float()


class _KernelFunctions(TorchFunctionMode):
    """Replaces float products by sums in order, curves by XNNPACK's, and rounding by ExecuTorch's kernels."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is functional.linear:
            return product_in_order(*args, **(kwargs or {}))
        if function in _CURVES:
            assert len(args) == 1 and not kwargs, f"{function} is lowered without options"
            return curve(function)(args[0])
        if function in _rounders():
            return by_kernel(function, *args)
        return function(*args, **(kwargs or {}))


def by_kernel(function: Any, values: torch.Tensor, *more: Any) -> Any:
    """Use the `.out` variants: they dispatch to ExecuTorch's quantisation kernels, the functional ones to torch's."""
    kernels = torch.ops.quantized_decomposed
    if function is kernels.choose_qparams_per_token_asymmetric:
        scales, zeros = (torch.empty(*values.shape[:-1], 1, dtype=kind) for kind in (torch.float64, torch.int64))
        return function.out(values, *more, scale_out=scales, zero_point_out=zeros)
    kind = torch.int8 if function is kernels.quantize_per_token else torch.float32
    return function.out(values, *more, out=torch.empty_like(values, dtype=kind))


def _rounders() -> tuple[Any, ...]:
    kernels = torch.ops.quantized_decomposed
    return kernels.choose_qparams_per_token_asymmetric, kernels.quantize_per_token, kernels.dequantize_per_token


def product_in_order(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A float product that adds one input after the other."""
    total = torch.zeros(len(weight)) if bias is None else bias
    for index in range(weight.shape[1]):
        total = multiply_add(values[..., index, None], weight[:, index], total)
    return total


@cache
def curve(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of one value, as XNNPACK computes it."""
    lowered = LoweredModule(_Curve(function), torch.ones(3), most=_LARGEST)
    return lambda values: lowered(values.reshape(-1)).view(values.shape)


def has_vnni() -> bool:
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and "avx512_vnni" in cpu.read_text()


@cache
def kernel_offset() -> int | None:
    """The offset that this processor's kernels add to their inputs; None where they sum in another order.

    It is found by comparing products of each kind, of one row and of many, which different kernels compute. Without
    AVX-512 VNNI these products can agree while whole programs differ, so the order counts as unknown there.
    """
    if not has_vnni():
        return None
    draw = np.random.default_rng(0)

    def scales(groups: int) -> Any:
        return (draw.integers(1, 128, (32, groups)) / 2**12).astype(np.float32)

    def floats(*shape: int) -> Any:
        return draw.normal(size=shape).astype(np.float32)

    of_groups = QuantisedLinear(draw.integers(-8, 8, (32, 256)).astype(np.int8), scales(4), 64, None)
    of_rows = QuantisedLinear(draw.integers(-127, 128, (32, 256)).astype(np.int8), scales(1), None, floats(32))
    both, one, some = RoundedLinear(of_groups, of_rows), fixed(floats(1, 256)), fixed(floats(24, 256))
    inputs = torch.from_numpy(floats(64, 256))
    lowered = LoweredModule(_Products(both, one, some), inputs[:3], most=len(inputs))
    for offset in _OFFSETS:
        spelled = _Products(InOrderLinears(both, offset), one, some)
        with _KernelFunctions(), torch.no_grad():
            pairs = [(spelled(inputs[:rows]), lowered(inputs[:rows])) for rows in (1, 7, len(inputs))]
        # Another order differs in the last place, and now and then by one rounding; larger differences are mistakes.
        if any((mine - theirs).abs().max() > 1e-2 * theirs.abs().max() for mine, theirs in pairs):
            raise TargetFailed("executorch: XNNPACK's products are not those of its integers; export nothing with it")
        if all(torch.equal(mine, theirs) for mine, theirs in pairs):
            return offset
    return None


class _Curve(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.function(values)


class _Products(nn.Module):
    def __init__(self, rounded: nn.Module, *floats: nn.Parameter) -> None:
        super().__init__()
        self.rounded, self.floats = rounded, nn.ParameterList(floats)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat([*self.rounded(values), *(functional.linear(values, each) for each in self.floats)], -1)


class LoweredModule:
    """A module of one input, whose first dimension is dynamic, lowered to XNNPACK."""

    def __init__(self, module: nn.Module, example: torch.Tensor, most: int) -> None:
        entry = LoweredMethod(module, (example,), ({0: torch.export.Dim("count", min=1, max=most)},))
        with quiet_stderr(), tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "one.pte"
            lower_xnnpack({FORWARD: entry}, {}, path, lambda done, total, what: None)
            data = path.read_bytes()
        with vendor_errors("executorch"), quiet_stderr():
            # A method does not keep its program alive.
            self._program: Any = runtime_with(pool_threads() or 1).load_program(data)
            self._method: Any = self._program.load_method(FORWARD)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        with vendor_errors("executorch"):
            result: torch.Tensor = self._method.execute([values.contiguous()])[0].clone()
            return result
