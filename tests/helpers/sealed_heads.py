"""Plans, prompts, settings and checks for tests of sealed heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import runtimes
import tiny_models

from edgekit.contracts.recipe import named_recipe
from edgekit.methods.drafters.head_decoder import HeadDecoder
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest

TARGETS = {"onnx": "onnxruntime", "mlx": "mlx.core", "executorch": "executorch"}  # and the library that runs it


def words(count: int, seed: int) -> str:
    draw = np.random.default_rng(seed)
    return " ".join(runtimes.WORDS[index] for index in draw.integers(0, len(runtimes.WORDS), count))


def planned(model: Path, head: Path, **asked: Any) -> Any:
    usual = {"recipe": named_recipe("s4-g32"), "target": "onnx", "context": 128, "sequences": 3, "drafter": str(head)}
    request = PlanRequest(**{**usual, **asked})
    return make_plans(str(model), [tiny_models.DEVICE], request)[0].model_copy(update={"threads": 1})


def check_logits(
    decoder: HeadDecoder, hidden: Any, tokens: list[int], drafted: list[int], expected: Any, embed: Any = None
) -> None:
    """Compare logits after `tokens` and after each of `drafted`, fed in several pieces, with those of another reading.

    `hidden` are the target's hidden states of all `tokens` but the last; `embed` looks embeddings up in it.
    """
    for cuts in ((89,), (1, 30, 58), (64, 1, 24)):
        cache, start, output = decoder.start(128, embed), 0, np.empty((0, decoder.spec.layer.hidden_size), np.float32)
        for count in cuts:
            part = slice(start, start + count)
            fed = np.array(tokens[start + 1 : start + count + 1])
            output = decoder.forward(cache, fed, decoder.combine(hidden[part]), np.arange(start, start + count))
            start += count
        found = [decoder.logits(output[-1])]
        for place, token in enumerate(drafted):
            output = decoder.forward(cache, np.array([token]), output[-1:], np.array([start + place]))
            found.append(decoder.logits(output[-1]))
        np.testing.assert_allclose(np.stack(found), expected[:, decoder.targets], atol=2e-4, rtol=1e-4)
