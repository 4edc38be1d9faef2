"""Statistics of a linear's inputs on calibration text, and the output errors computed from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekit.errors import InvalidInput

if TYPE_CHECKING:
    import torch


def second_moments(inputs: torch.Tensor, module: str = "a matrix") -> torch.Tensor:
    """Return the sum [in, in] of the outer products of `inputs` [..., in], each divided by the token's length (L2).

    Some tokens have inputs thousands of times as large as others. Without the division they alone would decide.
    Raises `InvalidInput`, which names the `module` that reads them, unless all are finite.
    """
    import torch

    rows = inputs.flatten(0, -2)
    sizes = rows.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    values = rows / sizes.sqrt()
    if values.device.type != "cpu":
        moments = torch.mm(values.T, values)
    else:
        array = values.numpy()
        moments = torch.from_numpy(array.T @ array)  # numpy computes one half of a symmetric product, torch both
    if not bool(moments.diagonal().isfinite().all()):
        raise InvalidInput(f"{module}: its inputs on the calibration text are not finite")
    return moments


def lost_outputs(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    """Return the squared change of the outputs on the calibration text when the weights change."""
    return max(0.0, float(((difference @ hessian) * difference).sum()))


def output_error(weights: torch.Tensor, stored: torch.Tensor, hessian: torch.Tensor) -> float:
    """Return the squared error of the outputs over the squared outputs."""
    whole = lost_outputs(weights, hessian)
    return lost_outputs(stored - weights, hessian) / whole if whole else 0.0
