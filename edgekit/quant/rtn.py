"""Rounding to nearest with a scale search: the quick method, without calibration text.

The search takes tensors of torch or arrays of numpy, which give the same bits, so rounding alone needs no torch.

Each group of values gets the scale with the least squared error. It is rounded to bfloat16 before the integers are
chosen, so the integers fit the scale that is stored.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from edgekit.contracts.neutral import MAX_SCALE, MIN_SCALE, bits_of
from edgekit.contracts.recipe import Format
from edgekit.errors import InvalidInput, quote_short
from edgekit.formats.int_packing import IntegerRows, bf16_to_float32, float32_to_bf16

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Weigh = Callable[[torch.Tensor], torch.Tensor]

Values = TypeVar("Values")

# Candidates, as shares of the scale at which nothing is clipped. Eight bits gain little by clipping, so they try few.
_SHARES = tuple(1.0 - 0.04 * step for step in range(13))
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
    values: Any = scales
    if _library(values) is np:
        values = np.maximum(bf16_to_float32(float32_to_bf16(values)), np.float32(MIN_SCALE))
    else:
        values = values.bfloat16().float().clamp_(min=MIN_SCALE)
    return values  # type: ignore[no-any-return]


def _library(values: Any) -> Any:
    """Return the library of an array, numpy or torch. What is used of both has one name and gives the same bits."""
    return np if isinstance(values, np.ndarray) else sys.modules["torch"]


def search_scales(weights: torch.Tensor, stored: Format, weigh: Weigh | None = None, axis: int = -1) -> torch.Tensor:
    """Return for each group of `weights` along `axis` the storable scale with the least squared error.

    `weigh` is a linear map that is applied to errors before they are squared, such as the importance of each input.
    """
    xp, (low, high) = _library(weights), bounds(stored)
    unclipped = xp.maximum(xp.amax(weights, axis, keepdims=True) / high, xp.amin(weights, axis, keepdims=True) / low)
    buffer = xp.empty_like(weights)

    def rounded(scales: Any) -> Any:
        xp.multiply(weights, 1.0 / scales, out=buffer)
        return xp.clip(xp.round(buffer, out=buffer), low, high, out=buffer)

    def summed(values: Any) -> Any:
        return xp.sum(values, axis, keepdims=True)

    def loss(scales: Any) -> Any:
        xp.subtract(xp.multiply(rounded(scales), scales, out=buffer), weights, out=buffer)
        return summed(xp.square(weigh(buffer) if weigh else buffer))

    best = storable(unclipped)
    least = loss(best)

    def consider(scales: Any) -> None:
        nonlocal best, least
        error = loss(scales)
        best = xp.where(error < least, scales, best)
        least = xp.minimum(error, least)

    for share in (_SHARES if stored.has_few_bits else _SHARES_S8)[1:]:
        consider(storable(unclipped * share))
    # Refine the coarse search: for given integers the best scale has a closed form.
    integers = rounded(best)
    left, right = (weigh(integers), weigh(weights)) if weigh else (integers, weights)
    consider(storable(summed(left * right) / xp.clip(summed(xp.square(left)), 1e-30, None)))
    return best


def round_to(weights: torch.Tensor, scales: torch.Tensor, stored: Format) -> torch.Tensor:
    """Return the integers nearest to `weights` under `scales`, which broadcast, still as floats."""
    xp, (low, high) = _library(weights), bounds(stored)
    return xp.clip(xp.round(weights * (1.0 / scales)), low, high)  # type: ignore[no-any-return]


def round_rows(weights: NDArray[np.float32], stored: Format) -> IntegerRows:
    """Quantise rows [out, in] as `round_to_nearest` does, without torch."""
    outputs, inputs = weights.shape
    # A group is a column, unless it is a whole row: numpy adds up long rows several times as fast as short ones.
    whole = stored.group in (None, inputs)
    groups: Any = weights if whole else np.ascontiguousarray(weights.reshape(-1, stored.group or inputs).T)
    scales: Any = search_scales(groups, stored, axis=-1 if whole else 0)
    integers: Any = round_to(groups, scales, stored)
    integers = np.ascontiguousarray((integers if whole else integers.T).astype(np.int8))
    return IntegerRows(integers.reshape(outputs, inputs), scales.reshape(outputs, -1))


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


def refuse_unstorable(weights: Any, stored: Format, name: str, first_row: int = 0) -> None:
    """Raise `InvalidInput` for a weight that is not finite or too large for any scale, with its name and index."""
    fine: Any = abs(weights) <= MAX_SCALE * bounds(stored)[1]  # false for NaN
    if not bool(fine.all()):
        row, column = _library(weights).argwhere(~fine)[0].tolist()
        value = float(weights[row, column])
        raise InvalidInput(f"tensor {quote_short(name)}: {value} at [{first_row + row}, {column}] cannot be quantised")


def blocks(outputs: int, inputs: int) -> list[slice]:
    """Split rows into blocks that fit the processor's caches."""
    step = max(1, BLOCK_VALUES // inputs)
    return [slice(start, min(start + step, outputs)) for start in range(0, outputs, step)]


def in_parallel(do: Callable[[slice], Values], work: Sequence[slice]) -> list[Values]:
    """Call `do` for each block, divided among as many threads as torch may use, or else as there are cores.

    Torch's own threads would synchronise after every small operation; these synchronise once.
    """
    torch = sys.modules.get("torch")
    whole = torch.get_num_threads() if torch else os.cpu_count() or 1
    threads = min(whole, len(work))
    if threads <= 1:
        return [do(block) for block in work]
    alone = {"initializer": torch.set_num_threads, "initargs": (1,)} if torch else {}
    try:
        with ThreadPoolExecutor(threads, **alone) as pool:
            return list(pool.map(do, work))
    finally:
        if torch:
            torch.set_num_threads(whole)
