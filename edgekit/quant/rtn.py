"""Rounding to nearest with a scale search: the quick method, without calibration text.

Each group of values gets the scale with the least squared error. It is rounded to bfloat16 before the integers are
chosen, so the integers fit the scale that is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from edgekit.contracts.neutral import MAX_SCALE, MIN_SCALE, bits_of
from edgekit.contracts.recipe import Format
from edgekit.errors import InvalidInput, quote_short

if TYPE_CHECKING:
    import torch

    Weigh = Callable[[torch.Tensor], torch.Tensor]

Values = TypeVar("Values")

# Candidates, as shares of the scale at which nothing is clipped. Eight bits gain little by clipping, so they try few.
_SHARES_S4 = tuple(1.0 - 0.04 * step for step in range(13))
_SHARES_S8 = (1.0, 0.99)
BLOCK_VALUES = 1 << 19


class IntMatrix(NamedTuple):
    """Integers [out, in] as int8 and scales [out, in/group] as float32, both final."""

    integers: torch.Tensor
    scales: torch.Tensor


def bounds(stored: Format) -> tuple[int, int]:
    """Return the least and the greatest integer of a format."""
    half = 1 << (bits_of(stored) - 1)
    return -half, half - 1


def storable(scales: torch.Tensor) -> torch.Tensor:
    """Round scales to values that the format stores: positive, exact in bfloat16, at least 2^-17."""
    return scales.bfloat16().float().clamp_(min=MIN_SCALE)


def search_scales(weights: torch.Tensor, stored: Format, weigh: Weigh | None = None) -> torch.Tensor:
    """Return for each group of `weights` [..., group] the storable scale [..., 1] with the least squared error.

    `weigh` is a linear map that is applied to errors before they are squared, such as the importance of each input.
    """
    import torch

    low, high = bounds(stored)
    unclipped = torch.maximum(weights.amax(-1, keepdim=True) / high, weights.amin(-1, keepdim=True) / low)
    buffer = torch.empty_like(weights)

    def loss(scales: torch.Tensor) -> torch.Tensor:
        torch.mul(weights, scales.reciprocal(), out=buffer)
        buffer.round_().clamp_(low, high).mul_(scales).sub_(weights)
        cost = weigh(buffer) if weigh else buffer
        norm: torch.Tensor = torch.linalg.vector_norm(cost, dim=-1, keepdim=True)
        return norm

    best = storable(unclipped)
    least = loss(best)

    def consider(scales: torch.Tensor) -> None:
        nonlocal best, least
        error = loss(scales)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)

    for share in (_SHARES_S4 if stored.kind == "s4" else _SHARES_S8)[1:]:
        consider(storable(unclipped * share))
    # Refine the coarse search: for given integers the best scale has a closed form.
    integers = torch.mul(weights, best.reciprocal(), out=buffer).round_().clamp_(low, high)
    left, right = (weigh(integers), weigh(weights)) if weigh else (integers, weights)
    consider(storable((left * right).sum(-1, keepdim=True) / left.square().sum(-1, keepdim=True).clamp_(min=1e-30)))
    return best


def round_to(weights: torch.Tensor, scales: torch.Tensor, stored: Format) -> torch.Tensor:
    """Return the integers nearest to `weights` [..., group] under `scales` [..., 1], still as floats."""
    low, high = bounds(stored)
    return (weights * scales.reciprocal()).round_().clamp_(low, high)


def round_to_nearest(weights: torch.Tensor, stored: Format, weigh: Weigh | None = None) -> IntMatrix:
    """Quantise rows [out, in]; `weigh` is given errors as [out, groups, group]."""
    import torch

    outputs, inputs = weights.shape
    groups = weights.reshape(outputs, -1, stored.group or inputs)
    scales = search_scales(groups, stored, weigh)
    integers = round_to(groups, scales, stored).to(torch.int8)
    return IntMatrix(integers.reshape(outputs, inputs), scales.squeeze(-1))


def dequantise(integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return integer × scale in float32."""
    outputs, inputs = integers.shape
    values = integers.float().reshape(outputs, scales.shape[1], -1).mul_(scales[:, :, None])
    return values.reshape(outputs, inputs)


def refuse_unstorable(weights: torch.Tensor, stored: Format, name: str, first_row: int = 0) -> None:
    """Raise `InvalidInput` for a weight that is not finite or too large for any scale, with its name and index."""
    import torch

    fine = torch.isfinite(weights) & (weights.abs() <= MAX_SCALE * bounds(stored)[1])
    if not bool(fine.all()):
        row, column = (~fine).nonzero()[0].tolist()
        value = float(weights[row, column])
        raise InvalidInput(f"tensor {quote_short(name)}: {value} at [{first_row + row}, {column}] cannot be quantised")


def blocks(outputs: int, inputs: int) -> list[slice]:
    """Split rows into blocks that fit the processor's caches."""
    step = max(1, BLOCK_VALUES // inputs)
    return [slice(start, min(start + step, outputs)) for start in range(0, outputs, step)]


def in_parallel(do: Callable[[slice], Values], work: Sequence[slice]) -> list[Values]:
    """Call `do` for each block, divided among as many threads as torch may use.

    Torch's own threads would synchronise after every small operation; these synchronise once.
    """
    import torch

    threads = min(torch.get_num_threads(), len(work))
    if threads <= 1:
        return [do(block) for block in work]
    whole = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(do, work))
    finally:
        torch.set_num_threads(whole)
