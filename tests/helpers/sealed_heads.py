"""Plans, prompts, settings and checks for tests of sealed heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import runtimes
import tiny_models

import edgekit
from edgekit.artifact.artifact import Artifact
from edgekit.contracts.recipe import named_recipe
from edgekit.methods.drafters.assistant_decoder import AssistantDecoder
from edgekit.methods.drafters.assistant_drafter import AssistantDrafting
from edgekit.methods.drafters.head_decoder import HeadDecoder
from edgekit.methods.drafters.head_drafter import HeadDrafting
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.testing.drafting import FixedLengthDrafting

TARGETS = {"onnx": "onnxruntime", "mlx": "mlx.core", "executorch": "executorch"}  # and the library that runs it
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
}
KEPT: dict[str, dict[str, Any]] = {"everything": {}, "a window": {"window": 24, "sinks": 3}}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 4.0, "seed": 4},
    "penalised": {"temperature": 0.8, "top_k": 30, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 6},
    "by a schema": {"schema": SCHEMA, "temperature": 1.0, "seed": 5, "max_tokens": 40},
}


def words(count: int, seed: int) -> str:
    draw = np.random.default_rng(seed)
    return " ".join(runtimes.WORDS[index] for index in draw.integers(0, len(runtimes.WORDS), count))


def planned(model: Path, head: Path, **asked: Any) -> Any:
    usual = {"recipe": named_recipe("s4-g32"), "target": "onnx", "context": 128, "sequences": 3, "drafter": str(head)}
    request = PlanRequest(**{**usual, **asked})
    return make_plans(str(model), [tiny_models.DEVICE], request)[0].model_copy(update={"threads": 1})


def always(artifact: Artifact) -> FixedLengthDrafting:
    """Drafting in every step by the sealed head, as if each of its tokens cost a second."""
    head = artifact.open_head()
    if head.spec.kv_layers:
        return FixedLengthDrafting(AssistantDrafting(AssistantDecoder(head), one_s=1.0, tokens=4))
    drafting = HeadDrafting(HeadDecoder(head), capacity=128, one_s=1.0, block_token_s=1.0, tokens=4)
    return FixedLengthDrafting(drafting)


def check_answers(artifact: Artifact, prompts: list[str], kept: str, **options: Any) -> tuple[int, int]:
    """Compare drafted answers, three at once, with plain decoding; return tokens proposed and accepted."""
    options = {"exact": True, **KEPT[kept], **options}
    with edgekit.open(artifact.folder, **options) as runtime:
        plain = {
            name: [runtime.generate(each, **{"max_tokens": 12, **sampling}).tokens for each in prompts]
            for name, sampling in SAMPLINGS.items()
        }
    with edgekit.open(artifact.folder, drafting=always(artifact), **options) as runtime:
        for name, sampling in SAMPLINGS.items():
            streams = [runtime.submit(each, **{"max_tokens": 12, **sampling}) for each in prompts]
            assert [stream.answer().tokens for stream in streams] == plain[name], name
        metrics = runtime.metrics()
    return metrics.proposed, metrics.accepted


def check_schemas_and_prefixes(artifact: Artifact) -> None:
    """Compare drafted answers with a schema, to a long prompt and after a prefix hit with plain decoding."""
    asked: list[tuple[str, dict[str, Any]]] = [
        (words(4, 1), {"schema": SCHEMA, "temperature": 1.0, "seed": 1}),
        (words(4, 2), {"schema": SCHEMA}),
        (words(60, 3), {"max_tokens": 20, "temperature": 3.0, "seed": 3}),
        (words(60, 3) + " " + words(3, 4), {"max_tokens": 20, "temperature": 3.0, "seed": 4}),  # after a prefix hit
    ]
    with edgekit.open(artifact.folder, exact=True, prefixes=0) as runtime:
        plain = [runtime.generate(prompt, **options).tokens for prompt, options in asked]
    with edgekit.open(artifact.folder, exact=True, drafting=always(artifact), prefixes="4MiB") as runtime:
        answers = [runtime.generate(prompt, **options) for prompt, options in asked]
        assert [answer.tokens for answer in answers] == plain
        assert answers[-1].timings.cached_tokens > 0 and runtime.metrics().accepted > 0


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
