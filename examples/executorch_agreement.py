"""How often a program and torch, with the same integers and the same rounding of activations, choose the same token.

    python examples/executorch_agreement.py ARTIFACT [--texts 8] [--text held_out.jsonl] [--json FILE]

Sums in another order move a rounding here and there, and each moves others behind it: as a control torch is compared
with itself in pieces of another size. The integers must be in the store, where the export of the artifact left them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgekit_executorch.decoder import Decoder, Forward
from edgekit_executorch.hushed import hushed
from edgekit_executorch.layout import NARROW_BITS
from edgekit_executorch.operators import register_for_tracing

import edgekit
from edgekit.artifact import open_artifact
from edgekit.interfaces import Chunk, Engine
from edgekit.measure.peers.entering import weights_of

TOKENS, PIECE, OTHER_PIECE = 1024, 256, 97
Say = Callable[[list[int], int], Any]


def compared(mine: Any, other: Any) -> tuple[float, float]:
    """The share of tokens whose top choice is the same, and the KL from `mine` to `other`."""
    chances, others = log_chances(mine), log_chances(other)
    return float((mine.argmax(-1) == other.argmax(-1)).mean()), float(
        (np.exp(chances) * (chances - others)).sum(-1).mean()
    )


def log_chances(logits: Any) -> Any:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def program_of(engine: Engine, storage: Any) -> Say:
    def say(tokens: list[int], piece: int) -> Any:
        state, found = engine.start(storage), []
        for start in range(0, len(tokens), piece):
            part = tokens[start : start + piece]
            found.append(engine.forward([Chunk(state, part, len(part))])[0])
        state.close()
        return np.concatenate(found)

    return say


def torch_of(decoder: Decoder) -> Say:
    forward = Forward(decoder)

    def say(tokens: list[int], piece: int) -> Any:
        found = []
        with hushed(), torch.no_grad():
            for start in range(0, len(tokens), piece):
                part = torch.tensor([tokens[start : start + piece]])
                found.append(forward(part, torch.tensor([start]), torch.arange(part.shape[1])).numpy())
        return np.concatenate(found)

    return say


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--texts", type=int, default=8, help=f"of {TOKENS} tokens")
    parser.add_argument("--text", type=Path, help="jsonl with a `text` on each line; the held-out text of the demo")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    made = open_artifact(asked.artifact)
    text = asked.text or Path(edgekit.__file__).parent / "_demo" / "held_out.jsonl"
    register_for_tracing()
    torch.set_num_threads(1)
    with hushed(), torch.no_grad():
        decoder = Decoder(
            weights_of(made), slots=TOKENS, positions=TOKENS, context=made.plan.context,
            narrow=made.plan.storage.kv_bits == NARROW_BITS,
        )  # fmt: skip
    with edgekit.open(asked.artifact, sequences=1, prefixes=0) as runtime:
        program, reference = program_of(runtime.engine, made.plan.storage), torch_of(decoder)
        every = runtime.encode("\n".join(json.loads(line)["text"] for line in text.read_text().splitlines()))
        pairs, controls = [], []
        for start in range(0, min(asked.texts * TOKENS, len(every) - TOKENS + 1), TOKENS):
            tokens = every[start : start + TOKENS]
            expected = reference(tokens, PIECE)
            pairs.append(compared(expected, program(tokens, PIECE)))
            controls.append(compared(expected, reference(tokens, OTHER_PIECE)))
    found = {
        "tokens": len(pairs) * TOKENS,
        "program": dict(zip(("same_top", "kl"), np.mean(pairs, axis=0).tolist(), strict=True)),
        "torch_in_other_pieces": dict(zip(("same_top", "kl"), np.mean(controls, axis=0).tolist(), strict=True)),
        "kv_bits": made.plan.storage.kv_bits,
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(found, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
