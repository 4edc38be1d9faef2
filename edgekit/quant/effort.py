"""The effort of quantisation: its calibration text, and the time and memory that it takes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from edgekit.contracts.recipe import budget_bytes
from edgekit.errors import InvalidInput
from edgekit.model.tensors import Tensor
from edgekit.quant.backward import PIECES, head_name, sequences_at_once
from edgekit.quant.calibration import LENGTH, SEQUENCES
from edgekit.quant.compute import product_on
from edgekit.quant.methods import is_calibrated
from edgekit.quant.reference_decoder import HEAD_ROWS, product
from edgekit.quant.sensitivity import SCORED_TOKENS
from edgekit.quant.shards import held_as_one, largest_layer_bytes

if TYPE_CHECKING:
    from edgekit.contracts.plan import Method
    from edgekit.contracts.recipe import Recipe
    from edgekit.model.source import ModelSource
    from edgekit.model.spec import ModelSpec
    from edgekit.quant.reference_decoder import Multiply

Effort = Literal["quick", "normal"]
DEFAULT_TEXT = "default"  # the bundled corpus
CALIBRATED_WITHIN_S = 900.0  # the longest calibration that takes place without being asked for
_USUALLY_CALIBRATED = 600_000_000  # most parameters: calibrating them takes less than a quarter of an hour
_SCORING_PASSES = 3.5  # cost of predicting losses, in forward passes
# Measured over layers of 1,024 inputs: what is no product (attention, norms, a softmax over the vocabulary) stays in
# float32 where products are faster, and numpy's half of a symmetric product takes longer than half of torch's.
_CONVERTING, _NO_PRODUCTS, _SOFTMAX, _HALF_PRODUCT = 1.3, 1.2, 1.5, 0.85
_FACTORING = 1.5  # of a product of all inputs: the Hessian's factor and its inverse
_LOOP_WEIGHTS_PER_S = 8e6  # GPTQ's column loop, which has one thread
_ROUNDED_LAYERS = 3  # of floats: as read, in the order of rounding, and as stored
_RESIDUALS, _INNER = 15, 4  # arrays of a token in a layer: of the residual, and of the feed-forward
_MOMENTS = 5  # the second moments of a linear's inputs, ordered, damped, factored, inverted, and LAPACK's copies
_AT_HEAD = 4  # arrays of a token at the head: of a block of its rows, and of the residual
_SAVED_RESIDUALS, _SAVED_INNER = 12, 8  # arrays of a token that a layer keeps for its backward pass
_TRIALS = 20  # products that are timed; the first also prepares the library's kernels


def calibration_text(
    calibrate: str | Path | None,
    method: Method | None,
    effort: Effort | None,
    source: ModelSource,
    recipes: Iterable[Recipe],
) -> str | Path | None:
    """Return the calibration text that the options request; None for rounding to nearest without text.

    Without any option, a decoder in four bits is calibrated on the bundled text, where torch is installed and that
    takes at most a quarter of an hour on this machine.
    """
    if effort == "quick" and (calibrate is not None or is_calibrated(method)):
        given = "--calibrate" if calibrate is not None else f"--method {method}"
        raise InvalidInput(f"--effort quick rounds without calibration text; leave out {given} or --effort")
    if calibrate is not None:
        return calibrate
    if method == "rtn" or effort == "quick":
        return None
    if method is None and effort is None:
        if source.spec.encoder or why_rounded(source, effort) or not any(each.has_few_bits for each in recipes):
            return None
        return DEFAULT_TEXT if estimated_seconds(source.spec) <= CALIBRATED_WITHIN_S else None
    return DEFAULT_TEXT


def usual_method(model: ModelSpec, recipe: Recipe) -> Method:
    """Return the method by which an export without options chooses integers, on a usual machine."""
    is_calibrated = model.parameters <= _USUALLY_CALIBRATED and not model.encoder
    return "gptq" if is_calibrated and recipe.has_few_bits and recipe.keeps is None else "rtn"


def why_rounded(source: ModelSource, effort: Effort | None) -> str | None:
    """Return why no text can choose integers or a mixture of formats here; None if it can.

    Then the default is a recipe that rounding alone makes, in seconds: 8 bits if they fit. `run`, `chat` and `serve`
    ask for that.
    """
    if effort == "quick":
        return "is left out by effort quick"
    if not (source.folder / "tokenizer.json").is_file():
        return "needs the model's tokenizer.json"
    return "needs torch: pip install 'edgekit[quantize]'" if find_spec("torch") is None else None


def estimated_seconds(spec: ModelSpec, tokens: int = SEQUENCES * LENGTH) -> float:
    """Predict how long gptq takes here; of experts, those that a token reads count."""
    import torch

    share = spec.experts.active / spec.experts.count if spec.experts else 1.0  # of the tokens, which an expert gets

    def tokens_of(tensor: Tensor) -> float:
        return share if tensor.role == "expert" else 1.0

    linears = [tensor for tensor in spec.tensors() if tensor.is_linear]
    products = sum(tensor.size * tokens_of(tensor) for tensor in linears)
    groups = [group[0] for group in held_as_one(linears)]
    moments = sum(tensor.shape[1] ** 2 * tokens_of(tensor) for tensor in groups)
    factors = sum(tensor.shape[1] ** 3 for tensor in groups)
    errors = 2 * sum(tensor.size * tensor.shape[1] for tensor in linears)  # of the outputs, by the Hessian
    scored = min(tokens, SCORED_TOKENS)
    multiplying = 2.0 * (tokens + scored * _SCORING_PASSES) * products
    # Moments and factors once to predict what GPTQ leaves, and once for GPTQ itself.
    others = 2.0 * ((tokens + scored) * moments * _HALF_PRODUCT + 2 * _FACTORING * factors + errors)
    others += 2.0 * _SOFTMAX * scored * 2 * spec.vocab_size * spec.hidden_size
    computing = multiplying * _CONVERTING / _speed(product_on(torch.device("cpu")))
    computing += (multiplying * _NO_PRODUCTS + others) / _speed(product)
    weights = sum(tensor.size for tensor in linears)
    return computing + weights / _LOOP_WEIGHTS_PER_S


def calibration_bytes(model: ModelSpec, recipe: Recipe, tokens: int) -> int:
    """Return the most bytes of choosing integers on `tokens`: by GPTQ, and by passes of the float model.

    Those predict losses where a budget is spent, and give the inputs of a head of few bits.
    """
    hidden, inner = model.hidden_size, max(layer.intermediate_size or model.intermediate_size for layer in model.layers)
    most, kept = tokens * (_RESIDUALS * hidden + _INNER * inner) + _MOMENTS * inner**2, 0
    few = any(recipe.format_of(each).has_few_bits for each in model.tensors() if each.name == head_name(model))
    if few or budget_bytes(recipe, model) is not None:
        at_once = sequences_at_once(model, LENGTH)
        scored = min(tokens, SCORED_TOKENS, PIECES * at_once * LENGTH)
        head = _AT_HEAD * (HEAD_ROWS + hidden)
        backward = _SAVED_RESIDUALS * hidden + _SAVED_INNER * inner
        most = max(most, min(scored, at_once * LENGTH) * max(head, backward) + _MOMENTS * inner**2)
        kept = scored * hidden * (len(model.layers) + 1)  # the inputs of all layers, whose space the heap keeps
    return _ROUNDED_LAYERS * largest_layer_bytes(model) + 4 * (kept + most)


@cache
def _speed(multiply: Multiply) -> float:
    """Return the operations a second of one product: the fastest of a few, since other programs delay single ones."""
    import torch

    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)

    def seconds() -> float:
        begun = time.perf_counter()
        multiply(left, right)
        return time.perf_counter() - begun

    return 2.0 * 1024**3 / min(seconds() for _ in range(_TRIALS))


def in_words(seconds: float) -> str:
    """Round a duration to words such as `40 seconds`, `3 minutes` or `1.5 hours`."""
    if seconds < 90:
        return f"{max(10, round(seconds, -1)):.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
