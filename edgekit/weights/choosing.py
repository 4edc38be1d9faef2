"""How the integers of each part are chosen: one small contract for rounding to nearest, GPTQ and AWQ.

The calibrated ones are sequential: what a layer sees was computed by the layers before it as they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edgekit.model import ModelSpec
from edgekit.recipe import Format, Recipe
from edgekit.weights import awq, decoder
from edgekit.weights.gptq import Hessians, gptq, output_error
from edgekit.weights.neutral import Method, dequantised_rows
from edgekit.weights.parts import Choice, Part, Read, dequantise
from edgekit.weights.rtn import Rounded, refuse_unstorable, round_to_nearest
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


class _EnoughError(Exception):
    """Ends a layer when everything that was wanted has been seen."""


class Activations:
    """The hidden states of the calibration text, carried through the stored layers."""

    def __init__(self, model: ModelSpec, recipe: Recipe, calibration: Calibration) -> None:
        self._model, self._recipe, self._calibration = model, recipe, calibration
        self._hidden: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return sum(len(sequence) for sequence in self._calibration.sequences)

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

    def observe(
        self, part: Part, tensors: Mapping[str, torch.Tensor], observe: decoder.Observe, last: str | None = None
    ) -> None:
        """Show what each linear of a layer sees, where its tensors are `tensors`; up to the linear `last`."""
        import torch

        assert part.layer is not None

        def until(name: str, inputs: torch.Tensor) -> None:
            observe(name, inputs)
            if name == last:
                raise _EnoughError

        with torch.inference_mode():
            for batch in self.batches():
                with suppress(_EnoughError):
                    decoder.layer_forward(self._model, part.layer, tensors, batch, until)

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
        rounded: dict[str, Rounded] = {}
        errors: dict[str, float] = {}
        # What a linear sees depends on those before it, so it is gathered when they are stored already.
        for stage in _stages(formats):
            hessians = Hessians(frozenset(stage))
            self._activations.observe(part, tensors, hessians, last=stage[-1])
            for name in stage:
                weights = tensors[f"{name}.weight"]
                refuse_unstorable(weights, formats[name], f"{part.prefix}{name}.weight")
                chosen = gptq(weights, hessians.of(name), formats[name])
                tensors[f"{name}.weight"] = dequantise(*chosen)
                errors[part.prefix + name] = output_error(weights, tensors[f"{name}.weight"], hessians.of(name))
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
        sample = awq.Sample(frozenset(formats), self._activations.rows)
        self._activations.observe(part, tensors, sample)
        inputs = {name: sample.of(name) for name in formats}
        head_dim = self._model.layers[part.layer].head_dim
        for fold in awq.folds_of(self._model, part.layer):
            if not all(name in formats for name in fold.linears):
                continue
            factors = awq.factors_for(fold, tensors, inputs[fold.linears[0]], formats, head_dim)
            awq.fold_in(self._model, fold, tensors, factors, head_dim)
            for name in fold.linears:
                seen = inputs[name]
                inputs[name] = awq.Inputs(seen.size / factors, seen.square / factors.square(), seen.sample / factors)
        rounded: dict[str, Rounded] = {}
        errors: dict[str, float] = {}
        for name, stored in formats.items():
            weights, seen = tensors[f"{name}.weight"], inputs[name]
            refuse_unstorable(weights, stored, f"{part.prefix}{name}.weight")
            rounded[part.prefix + name] = round_to_nearest(weights, stored, seen.square)
            difference = dequantise(*rounded[part.prefix + name]) - weights
            whole = float((seen.sample @ weights.T).square().sum())
            errors[part.prefix + name] = float((seen.sample @ difference.T).square().sum()) / (whole or 1.0)

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


def _stages(formats: Mapping[str, Format]) -> list[list[str]]:
    """Linears in the order in which a token passes them; those of one stage see the same inputs."""
    order = (
        ("q_proj", "k_proj", "v_proj", "qkv_proj"),
        ("o_proj",),
        ("gate_proj", "up_proj", "gate_up_proj"),
        ("down_proj",),
    )
    stages = [[name for name in formats if name.rpartition(".")[2] in names] for names in order]
    return [stage for stage in stages if stage]
