"""Score given texts instead of writing new ones: classify, rank, or measure how likely a text is.

python -m examples.score my.edgekit
"""

from __future__ import annotations

import math
import sys

import edgekit


def classify(runtime: edgekit.Runtime, text: str, labels: list[str]) -> dict[str, float]:
    """Return the probability of each label after `text`, over these labels alone.

    The mean over a label's tokens is compared, so that a long label has no disadvantage.
    """
    scores = runtime.score(text, [f" {label}" for label in labels])
    weights = [math.exp(score.mean) for score in scores]
    return {label: weight / sum(weights) for label, weight in zip(labels, weights, strict=True)}


def perplexity(runtime: edgekit.Runtime, text: str) -> float:
    """Return the perplexity of `text`: lower is more likely."""
    return math.exp(-runtime.prompt_logprobs(text).mean)


def main(artifact: str) -> None:
    with edgekit.open(artifact) as runtime:
        for label, share in classify(runtime, "import numpy as", ["np", "pd", "plt"]).items():
            print(f"{label:<4} {share:.1%}")
        print(f"perplexity of code  {perplexity(runtime, 'def add(a, b): return a + b'):.1f}")
        print(f"perplexity of noise {perplexity(runtime, 'purple if lambda ] 7 the the'):.1f}")


if __name__ == "__main__":
    main(sys.argv[1])
