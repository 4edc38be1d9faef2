"""Fills the context of an artifact and answers, in a process that holds little else, whose memory another one watches.

    python -m examples.benchmarks.real_model_answer ARTIFACT TOKENS TRIALS

It prints one object of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import edgekit
from edgekit.apps.bench.machine import Machine

HELD_OUT = Path(__file__).parent / "held_out"
ANSWER_TOKENS = 32


def answer(artifact: Path, filled: int, trials: int) -> dict[str, Any]:
    """Return the predicted memory, and the best speeds of a few answers."""
    machine = Machine()
    with edgekit.open(artifact, context=filled, prefixes=0) as runtime:
        words = (HELD_OUT / "prose.txt").read_text()
        prompt = runtime.codec.encode(words, add_special_tokens=True)[: filled - ANSWER_TOKENS]
        options: dict[str, Any] = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        before = machine.usage([os.getpid()])
        answers = [runtime.complete(prompt, **options) for _ in range(trials)]
        others = machine.between(before, machine.usage([os.getpid()])).others_share
        predicted = runtime.memory().predicted
    return {
        "context": filled,
        "predicted_private_bytes": predicted.private_bytes,
        "prefill_tokens_per_s": max(answer.timings.prefill_tokens_per_s or 0 for answer in answers),
        "decode_tokens_per_s": max(answer.timings.decode_tokens_per_s or 0 for answer in answers),
        "others_share": others,
    }


if __name__ == "__main__":
    print(json.dumps(answer(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
