"""The reference decoder's answers to a few prompts, which the smoke test compares with the server's."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from edgekit import Codec, NeutralWeights, read_codec, reference_logits
from edgekit.apps.handover.server_plan import ServerPlan
from edgekit.common.base import Frozen
from edgekit.common.progress import Progress

if TYPE_CHECKING:
    import torch

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
)
NEW_TOKENS = 16
# Nats between the two best tokens below which a server's rounding may choose, and between mean log probabilities;
# the second of each: with a cache in FP8
TIE, ROUNDED_TIE = 0.25, 0.5
MEAN_DIFFERENCE, ROUNDED_MEAN_DIFFERENCE = 0.05, 0.25
_LARGEST_FP8 = 448.0  # of E4M3
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


def tensor_of(weights: NeutralWeights, name: str, rows: slice | None = None) -> torch.Tensor:
    """Return a tensor of the model, or some rows of it, in float."""
    import torch

    if rows is None:
        return torch.from_numpy(np.array(weights.tensor(name)))
    return torch.from_numpy(np.array(weights.dequantised(name.removesuffix(".weight"), rows)))


def round_cache(name: str, values: torch.Tensor) -> None:
    """Round keys or values in place, as a server stores them in an FP8 cache without scales."""
    import torch

    values.copy_(values.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn).float())


def reference_answers(weights: NeutralWeights, plan: ServerPlan, progress: Progress) -> ServerReference:
    """Decode every prompt greedily with the reference decoder, in float32; the cache is rounded as on the server."""
    import torch

    spec, is_rounded = weights.model, plan.kv_format == "fp8"
    compute = partial(reference_logits, observe_cache=round_cache) if is_rounded else reference_logits
    codec = read_codec(weights.folder)
    prompts = [codec.encode(prompt, add_special_tokens=True) for prompt in PROMPTS]
    answers: list[list[ReferenceStep]] = [[] for _ in prompts]
    is_held = 4 * spec.parameters <= _HELD_BYTES
    tensor = partial(tensor_of, weights)
    get_tensor = cache(tensor) if is_held else tensor
    for step in range(NEW_TOKENS):
        progress(step, NEW_TOKENS, "reference answers")
        so_far = [prompt + [each.token for each in given] for prompt, given in zip(prompts, answers, strict=True)]
        # Attention is causal, so padding after a prompt does not change the logits before it.
        longest = max(map(len, so_far))
        batch = torch.tensor([ids + [0] * (longest - len(ids)) for ids in so_far])
        rows = None if is_held else tensor
        logits = compute(spec, get_tensor, batch, get_rows=rows)
        for given, ids, scores in zip(answers, so_far, logits, strict=True):
            if not (given and given[-1].token in spec.eos_ids):
                given.append(_step(codec, given, scores[len(ids) - 1]))
    progress(NEW_TOKENS, NEW_TOKENS, "reference answers")
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
