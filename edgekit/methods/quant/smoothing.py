"""SmoothQuant for loud channels of inputs, so that rounding inputs to 8 bits a token loses less.

One scale serves all inputs of a token, and the largest channel sets it. A factor for each loud channel moves the excess
into the weights: the norm before q, k, v or gate and up, or `up` before `down`, is divided by it, and the columns that
read the channel are multiplied by it. The float model computes the same.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgekit.common.files import write_file
from edgekit.common.progress import Progress
from edgekit.methods.quant.folds import Fold, folds_of
from edgekit.quant_methods import Calibration, ModelSpec, ReadRows, Recipe, float_passes

if TYPE_CHECKING:
    import torch

    Factors = Mapping[str, torch.Tensor]  # of a fold's inputs, by the first module that reads them

LOUD = 3.0  # a channel is loud if its largest input is more than three times the median channel's
POWER = 0.7  # its factor is the excess to this power
_FACTORS = ".smoothing.npz"


def smoothed_reader(
    recipe: Recipe,
    model: ModelSpec,
    calibration: Calibration,
    read: ReadRows,
    folder: Path,
    progress: Progress,
    device: torch.device | None = None,
) -> ReadRows:
    """Return a reader of the smoothed model. Its factors are kept in `folder`, where a resumed run finds them."""
    path = folder / _FACTORS
    if not path.exists():
        _save(path, smoothing_factors(recipe, model, calibration, read, progress, device))
    return smoothed(read, _load(path, device), recipe, model)


def smoothing_factors(
    recipe: Recipe,
    model: ModelSpec,
    calibration: Calibration,
    read: ReadRows,
    progress: Progress,
    device: torch.device | None = None,
) -> Factors:
    """Return the factors of every fold, from a forward pass of the float model over some of the calibration text."""
    import torch

    folds = dict(_folds(recipe, model))
    largest: dict[str, torch.Tensor] = {}

    def observe(module: str, inputs: torch.Tensor) -> None:
        if module in folds:
            found = inputs.abs().flatten(0, -2).amax(0)
            largest[module] = torch.maximum(largest.get(module, found), found)

    for _ in float_passes(model, calibration, read, progress, "smoothing", device, observe):
        pass
    return {module: _factors(largest[module]) for module in folds}


def _factors(largest: torch.Tensor) -> torch.Tensor:
    """Return factors above one for channels that are larger than most, one for all others.

    A factor makes the weights of its group coarser, so the rest stay as they are.
    """
    usual = max(float(largest.median()), 1e-6 * float(largest.max()), 1e-12)
    return (largest / (LOUD * usual)).clamp(min=1.0).pow(POWER)


def _folds(recipe: Recipe, model: ModelSpec) -> Iterator[tuple[str, Fold]]:
    """Yield the folds into norms and into `up`, by the first module that reads their inputs.

    `o_proj` loses next to nothing, and the experts of a layer share their norm with a router, which stays.
    """
    formats = {tensor.module: recipe.format_of(tensor) for tensor in model.tensors() if tensor.is_linear}
    for index, layer in enumerate(model.layers):
        if layer.experts:
            continue
        prefix = f"{model.prefix}layers.{index}."
        for fold in folds_of(model, index):
            is_smoothed = fold.rows is None or fold.linears == (model.names.down,)
            if is_smoothed and not any(formats[prefix + name].is_float for name in fold.linears):
                yield prefix + fold.linears[0], fold


def smoothed(read: ReadRows, factors: Factors, recipe: Recipe, model: ModelSpec) -> ReadRows:
    """Return a reader of the same model with its factors folded in."""
    import torch

    columns: dict[str, torch.Tensor] = {}
    divisors: dict[str, torch.Tensor] = {}  # of a matrix's rows, and of the values of a bias or norm
    norms: set[str] = set()
    shapes = {tensor.name: tensor.shape for tensor in model.tensors()}
    for module, fold in _folds(recipe, model):
        prefix, factor = module.removesuffix(fold.linears[0]), factors[module]
        columns |= {f"{prefix}{name}.weight": factor for name in fold.linears}
        if fold.rows is None:
            divisors[f"{prefix}{fold.source}.weight"] = factor
            norms.add(f"{prefix}{fold.source}.weight")
            continue
        for name in (f"{prefix}{fold.source}.weight", f"{prefix}{fold.source}.bias"):
            if name in shapes:
                divisors[name] = torch.ones(shapes[name][0], dtype=factor.dtype, device=factor.device)
                divisors[name][fold.rows] = factor

    def read_smoothed(name: str, rows: slice | None = None) -> torch.Tensor:
        values = read(name, rows)
        if name in columns:
            values = values * columns[name]
        if name not in divisors:
            return values
        divisor = divisors[name] if rows is None else divisors[name][rows]
        if name in norms:
            offset = 1.0 if model.norm_offset else 0.0
            return (values + offset) / divisor - offset
        return values / divisor.view(-1, *[1] * (values.ndim - 1))

    return read_smoothed


def _save(path: Path, factors: Factors) -> None:
    held = io.BytesIO()
    np.savez(held, **{module: factor.cpu().numpy() for module, factor in factors.items()})  # type: ignore[arg-type]
    write_file(path, held.getvalue())


def _load(path: Path, device: torch.device | None) -> Factors:
    import torch

    with np.load(path, allow_pickle=False) as held:
        return {module: torch.from_numpy(held[module]).to(device) for module in held.files}
