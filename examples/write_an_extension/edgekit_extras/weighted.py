"""`--method weighted`: round to the nearest, where an error costs as much as the input that it is multiplied with.

Each group's scale is the one with the least error, weighted by the mean square of each input on the calibration text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekit.quant_methods import CalibratedMethod, IntMatrix, QuantizedPart, WeightPart, round_to_nearest

if TYPE_CHECKING:
    import torch


class Weighted(CalibratedMethod):
    """Rounds a layer's linears one by one."""

    def choose_layer(self, part: WeightPart, layer: int) -> QuantizedPart:
        tensors = {part.short(tensor.name): self.read(tensor.name) for tensor in part.tensors}
        rounded: dict[str, IntMatrix] = {}
        formats = self.formats(part)

        def observe(name: str, inputs: torch.Tensor) -> None:
            if stored := formats.get(name):
                sizes = inputs.flatten(0, -2).square().mean(0).sqrt().clamp(min=1e-12)
                by_group = sizes.view(-1, stored.group or len(sizes))
                rounded[part.prefix + name] = round_to_nearest(tensors[f"{name}.weight"], stored, by_group.mul)

        self.activations.look(part, tensors, observe)
        return QuantizedPart(self.read, rounded, {})
