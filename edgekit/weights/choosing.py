"""How the integers of each part are chosen: one small contract for rounding to nearest, GPTQ and AWQ.

The calibrated ones are sequential: what a layer sees was computed by the layers before it as they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edgekit.model import ModelSpec
from edgekit.recipe import Format, Recipe
from edgekit.weights import awq, decoder
from edgekit.weights.gptq import gptq
from edgekit.weights.moments import Moments, output_error
from edgekit.weights.neutral import Method, dequantised_rows
from edgekit.weights.parts import Choice, Part, Read
from edgekit.weights.rtn import Rounded, dequantise, refuse_unstorable
from edgekit.weights.safetensors import TensorFolder

if TYPE_CHECKING:
    import torch

    from edgekit.weights.calibration import Calibration

_BATCH_TOKENS = 4096


class Chooser(Protocol):
    """Sees the parts in order, each before it is stored and after."""

    def choose(self, part: Part) -> Choice:
        """What to store of a part."""

    def advance(self, part: Part, shard: Path) -> None:
        """The part stands in `shard`, from this run or an earlier one."""


class Nearest:
    """Rounding to nearest: every matrix by itself, block by block."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def choose(self, part: Part) -> Choice:
        return Choice(self._read, {}, {})

    def advance(self, part: Part, shard: Path) -> None:
        pass


class Activations:
    """The hidden states of the calibration text, carried through the stored layers."""

    def __init__(self, model: ModelSpec, recipe: Recipe, calibration: Calibration) -> None:
        self._model, self._recipe, self._calibration = model, recipe, calibration
        self._hidden: torch.Tensor | None = None

    def advance(self, part: Part, shard: Path) -> None:
        """Through a part, as it is stored."""
        import torch

        with TensorFolder.open(shard) as stored, torch.inference_mode():
            if part.layer is None:
                table = next(tensor for tensor in part.tensors if tensor.role == "embedding")
                ids = torch.tensor(self._calibration.sequences)
                seen, where = torch.unique(ids, return_inverse=True)
                rows = dequantised_rows(stored, self._model, table, self._recipe.format_of(table), seen.numpy())
                self._hidden = decoder.embed(self._model, torch.from_numpy(rows)[where])
                return
            tensors = {
                _short(part, tensor.name): torch.from_numpy(
                    dequantised_rows(stored, self._model, tensor, self._recipe.format_of(tensor))
                )
                for tensor in part.tensors
            }
            for batch in self.batches():
                batch.copy_(decoder.layer_forward(self._model, part.layer, tensors, batch))

    def moments(self, part: Part, tensors: Mapping[str, torch.Tensor], linears: frozenset[str]) -> Moments:
        """What each of a layer's linears sees, where its tensors are `tensors`."""
        import torch

        assert part.layer is not None
        moments = Moments(linears)
        with torch.inference_mode():
            for batch in self.batches():
                decoder.layer_forward(self._model, part.layer, tensors, batch, moments)
        return moments

    def batches(self) -> Iterator[torch.Tensor]:
        """Some sequences at a time."""
        import torch

        assert self._hidden is not None, "the embedding comes first"
        return iter(torch.split(self._hidden, max(1, _BATCH_TOKENS // self._hidden.shape[1])))


class Sequential:
    """GPTQ, layer by layer: each layer's Hessians are gathered behind the layers before it as they are stored."""

    def __init__(self, model: ModelSpec, recipe: Recipe, calibration: Calibration, read: Read) -> None:
        self._read, self._recipe = read, recipe
        self._activations = Activations(model, recipe, calibration)

    def choose(self, part: Part) -> Choice:
        if part.layer is None:
            return Choice(self._read, {}, {})
        tensors = {_short(part, tensor.name): self._read(tensor.name) for tensor in part.tensors}
        formats = _quantised(part, self._recipe)
        moments = self._activations.moments(part, tensors, frozenset(formats))
        rounded: dict[str, Rounded] = {}
        errors: dict[str, float] = {}
        for name, stored in formats.items():
            weights, hessian = tensors[f"{name}.weight"], moments.hessian(name)
            refuse_unstorable(weights, stored, f"{part.prefix}{name}.weight")
            chosen = gptq(weights, hessian, stored)
            errors[part.prefix + name] = output_error(weights, dequantise(*chosen), hessian)
            rounded[part.prefix + name] = chosen
        return Choice(self._read, rounded, errors)

    def advance(self, part: Part, shard: Path) -> None:
        self._activations.advance(part, shard)


class ActivationAware:
    """AWQ, layer by layer: factors are folded in, then every matrix is rounded with its inputs in mind."""

    def __init__(self, model: ModelSpec, recipe: Recipe, calibration: Calibration, read: Read) -> None:
        self._model, self._recipe, self._read = model, recipe, read
        self._activations = Activations(model, recipe, calibration)

    def choose(self, part: Part) -> Choice:
        if part.layer is None:
            return Choice(self._read, {}, {})
        tensors = {_short(part, tensor.name): self._read(tensor.name) for tensor in part.tensors}
        formats = _quantised(part, self._recipe)
        moments = self._activations.moments(part, tensors, frozenset(formats))
        inputs = {name: awq.Inputs(moments.size(name), moments.hessian(name)) for name in formats}
        head_dim = self._model.layers[part.layer].head_dim
        for fold in awq.folds_of(self._model, part.layer):
            if not all(name in formats for name in fold.linears):
                continue
            factors = awq.factors_for(fold, tensors, inputs[fold.linears[0]], formats, head_dim)
            awq.fold_in(self._model, fold, tensors, factors, head_dim)
            inputs |= {name: inputs[name].divided(factors) for name in fold.linears}
        rounded: dict[str, Rounded] = {}
        errors: dict[str, float] = {}
        for name, stored in formats.items():
            weights = tensors[f"{name}.weight"]
            refuse_unstorable(weights, stored, f"{part.prefix}{name}.weight")
            rounded[part.prefix + name] = chosen = awq.round_for_outputs(weights, inputs[name].hessian, stored)
            errors[part.prefix + name] = output_error(weights, dequantise(*chosen), inputs[name].hessian)

        def changed(name: str, rows: slice | None = None) -> torch.Tensor:
            found = tensors[_short(part, name)]
            return found if rows is None else found[rows]

        return Choice(changed, rounded, errors)

    def advance(self, part: Part, shard: Path) -> None:
        self._activations.advance(part, shard)


def chooser_for(
    method: Method, model: ModelSpec, recipe: Recipe, calibration: Calibration | None, read: Read
) -> Chooser:
    """The chooser of a method."""
    if calibration is None or method not in ("gptq", "awq"):
        return Nearest(read)
    kind = Sequential if method == "gptq" else ActivationAware
    return kind(model, recipe, calibration, read)


def _short(part: Part, name: str) -> str:
    return name.removeprefix(part.prefix)


def _quantised(part: Part, recipe: Recipe) -> dict[str, Format]:
    """The linears of a layer that are stored as integers, by their names within it."""
    formats = {
        _short(part, tensor.module): recipe.format_of(tensor) for tensor in part.tensors if tensor.role == "linear"
    }
    return {name: stored for name, stored in formats.items() if not stored.is_float}
