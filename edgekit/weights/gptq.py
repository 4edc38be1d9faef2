"""GPTQ: integers chosen column by column, each column's rounding error made good by the columns that follow it.

What is to be made good is weighed by the Hessian of the outputs on calibration text, the inputs' second moments.
Columns keep their order, so that every target can pack the integers. Knows nothing of layers or files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekit.recipe import Format
from edgekit.weights.rtn import Rounded, in_parallel, round_to, search_scales

if TYPE_CHECKING:
    import torch

DAMPING = 0.01  # of the mean diagonal: what keeps rare inputs from being taken at their word
_BLOCK = 128  # columns between two updates of all that follow; a multiple of every group


def gptq(weights: torch.Tensor, hessian: torch.Tensor, stored: Format, damping: float = DAMPING) -> Rounded:
    """Integers and scales of `weights` [out, in] under `hessian` [in, in]."""
    import torch

    upper = _inverse_factor(hessian, damping)
    step = -(-len(weights) // torch.get_num_threads())
    shares = [slice(start, start + step) for start in range(0, len(weights), step)]  # rows do not touch each other
    rounded = in_parallel(lambda rows: _round_rows(weights[rows], upper, stored), shares)
    return Rounded(torch.cat([each.integers for each in rounded]), torch.cat([each.scales for each in rounded]))


def _round_rows(weights: torch.Tensor, upper: torch.Tensor, stored: Format) -> Rounded:
    """A group's scales are sought when its first column is reached, on what is left to round by then."""
    import torch

    outputs, inputs = weights.shape
    importance = upper.diagonal().reciprocal()
    columns = weights.T.contiguous()  # one column is one row of memory
    integers = torch.empty((inputs, outputs), dtype=torch.int8)
    group = stored.group or inputs
    scales = torch.empty((outputs, inputs // group))
    if stored.group is None:
        scales[:] = search_scales(weights, stored, importance.mul)
    for start in range(0, inputs, _BLOCK):
        stop = min(start + _BLOCK, inputs)
        errors = torch.empty((stop - start, outputs))
        for column in range(start, stop):
            if stored.group is not None and column % group == 0:
                now = columns[column : column + group].T.contiguous()
                weigh = importance[column : column + group].mul
                scales[:, column // group, None] = search_scales(now, stored, weigh)
            scale = scales[:, column // group]
            chosen = round_to(columns[column], scale, stored)
            integers[column] = chosen.to(torch.int8)
            error = columns[column].sub_(chosen * scale).div_(upper[column, column])
            columns[column + 1 : stop].addr_(upper[column, column + 1 : stop], error, alpha=-1)
            errors[column - start] = error
        columns[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    return Rounded(integers.T.contiguous(), scales)


def _inverse_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of the damped Hessian; damped harder until it exists."""
    import torch

    diagonal = hessian.diagonal()
    mean = float(diagonal.mean()) or 1.0
    while True:
        damped = hessian.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            inverse = torch.cholesky_inverse(lower)
            upper: torch.Tensor
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not bool(failed):
                return upper
        damping *= 10
