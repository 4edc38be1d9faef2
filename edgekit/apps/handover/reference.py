"""The reference decoder's answers to a few prompts, which the smoke test compares with the server's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edgekit import Codec, ModelSpec, Recipe, read_codec
from edgekit.apps.handover.fp8 import round_activations, round_cache
from edgekit.apps.handover.int8_inputs import modules_with_int8_inputs, round_inputs
from edgekit.apps.handover.server_plan import ActivationFormat, ServerPlan
from edgekit.common.base import Frozen
from edgekit.common.progress import Progress
from edgekit.quant import reference_decoder

if TYPE_CHECKING:
    import torch

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
)
NEW_TOKENS = 16
# Nats between the two best tokens below which a server's rounding may choose, and between mean log probabilities
TIE, ROUNDED_TIE = 0.25, 0.5
MEAN_DIFFERENCE, ROUNDED_MEAN_DIFFERENCE = 0.05, 0.25
_HELD_BYTES = 1 << 30  # of a model in float32 that is read once


class ReferenceStep(Frozen):
    """One token of the reference and its margin over the second best."""

    token: int
    text: str  # of the answer up to and with this token
    log_probability: float
    margin: float  # between its log probability and the second best's


class ReferenceAnswer(Frozen):
    """A prompt and the reference's greedy answer."""

    prompt: str
    prompt_tokens: tuple[int, ...]
    steps: tuple[ReferenceStep, ...]


class ServerReference(Frozen):
    """The expected answers of a server; nearly tied tokens may differ."""

    model: str  # the name under which the server offers it
    tie: float
    mean_difference: float  # of the log probabilities of equal tokens, at most
    answers: tuple[ReferenceAnswer, ...]


class ServedWeights(Protocol):
    """The weights of a bundle, for the reference decoder."""

    folder: Path  # with the tokenizer
    model: ModelSpec
    recipe: Recipe

    def tensor(self, name: str, rows: slice | None = None) -> torch.Tensor: ...


def input_rounding(
    model: ModelSpec, recipe: Recipe, activation_format: ActivationFormat
) -> Callable[[str, torch.Tensor], None]:
    """Return an observer of linears that rounds their inputs as the server does."""
    in_fp8 = {tensor.module for tensor in model.tensors() if recipe.format_of(tensor).kind == "fp8"}
    in_int8 = modules_with_int8_inputs(model, recipe) if activation_format == "int8" else frozenset()

    def observe(module: str, inputs: torch.Tensor) -> None:
        if module in in_fp8:
            round_activations(module, inputs)
        elif module in in_int8:
            round_inputs(inputs)

    return observe if in_fp8 or in_int8 else reference_decoder.ignore


def reference_answers(weights: ServedWeights, plan: ServerPlan, progress: Progress) -> ServerReference:
    """Decode every prompt greedily with the reference decoder: in float32, inputs rounded as the server rounds them."""
    import torch

    spec, kv_format, ignore = weights.model, plan.kv_format, reference_decoder.ignore
    observe = input_rounding(spec, weights.recipe, plan.activation_format)
    observe_cache = round_cache if kv_format == "fp8" else ignore
    codec = read_codec(weights.folder)
    prompts = [codec.encode(prompt, add_special_tokens=True) for prompt in PROMPTS]
    answers: list[list[ReferenceStep]] = [[] for _ in prompts]
    is_held = 4 * spec.parameters <= _HELD_BYTES
    get_tensor = cache(weights.tensor) if is_held else weights.tensor
    for step in range(NEW_TOKENS):
        progress(step, NEW_TOKENS, "reference answers")
        so_far = [prompt + [each.token for each in given] for prompt, given in zip(prompts, answers, strict=True)]
        # Attention is causal, so padding after a prompt does not change the logits before it.
        longest = max(map(len, so_far))
        batch = torch.tensor([ids + [0] * (longest - len(ids)) for ids in so_far])
        rows = None if is_held else weights.tensor
        logits = reference_decoder.logits(
            spec, get_tensor, batch, get_rows=rows, observe=observe, observe_cache=observe_cache
        )
        for given, ids, scores in zip(answers, so_far, logits, strict=True):
            if not (given and given[-1].token in spec.eos_ids):
                given.append(_step(codec, given, scores[len(ids) - 1]))
    progress(NEW_TOKENS, NEW_TOKENS, "reference answers")
    is_rounded = observe is not ignore or observe_cache is not ignore
    return ServerReference(
        model=spec.name,
        tie=ROUNDED_TIE if is_rounded else TIE,
        mean_difference=ROUNDED_MEAN_DIFFERENCE if is_rounded else MEAN_DIFFERENCE,
        answers=tuple(
            ReferenceAnswer(prompt=text, prompt_tokens=tuple(prompt), steps=tuple(steps))
            for text, prompt, steps in zip(PROMPTS, prompts, answers, strict=True)
        ),
    )


def _step(codec: Codec, given: list[ReferenceStep], scores: torch.Tensor) -> ReferenceStep:
    """Return the best next token with its margin."""
    best = scores.log_softmax(-1).topk(2)
    token = int(best.indices[0])
    return ReferenceStep(
        token=token,
        text=codec.decode([*(each.token for each in given), token]),
        log_probability=float(best.values[0]),
        margin=float(best.values[0] - best.values[1]),
    )
