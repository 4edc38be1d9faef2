"""The private memory of choosing integers on calibration text. Pure arithmetic: the arrays that are alive at a time."""

from __future__ import annotations

from edgekit.common.units import MIB
from edgekit.contracts.recipe import Recipe, budget_bytes
from edgekit.model.spec import ModelSpec
from edgekit.quant.backward import PIECES, sequences_at_once
from edgekit.quant.calibration import LENGTH
from edgekit.quant.reference_decoder import HEAD_ROWS
from edgekit.quant.sensitivity import SCORED_TOKENS

TORCH_BYTES = 125 * MIB  # of its import and first product: measured on x86-64 Linux
_FLOAT = 4
_LAYERS = 3  # of floats: as read, in the order of rounding, and as stored
_RESIDUALS, _INNER = 15, 4  # arrays of a token in a layer: of the residual, and of the feed-forward
_MOMENTS = 5  # the second moments of a linear's inputs, ordered, damped, factored, inverted, and LAPACK's copies
_HEAD = 4  # arrays of a token at the head: of a block of its rows, and of the residual
_SAVED_RESIDUALS, _SAVED_INNER = 12, 8  # arrays of a token that a layer keeps for its backward pass


def largest_layer_bytes(model: ModelSpec) -> int:
    """Return the bytes of the largest layer in float32."""
    prefix, sizes = f"{model.prefix}layers.", [0] * len(model.layers)
    for tensor in model.tensors():
        if tensor.name.startswith(prefix):
            sizes[int(tensor.name.removeprefix(prefix).partition(".")[0])] += tensor.size * _FLOAT
    return max(sizes)


def calibration_bytes(model: ModelSpec, recipe: Recipe, tokens: int) -> int:
    """Return the most bytes of choosing integers on `tokens`: by GPTQ, and by sensitivity where a budget is spent."""
    hidden, inner = model.hidden_size, max(layer.intermediate_size or model.intermediate_size for layer in model.layers)
    most, kept = tokens * (_RESIDUALS * hidden + _INNER * inner) + _MOMENTS * inner**2, 0
    if budget_bytes(recipe, model) is not None:
        at_once = sequences_at_once(model, LENGTH)
        scored = min(tokens, SCORED_TOKENS, PIECES * at_once * LENGTH)
        head = _HEAD * (HEAD_ROWS + hidden)
        backward = _SAVED_RESIDUALS * hidden + _SAVED_INNER * inner
        most = max(most, min(scored, at_once * LENGTH) * max(head, backward))
        kept = scored * hidden * (len(model.layers) + 1)  # the inputs of all layers, whose space the heap keeps
    return _LAYERS * largest_layer_bytes(model) + (kept + most) * _FLOAT
