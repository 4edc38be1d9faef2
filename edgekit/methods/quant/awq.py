"""AWQ: scales large inputs down and the weights that read them up, so that those weights are rounded more finely.

Factors are used only where they can be folded exactly: into a norm before q, k, v or gate and up, into v before o,
into up before down. They are powers of the inputs' mean size; the power with the least error on calibration text wins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from edgekit.methods.quant.folds import Fold, folds_of
from edgekit.quant_methods import (
    CalibratedMethod,
    Format,
    IntMatrix,
    ModelSpec,
    QuantizedPart,
    WeightPart,
    dequantise,
    lost_outputs,
    output_error,
    refuse_unstorable,
    round_to_nearest,
    second_moments,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

DAMPING = 1e-3
POWERS = tuple(step / 10 for step in range(11))


class Awq(CalibratedMethod):
    """Layer by layer: folds factors in, then rounds every matrix by the statistics of its inputs."""

    rescales = True

    @classmethod
    def refusal(cls, model: ModelSpec) -> str | None:
        return "has experts, into whose router awq folds nothing" if model.experts else None

    def choose_layer(self, part: WeightPart, layer: int) -> QuantizedPart:
        tensors = {part.short(tensor.name): self.read(tensor.name) for tensor in part.tensors}
        formats = self.formats(part)
        inputs: dict[str, Inputs] = {}
        last: tuple[torch.Tensor, Inputs] | None = None

        def observe(name: str, values: torch.Tensor) -> None:
            nonlocal last
            if last is None or last[0] is not values:
                last = values, Inputs(values.flatten(0, -2).abs().mean(0), second_moments(values))
            inputs[name] = last[1]

        self.activations.look(part, tensors, observe)
        head_dim = self.model.layers[layer].head_dim
        for fold in folds_of(self.model, layer):
            if not all(name in formats for name in fold.linears):
                continue
            factors = factors_for(fold, tensors, inputs[fold.linears[0]], formats, head_dim)
            fold_in(self.model, fold, tensors, factors, head_dim)
            inputs |= {name: inputs[name].divided(factors) for name in fold.linears}
        rounded: dict[str, IntMatrix] = {}
        errors: dict[str, float] = {}
        for name, stored in formats.items():
            weights = tensors[f"{name}.weight"]
            refuse_unstorable(weights, stored, f"{part.prefix}{name}.weight")
            rounded[part.prefix + name] = chosen = round_for_outputs(weights, inputs[name].hessian, stored)
            errors[part.prefix + name] = output_error(weights, dequantise(*chosen), inputs[name].hessian)

        def changed(name: str, rows: slice | None = None) -> torch.Tensor:
            tensor = tensors[part.short(name)]
            return tensor if rows is None else tensor[rows]

        return QuantizedPart(changed, rounded, errors)


class Inputs(NamedTuple):
    """Statistics of a linear's inputs: the mean absolute value of each, and the second moments."""

    size: torch.Tensor
    hessian: torch.Tensor

    def divided(self, factors: torch.Tensor) -> Inputs:
        """Return the statistics after each input was divided by its factor."""
        return Inputs(self.size / factors, self.hessian / factors / factors[:, None])


def factors_for(
    fold: Fold, tensors: Mapping[str, torch.Tensor], inputs: Inputs, formats: Mapping[str, Format], head_dim: int
) -> torch.Tensor:
    """Return the factors of the inputs that give the least error of the outputs. Leaving all at 1 is a candidate."""
    import torch

    size = average_over_heads(inputs.size, fold.repeats, head_dim)
    size = size.clamp(min=1e-6 * float(size.max()) + 1e-12)
    best, least = torch.ones_like(size), float("inf")
    for power in POWERS:
        factors = size.pow(power)
        factors = factors / (factors.max() * factors.min()).sqrt()
        lost = 0.0
        for name in fold.linears:
            weights = tensors[f"{name}.weight"]
            rounded = round_for_outputs(weights * factors, inputs.divided(factors).hessian, formats[name])
            lost += lost_outputs(dequantise(*rounded) / factors - weights, inputs.hessian)
        if lost < least:
            best, least = factors, lost
    return best


def round_for_outputs(weights: torch.Tensor, hessian: torch.Tensor, stored: Format) -> IntMatrix:
    """Round to nearest, with the scale of each group that gives the least error in the outputs."""
    import torch

    group = stored.group
    if group is None:
        return round_to_nearest(weights, stored, hessian.diagonal().sqrt().mul)
    count = len(hessian) // group
    own = hessian.reshape(count, group, count, group).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    damping = DAMPING * own.diagonal(dim1=1, dim2=2).mean(-1).clamp(min=1e-12)
    factor = torch.linalg.cholesky(own + damping[:, None, None] * torch.eye(group, device=own.device))

    def weigh(errors: torch.Tensor) -> torch.Tensor:
        return torch.bmm(errors.transpose(0, 1), factor).transpose(0, 1)

    return round_to_nearest(weights, stored, weigh)


def average_over_heads(size: torch.Tensor, repeats: int, head_dim: int) -> torch.Tensor:
    """Average the mean sizes over the query heads that share one value head."""
    if repeats == 1:
        return size
    heads = size.reshape(-1, repeats, head_dim)
    return heads.mean(1, keepdim=True).expand(-1, repeats, -1).reshape(-1)


def fold_in(
    spec: ModelSpec, fold: Fold, tensors: dict[str, torch.Tensor], factors: torch.Tensor, head_dim: int
) -> None:
    """Scale the linears' columns up and the source of their inputs down; the layer's output stays the same."""
    for name in fold.linears:
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] * factors
    source = f"{fold.source}.weight"
    if fold.rows is None:
        offset = 1.0 if spec.norm_offset else 0.0
        tensors[source] = (tensors[source] + offset) / factors - offset
        return
    if fold.repeats > 1:
        factors = factors.reshape(-1, fold.repeats, head_dim)[:, 0].reshape(-1)
    tensors[source] = tensors[source].clone()
    tensors[source][fold.rows] /= factors[:, None]
    bias = f"{fold.source}.bias"
    if bias in tensors:
        tensors[bias] = tensors[bias].clone()
        tensors[bias][fold.rows] /= factors
