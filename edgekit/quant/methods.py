"""Quantisation methods under one contract: rounding to nearest, GPTQ, and those that packages add.

The calibrated methods are sequential: the inputs of a layer are computed by the stored layers before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import numpy as np

from edgekit.common.progress import Progress
from edgekit.contracts.neutral import dequantised_rows
from edgekit.contracts.plan import Method
from edgekit.contracts.recipe import Format, Recipe
from edgekit.errors import UnknownName
from edgekit.formats.int_packing import IntegerRows
from edgekit.formats.safetensors import TensorFolder
from edgekit.model.spec import ModelSpec
from edgekit.model.tensors import Tensor
from edgekit.plugins import QUANT_METHODS, added_names, load_added
from edgekit.quant import reference_decoder as decoder
from edgekit.quant.backward import head_name
from edgekit.quant.compute import product_on
from edgekit.quant.gptq import RowRounding, gptq
from edgekit.quant.hessians import output_error, second_moments
from edgekit.quant.rtn import IntMatrix, dequantise, refuse_unstorable, round_to_nearest
from edgekit.quant.sensitivity import float_passes
from edgekit.quant.shards import QuantizedPart, ReadRows, WeightPart, as_array, as_stored, held_as_one

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from edgekit.quant.calibration import Calibration
    from edgekit.quant.reference_decoder import Observe


class QuantMethod(Protocol):
    """Chooses the integers of a model's parts, which it gets in the model's order."""

    def choose(self, part: WeightPart) -> QuantizedPart:
        """Return the integers and floats of a part."""

    def advance(self, part: WeightPart, shard: Path) -> None:
        """Continue after a part that this run or an earlier one stored in `shard`."""


class Rtn:
    """Rounding to nearest: rounds each matrix by itself while it is stored, in blocks of rows."""

    def __init__(self, read: ReadRows) -> None:
        self._read = read

    def choose(self, part: WeightPart) -> QuantizedPart:
        return QuantizedPart(self._read, {}, {})

    def advance(self, part: WeightPart, shard: Path) -> None:
        pass


class QuantJob(NamedTuple):
    """What a calibrated method works on: `read` gives the float model's tensors on `device`, which computes."""

    model: ModelSpec
    recipe: Recipe
    calibration: Calibration
    read: ReadRows
    device: torch.device
    progress: Progress


class Activations:
    """The hidden states of the calibration text after the parts stored so far, computed with their stored weights."""

    def __init__(self, job: QuantJob) -> None:
        self._model, self._recipe, self._calibration, self._device = job.model, job.recipe, job.calibration, job.device
        self._hidden: torch.Tensor | None = None
        self._side_inputs = decoder.SideInputs()
        self._passed = -1  # the number of the last part that was applied

    def advance(self, part: WeightPart, shard: Path) -> None:
        """Pass the hidden states through a stored part, unless `forward` did so while its integers were chosen."""
        import torch

        if self._passed == part.number:
            return
        with TensorFolder.open(shard) as stored:
            if part.layer is None:
                table = next(tensor for tensor in part.tensors if tensor.role == "embedding")
                ids = torch.tensor(self._calibration.sequences).to(self._device)
                seen, where = torch.unique(ids, return_inverse=True)
                self._hidden = decoder.embed(self._model, self._stored(stored, table, seen.cpu().numpy())[where])
                by_name = {tensor.name: tensor for tensor in part.tensors}

                def read(name: str, rows: slice | None = None) -> torch.Tensor:
                    return self._stored(stored, by_name[name], rows)

                self._side_inputs = decoder.layer_inputs(self._model, ids, self._hidden, read)
                return
            tensors = {part.short(tensor.name): self._stored(stored, tensor) for tensor in part.tensors}
            self.forward(part, tensors)

    def _stored(
        self, shard: TensorFolder, tensor: Tensor, rows: slice | NDArray[np.int64] | None = None
    ) -> torch.Tensor:
        """Return a stored tensor, or some of its rows, dequantised."""
        import torch

        stored = self._recipe.format_of(tensor)
        return torch.from_numpy(dequantised_rows(shard, self._model, tensor, stored, rows)).to(self._device)

    def forward(self, part: WeightPart, tensors: Mapping[str, torch.Tensor], observe: Observe = decoder.ignore) -> None:
        """Pass the hidden states through a layer; `observe` may replace a linear before its product."""
        self._hidden = self._through(part, tensors, observe)
        self._passed = part.number

    def look(self, part: WeightPart, tensors: Mapping[str, torch.Tensor], observe: Observe) -> None:
        """Show a layer's inputs to `observe`; the hidden states stay before the layer."""
        self._through(part, tensors, observe)

    def _through(self, part: WeightPart, tensors: Mapping[str, torch.Tensor], observe: Observe) -> torch.Tensor:
        import torch

        assert part.layer is not None and self._hidden is not None, "the embedding comes first"
        with torch.inference_mode():
            hooks = decoder.Hooks(observe, multiply=product_on(self._device))
            return decoder.layer_forward(self._model, part.layer, tensors, self._hidden, hooks, self._side_inputs)


class CalibratedMethod:
    """A method that chooses a layer's integers by the inputs that its linears get on the calibration text.

    Embedding and head are rounded to nearest. Entry points `edgekit.quant_methods` name subclasses, which `--method`
    selects by the name of their entry point.
    """

    rescales: ClassVar[bool] = False  # whether it scales the inputs of linears, so that adapters fit no longer
    note: ClassVar[str] = ""  # for the manifest

    def __init__(self, job: QuantJob) -> None:
        self.model, self.recipe, self.read = job.model, job.recipe, job.read
        self.activations = Activations(job)

    @classmethod
    def refusal(cls, model: ModelSpec) -> str | None:
        """Say why the method cannot serve a model, as in `has experts, …`; None if it can."""
        return None

    def choose_layer(self, part: WeightPart, layer: int) -> QuantizedPart:
        """Return the integers of a layer's linears. Those that are left out are rounded to nearest."""
        raise NotImplementedError

    def choose(self, part: WeightPart) -> QuantizedPart:
        """Return the integers of any part."""
        return QuantizedPart(self.read, {}, {}) if part.layer is None else self.choose_layer(part, part.layer)

    def advance(self, part: WeightPart, shard: Path) -> None:
        self.activations.advance(part, shard)

    def formats(self, part: WeightPart) -> dict[str, Format]:
        """Return the formats of a layer's quantised linears, by their names within the layer."""
        formats = {part.short(each.module): self.recipe.format_of(each) for each in part.tensors if each.is_linear}
        return {name: stored for name, stored in formats.items() if not stored.is_float}


class Gptq(CalibratedMethod):
    """GPTQ in one forward pass: each linear is rounded when the hidden states of the quantised model reach it.

    An expert that fewer tokens reach than it has inputs is rounded to nearest. A head of few bits is rounded by what
    the float model's layers give it, because a table that it shares is stored before them.
    """

    def __init__(self, job: QuantJob) -> None:
        super().__init__(job)
        self._job = job

    def choose(self, part: WeightPart) -> QuantizedPart:
        head = next((tensor for tensor in part.tensors if tensor.name == head_name(self.model)), None)
        if head is None or not (stored := self.recipe.format_of(head)).has_few_bits:
            return super().choose(part)
        rounding = RowRounding.by(head_moments(self._job), stored)

        def rows_of(rows: slice) -> IntegerRows:
            return IntegerRows(*(as_array(each) for each in rounding.rows(self.read(head.name, rows))))

        return QuantizedPart(self.read, {}, {}, kept={head.module: rows_of})

    def choose_layer(self, part: WeightPart, layer: int) -> QuantizedPart:
        formats = self.formats(part)
        together = {part.short(each.module): group for group in held_as_one(part.tensors) for each in group}
        tensors = {part.short(tensor.name): self._read_as_stored(tensor) for tensor in part.tensors}
        experts = {part.short(tensor.module) for tensor in part.tensors if tensor.role == "expert"}
        rounded: dict[str, IntMatrix] = {}
        errors: dict[str, float] = {}

        def round_linear(name: str, inputs: torch.Tensor) -> None:
            """Round a linear, and all linears that read the same inputs, before the first product."""
            if name not in formats or part.prefix + name in rounded:
                return
            if name in experts and inputs.flatten(0, -2).shape[0] < inputs.shape[-1]:
                # The second moments of so few tokens say nothing of most inputs.
                rounded[part.prefix + name] = chosen = round_to_nearest(tensors[f"{name}.weight"], formats[name])
                tensors[f"{name}.weight"] = dequantise(*chosen)
                return
            hessian = second_moments(inputs, part.prefix + name)
            names = [part.short(each.module) for each in together[name]]
            for stored in dict.fromkeys(formats[each] for each in names if each in formats):
                alike = [each for each in names if formats.get(each) == stored]
                weights = [tensors[f"{each}.weight"] for each in alike]
                for each, before, chosen in zip(alike, weights, gptq(weights, hessian, stored), strict=True):
                    after = tensors[f"{each}.weight"] = dequantise(*chosen)
                    errors[part.prefix + each] = output_error(before, after, hessian)
                    rounded[part.prefix + each] = chosen

        self.activations.forward(part, tensors, round_linear)
        return QuantizedPart(self.read, rounded, errors)

    def _read_as_stored(self, tensor: Tensor) -> torch.Tensor:
        """Read a tensor: in full precision if it is to be rounded, otherwise rounded to its stored float type."""
        import torch

        values, stored = self.read(tensor.name), self.recipe.format_of(tensor)
        if not stored.is_float:
            refuse_unstorable(values, stored, tensor.name)
            return values
        as_stored(values.cpu().numpy(), stored, tensor.name)
        return values.to(getattr(torch, stored.kind)).float()


def head_moments(job: QuantJob) -> torch.Tensor:
    """Return the second moments of the head's inputs in the float model, on some of the calibration text."""
    norm = job.read(decoder.last_norm(job.model))
    passes = float_passes(job.model, job.calibration, job.read, job.progress, "head", job.device)
    found = [second_moments(decoder.final_norm(job.model, norm, hidden), "the head") for hidden in passes]
    return sum(found[1:], start=found[0])


def method_names() -> list[str]:
    """Return the names of all installed methods."""
    return sorted({"rtn", "gptq", *added_names(QUANT_METHODS)})


def is_calibrated(method: Method | None) -> bool:
    """Whether a method chooses integers by running the model on calibration text."""
    return method not in (None, "none", "rtn", "kept")


def rescales(method: Method | None) -> bool:
    """Whether a method scales the inputs of linears, so that adapters fit no longer."""
    return method is not None and is_calibrated(method) and find_method(method).rescales


def find_method(name: Method) -> type[CalibratedMethod]:
    """Return the calibrated method of this name."""
    methods = {**load_added(QUANT_METHODS), "gptq": Gptq}
    if name not in methods:
        raise UnknownName("method", name, method_names())
    found: type[CalibratedMethod] = methods[name]
    return found
