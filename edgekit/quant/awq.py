"""AWQ: scales large inputs down and the weights that read them up, so that those weights are rounded more finely.

Factors are used only where they can be folded exactly: into a norm before q, k, v or gate and up, into v before o,
into up before down. They are powers of the inputs' mean size; the power with the least error on calibration text wins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from edgekit.contracts.recipe import Format
from edgekit.model.spec import ModelSpec
from edgekit.quant.hessians import lost_outputs
from edgekit.quant.rtn import IntMatrix, dequantise, round_to_nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

DAMPING = 1e-3
POWERS = tuple(step / 10 for step in range(11))


class Fold(NamedTuple):
    """Linears that read the same inputs, and the rows of the tensor that produces those inputs."""

    linears: tuple[str, ...]
    source: str
    rows: slice | None  # rows of the source's matrix; None: the source is a norm
    repeats: int = 1  # heads that share one head of values


def folds_of(spec: ModelSpec, index: int) -> list[Fold]:
    """Return every pair of linears and source in a layer through which factors can be folded."""
    layer, names = spec.layers[index], spec.names
    groups = spec.heads // layer.kv_heads
    queries, keys, _ = spec.qkv_widths(layer)
    before_attention, _, before_feed, _ = spec.layer_norms()
    size = layer.intermediate_size or spec.intermediate_size
    if spec.fused_qkv:
        readers: tuple[str, ...] = ("self_attn.qkv_proj",)
        values = Fold((names.output,), "self_attn.qkv_proj", slice(queries + keys, queries + 2 * keys), groups)
    else:
        readers = tuple(f"self_attn.{name}" for name in layer.projections)
        values = Fold((names.output,), "self_attn.v_proj", slice(0, keys), groups)
    if spec.fused_gate_up:
        gates: tuple[str, ...] = ("mlp.gate_up_proj",)
        up = Fold((names.down,), "mlp.gate_up_proj", slice(size, 2 * size))
    else:
        gates = (names.gate, names.up) if spec.gated else (names.up,)
        up = Fold((names.down,), names.up, slice(0, size))
    if layer.conv_taps:
        # Fold into the second gate: `out_proj` reads a product with these rows of `in_proj`.
        hidden = spec.hidden_size
        readers, values = ("conv.in_proj",), Fold(("conv.out_proj",), "conv.in_proj", slice(hidden, 2 * hidden))
    if layer.delta_rule:
        readers = tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a"))
    together = spec.parallel  # attention and feed-forward read one norm
    norms = (
        [((*readers, *gates), before_attention)] if together else [(readers, before_attention), (gates, before_feed)]
    )
    of_norms = [Fold(linears, norm, None) for linears, norm in norms if norm is not None]
    # `out_proj` of a delta rule has no source to fold into: all heads share the weight of the norm before it. Nor
    # do values that are normalised or come from another layer.
    has_source = not (layer.delta_rule or spec.value_norm)
    of_values = [values] if has_source else []
    # An activation without a gate bends what would be folded into its input.
    return [*of_norms[:1], *of_values, *of_norms[1:], *([up] if spec.gated else [])]


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
