"""What the linears of a layer saw on the calibration text: the mean size and the second moments of their inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Moments:
    """Gathers them while a layer runs; linears with one input share one sum."""

    def __init__(self, wanted: frozenset[str]) -> None:
        self._wanted = wanted
        self._first: dict[str, str] = {}  # linear → the first that saw the same inputs
        self._hessians: dict[str, torch.Tensor] = {}
        self._sizes: dict[str, torch.Tensor] = {}
        self._rows: dict[str, int] = {}
        self._last: tuple[str, torch.Tensor] | None = None

    def __call__(self, name: str, inputs: torch.Tensor) -> None:
        if name not in self._wanted:
            return
        if self._last is not None and self._last[1] is inputs:
            self._first[name] = self._first[self._last[0]]
            return
        self._last, self._first[name] = (name, inputs), name
        rows = inputs.reshape(-1, inputs.shape[-1])
        if name in self._hessians:
            self._hessians[name].addmm_(rows.T, rows)
            self._sizes[name] += rows.abs().sum(0)
            self._rows[name] += len(rows)
        else:
            self._hessians[name] = rows.T @ rows
            self._sizes[name] = rows.abs().sum(0)
            self._rows[name] = len(rows)

    def hessian(self, name: str) -> torch.Tensor:
        """Inputs times inputs, summed over all that the linear saw; shared, not to be changed."""
        return self._hessians[self._first[name]]

    def size(self, name: str) -> torch.Tensor:
        """The mean size of each input."""
        first = self._first[name]
        return self._sizes[first] / self._rows[first]


def lost_outputs(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    """The squared outputs that a difference of the weights makes, on the text that the Hessian was gathered on."""
    return max(0.0, float(((difference @ hessian) * difference).sum()))


def output_error(weights: torch.Tensor, stored: torch.Tensor, hessian: torch.Tensor) -> float:
    """Squared error of the outputs over the squared outputs."""
    whole = lost_outputs(weights, hessian)
    return lost_outputs(stored - weights, hessian) / whole if whole else 0.0
