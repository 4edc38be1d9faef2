"""GPTQ: rounds column by column; later columns compensate for the rounding error of earlier ones.

Errors are weighted by the Hessian of the outputs on calibration text, the second moments of the inputs. Groups are
rounded in descending order of activation, and so are the columns of a group, because an early column has the most
columns left to compensate for it. Groups, scales and integers keep their order in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from edgekit.contracts.recipe import Format
from edgekit.quant.rtn import IntMatrix, bounds, search_scales

if TYPE_CHECKING:
    import torch

DAMPING = 0.05  # share of the mean diagonal: keeps rare inputs from dominating the updates
_BLOCK = 128  # columns between two updates of all that follow; a multiple of every group
_SAMPLED_COLUMNS = 256  # to predict what GPTQ leaves


def gptq(matrices: Sequence[torch.Tensor], hessian: torch.Tensor, stored: Format) -> list[IntMatrix]:
    """Return integers and scales of `matrices` [out, in] that read the same inputs, whose Hessian is [in, in]."""
    import torch

    rounded = RowRounding.by(hessian, stored).rows(torch.cat(list(matrices)))
    sizes = [len(matrix) for matrix in matrices]
    parts = zip(torch.split(rounded.integers, sizes), torch.split(rounded.scales, sizes), strict=True)
    return [IntMatrix(*each) for each in parts]


class RowRounding(NamedTuple):
    """Rounds rows of a matrix, which do not depend on each other, by the Hessian of its inputs."""

    groups: torch.Tensor
    order: torch.Tensor
    upper: torch.Tensor  # factor of the inverse Hessian, in that order
    stored: Format

    @classmethod
    def by(cls, hessian: torch.Tensor, stored: Format) -> RowRounding:
        groups, order = activation_order(hessian, stored.group or len(hessian))
        return cls(groups, order, _inverse_factor(hessian[order][:, order]), stored)

    def rows(self, weights: torch.Tensor) -> IntMatrix:
        """Return integers and scales of rows [out, in], in the order of the file."""
        chosen = _round_rows(weights[:, self.order], self.upper, self.stored)
        chosen.integers[:, self.order], chosen.scales[:, self.groups] = chosen.integers.clone(), chosen.scales.clone()
        return chosen


def shares_left(
    chosen_by: torch.Tensor, judged_by: torch.Tensor, squared: Sequence[torch.Tensor], stored: Format
) -> list[float]:
    """Predict for matrices that read the same inputs the share of their losses by rounding that GPTQ leaves.

    GPTQ has the Hessian `chosen_by`; the losses are those on other text, with the Hessian `judged_by`. `squared` are
    the mean squared errors of each matrix's columns [in]. What a column's error and the columns that compensate for it
    cost together is known before any column is rounded.
    """
    import torch

    rounding = RowRounding.by(chosen_by, stored)
    some = torch.linspace(0, len(chosen_by) - 1, min(len(chosen_by), _SAMPLED_COLUMNS)).long().to(chosen_by.device)
    compensated = rounding.upper[some] / rounding.upper.diagonal()[some, None]
    judged, columns = judged_by[rounding.order][:, rounding.order], rounding.order[some]
    left, nearest = ((compensated @ judged) * compensated).sum(-1), judged.diagonal()[some]
    losses = [(float(left @ each[columns]), float(nearest @ each[columns])) for each in squared]
    return [after / before if before else 1.0 for after, before in losses]


def activation_order(hessian: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the groups, and all columns group by group, in descending order of their inputs' second moments."""
    sizes = hessian.diagonal().reshape(-1, group)
    groups = sizes.mean(-1).argsort(descending=True, stable=True)
    within = sizes.argsort(dim=-1, descending=True, stable=True)
    return groups, (groups[:, None] * group + within[groups]).flatten()


def _round_rows(weights: torch.Tensor, upper: torch.Tensor, stored: Format) -> IntMatrix:
    """Round columns from left to right; search a group's scales at its first column, on the updated weights."""
    import torch

    (outputs, inputs), (low, high) = weights.shape, bounds(stored)
    importance = upper.diagonal().reciprocal()
    columns = weights.T.contiguous()  # one column is one row of memory
    integers = torch.empty((inputs, outputs), dtype=torch.int8, device=weights.device)
    group = stored.group or inputs
    scales = torch.empty((inputs // group, outputs), device=weights.device)
    for start in range(0, inputs, _BLOCK):
        stop = min(start + _BLOCK, inputs)
        errors = torch.empty((stop - start, outputs), device=weights.device)
        with _one_thread():
            for column in range(start, stop):
                if column % group == 0:
                    now = columns[column : column + group].T.contiguous()
                    found = search_scales(now, stored, importance[column : column + group].mul)
                    scale = scales[column // group].copy_(found.squeeze(-1))
                    inverse = scale.reciprocal()
                # Few operations a column: each takes as long to call as to compute.
                chosen = (columns[column] * inverse).round_().clamp_(low, high)
                integers[column] = chosen
                error = torch.addcmul(columns[column], chosen, scale, value=-1, out=errors[column - start])
                error.mul_(importance[column])
                columns[column + 1 : stop].addr_(upper[column, column + 1 : stop], error, alpha=-1)
        columns[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    return IntMatrix(integers.T.contiguous(), scales.T.contiguous())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread of torch: several wait for each other after each small operation, long on busy cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of the damped Hessian; damp harder until it exists."""
    import torch

    damping, mean = DAMPING, float(hessian.diagonal().mean()) or 1.0
    while True:
        damped = hessian.clone()
        damped.diagonal().add_(damping * mean)
        # In reverse order the factor is an upper one, whose inverse this is. That of the whole takes ten times as long.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not bool(failed):
            ones = torch.eye(len(damped), device=damped.device)
            upper: torch.Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), ones, upper=True)
            return upper
        damping *= 10
