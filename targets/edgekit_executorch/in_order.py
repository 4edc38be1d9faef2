"""What XNNPACK computes, spelled out in torch to the bit: integers summed exactly, floats in the order of its kernels.

With 8-bit activations a sum in another order moves one rounding, and that moves others behind it, so a program and
torch agree no better than torch agrees with itself. Here nothing is summed in another order, and a program can be held
to equality: whatever differs is a mistake. The curves (of the activation, of norms) are the vendor's own, each
lowered as a program of one operator; attention and cache are ExecuTorch's operators, which torch can call. What is run
on a device never comes here: programs are checked with it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from edgekit.errors import TargetFailed, Unsupported
from edgekit_executorch.attention import Attention, Fused
from edgekit_executorch.decoder import Decoder, Forward
from edgekit_executorch.hushed import hushed_to_the_bottom
from edgekit_executorch.layout import FORWARD
from edgekit_executorch.linears import QuantisedLinear, Rounded, fixed
from edgekit_executorch.lowering import Entry, lower_xnnpack
from edgekit_executorch.program import BareMethod

_LARGEST = 1 << 24  # values that one call of a curve takes
_CURVES = (torch.sigmoid, torch.rsqrt, torch.tanh, functional.gelu)
# Kernels for bytes without a sign add 128 to what they multiply, and so begin their sum elsewhere.
_OFFSETS = (128, 0)


class InOrder(nn.Module):
    """`Forward` of a decoder, as the program's kernels would compute it; it takes the decoder over."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        offset = kernel_offset()
        if offset is None:
            raise Unsupported("executorch: XNNPACK's kernels for this processor sum in an order that is not known here")
        for module in list(decoder.modules()):
            if isinstance(module, Attention) and not isinstance(module, Fused):
                raise Unsupported(f"executorch: the order in which {type(module).__name__} attention sums is not known")
            for name, part in list(module.named_children()):
                if isinstance(part, Rounded):
                    setattr(module, name, RoundedInOrder(part, offset))
        self.whole = Forward(decoder)

    def forward(self, tokens: torch.Tensor, start: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        with _Functions():
            found: torch.Tensor = self.whole(tokens, start, rows)
        return found


class RoundedInOrder(nn.Module):
    """Linears that share one rounding of their inputs [token, value] to 8 bits."""

    def __init__(self, linears: Rounded, offset: int) -> None:
        super().__init__()
        self.linears, self.offset = linears.linears, offset

    def forward(self, values: torch.Tensor) -> list[torch.Tensor]:
        integers, zeros, scales = round_in_order(values)
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
            return added((((integers - zeros).double() @ weight.T).float() * scales), linear.scales, bias)
        group = linear.group
        blocks = [slice(start, start + group) for start in range(0, weight.shape[1], group)]
        # What zero stands for is taken off before the first group is added, for all groups at once.
        in_all = torch.zeros(len(weight))
        for place, block in enumerate(blocks):
            in_all = in_all + weight[:, block].sum(1).float() * linear.scales[:, place]
        shifted = (integers + self.offset).double()
        found = -(zeros + self.offset) * in_all
        for place, block in enumerate(blocks):
            found = added((shifted[:, block] @ weight[:, block].T).float(), linear.scales[:, place], found)
        return found * scales + bias


def round_in_order(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers, what stands for zero, and the scale of each token, asymmetric and with zero exact."""
    low, high = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
    # A number over a tensor would be taken for the number times one over the tensor, which rounds twice.
    steps = torch.where(high == low, torch.ones_like(high), torch.full_like(high, 255.0) / (high - low))
    lowest, highest = low * steps, high * steps
    zeros = torch.where((lowest - 128) + (highest + 127) > 0, -128 - lowest, 127 - highest).clamp(-128, 127).round()
    integers = ((values * steps).round() + zeros).clamp(-128, 127)
    return integers, zeros, torch.ones_like(steps) / steps


def added(one: torch.Tensor, other: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """one × other + to, rounded once: the product of two floats is exact in double precision."""
    return (one.double() * other.double() + to.double()).float()


class _Functions(TorchFunctionMode):
    """Products with floats, one input after the other; the vendor's curves; ExecuTorch's kernels for rounding."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is functional.linear:
            return product_in_order(*args, **(kwargs or {}))
        if function in _CURVES:
            assert len(args) == 1 and not kwargs, f"{function} is lowered as it is without options"
            return curve(function)(args[0])
        if function in _rounders():
            return by_kernel(function, *args)
        return function(*args, **(kwargs or {}))


def by_kernel(function: Any, values: torch.Tensor, *more: Any) -> Any:
    """What rounds narrow caches: ExecuTorch's kernels are those that write to a place, torch's are others."""
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
    found = torch.zeros(len(weight)) if bias is None else bias
    for place in range(weight.shape[1]):
        found = added(values[..., place, None], weight[:, place], found)
    return found


@cache
def curve(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of one value, as the vendor computes it."""
    lowered = Lowered(_Curve(function), torch.ones(3), most=_LARGEST)
    return lambda values: lowered(values.reshape(-1)).view(values.shape)


def has_vnni() -> bool:
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and "avx512_vnni" in cpu.read_text()


@cache
def kernel_offset() -> int | None:
    """By how much the kernels of this processor shift what they multiply; None where they sum in another order.

    Found by trying products of each kind, of one row and of many, for which there are kernels of their own. Without
    AVX-512 VNNI these products can agree and whole programs still differ, so there the order counts as unknown.
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
    both, one, some = Rounded(of_groups, of_rows), fixed(floats(1, 256)), fixed(floats(24, 256))
    asked = torch.from_numpy(floats(64, 256))
    lowered = Lowered(_Products(both, one, some), asked[:3], most=len(asked))
    for offset in _OFFSETS:
        spelled = _Products(RoundedInOrder(both, offset), one, some)
        with _Functions(), torch.no_grad():
            pairs = [(spelled(asked[:rows]), lowered(asked[:rows])) for rows in (1, 7, len(asked))]
        # Another order is units of the last place away, and now and then a rounding; what is further is a mistake.
        if any((here - there).abs().max() > 1e-2 * there.abs().max() for here, there in pairs):
            raise TargetFailed("executorch: XNNPACK's products are not those of its integers; export nothing with it")
        if all(torch.equal(here, there) for here, there in pairs):
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


class Lowered:
    """A module of one input, whose first size may change, through XNNPACK."""

    def __init__(self, module: nn.Module, example: torch.Tensor, most: int) -> None:
        entry = Entry(module, (example,), ({0: torch.export.Dim("count", min=1, max=most)},))
        with hushed_to_the_bottom(), tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "one.pte"
            lower_xnnpack({FORWARD: entry}, {}, path, lambda done, total, what: None)
            self._method = BareMethod(path.read_bytes())

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return self._method(values.contiguous())
