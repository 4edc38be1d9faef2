"""Greedy text of the demo model on the mlx engine, token by token against the torch reference.

Run: python -m examples.benchmarks.mlx_against_reference [ARTIFACT]   (needs edgekit[mlx] and edgekit[quantize])

Without an artifact the demo model is exported for a MacBook first. The reference reads the whole text at once, from the
neutral weights dequantised in float32. A token counts as a tie where the reference's two best differ by less than the
largest difference between the two engines on this text.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from edgekit.artifact.artifact import Artifact, open_artifact
from edgekit.artifact.export import export
from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.model.source import open_source
from edgekit.planner.make import make_plans
from edgekit.plugins import load_target
from edgekit.quant.pipeline import neutral_weights
from edgekit.quant.reference_decoder import logits

PROMPT, NEW_TOKENS = "def fibonacci(n):", 512


def greedy(artifact: Artifact, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """The text, and the row of logits from which each of its new tokens was taken."""
    engine = load_target(artifact.plan.target).open(artifact.plan, artifact.folder)
    for note in getattr(engine, "notes", ()):
        print(f"note: {note}")
    widest = KVCacheConfig(capacity_tokens=len(prompt) + NEW_TOKENS, kv_bits=engine.abilities.kv_bits[0])
    state, tokens, rows = engine.start(widest), list(prompt), []
    fed = prompt
    for _ in range(NEW_TOKENS):
        rows.append(engine.forward([Chunk(state, fed, 1)])[0][0])
        fed = [int(rows[-1].argmax())]
        tokens += fed
    engine.close()
    return tokens, np.stack(rows)


def main(path: Path) -> None:
    artifact = open_artifact(path)
    plan = artifact.plan
    prompt = Tokenizer.from_file(str(path / "tokenizer.json")).encode(PROMPT).ids
    tokens, found = greedy(artifact, prompt)
    weights = neutral_weights(open_source(plan.model_source, need_weights=True), plan.recipe)
    wanted = logits(
        plan.model,
        lambda name: torch.from_numpy(np.array(weights.tensor(name))),
        tokens[:-1],
        context_tokens=plan.context,
    ).numpy()[len(prompt) - 1 :]
    noise = float(np.abs(found - wanted).max())
    best_two = np.sort(wanted, axis=-1)[:, -2:]
    margins = best_two[:, 1] - best_two[:, 0]
    differs = found.argmax(-1) != wanted.argmax(-1)
    ties = margins <= noise
    print(f"{plan.target} {plan.backend} {plan.recipe.name}: {NEW_TOKENS} new tokens after {len(prompt)}")
    print(
        f"largest difference of logits {noise:.2e}, of {np.abs(wanted).max():.1f}; smallest margin {margins.min():.2e}"
    )
    print(f"equal to the reference: {int((~differs).sum())}; different: {int(differs.sum())}; ties: {int(ties.sum())}")
    if (differs & ~ties).any():
        raise SystemExit(f"token {int(np.flatnonzero(differs & ~ties)[0])} differs and is no tie")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            demo = Path(folder) / "demo"
            export(make_plans("demo", ["macbook-m4-16gb"])[0], demo)
            main(demo)
