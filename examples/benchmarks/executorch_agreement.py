"""Measures how often a program and torch, with the same integers and rounding, choose the same token.

    python -m examples.benchmarks.executorch_agreement ARTIFACT [--texts 8] [--text held_out.jsonl] [--json FILE]

Torch sums in another order, which moves a rounding here and there, and each moves others behind it. So torch is asked
twice: as it sums itself, and in the order of XNNPACK's kernels where that of this processor is known; there every bit
is the same or something is wrong. As controls, torch is compared with itself in pieces of another size, and torch and
the program with torch in double precision, where sums are exact.
The integers must be in the store, where the export of the artifact left them.
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
from edgekit_executorch.decoder import Append, ExecutorchDecoder
from edgekit_executorch.layout import INT8_BITS, MAX_ROWS
from edgekit_executorch.operators import register_for_tracing
from edgekit_executorch.quiet import quiet_output, quiet_stderr

import edgekit
from edgekit.apps.bench.peers.subjects import weights_of
from edgekit.artifact.artifact import open_artifact
from edgekit.contracts.engine import Chunk, Engine
from examples.benchmarks.xnnpack_in_order import InOrderForward, kernel_offset

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


def torch_of(forward: torch.nn.Module) -> Say:
    def say(tokens: list[int], piece: int) -> Any:
        found = []
        with quiet_stderr(), torch.no_grad():
            for start in range(0, len(tokens), piece):
                part = torch.tensor([tokens[start : start + piece]])
                found.append(forward(part, torch.tensor([start]), torch.arange(part.shape[1])).numpy())
        return np.concatenate(found)

    return say


class Doubled(torch.nn.Module):
    """A table of tokens whose rows come out in double precision."""

    def __init__(self, table: torch.nn.Module) -> None:
        super().__init__()
        self.table = table.float()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(tokens).double()
        return rows


def in_double(decoder: ExecutorchDecoder) -> ExecutorchDecoder:
    """Compute in double precision, and round activations as the program does."""
    decoder.double()
    decoder.embedding = Doubled(decoder.embedding)
    return decoder


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
    int8_kv = made.plan.storage.kv_bits == INT8_BITS
    sizes: dict[str, Any] = {"slots": TOKENS, "positions": TOKENS, "context": made.plan.context}
    with quiet_output(), torch.no_grad():
        decoder, for_in_order = (ExecutorchDecoder(weights_of(made), **sizes, int8_kv=int8_kv) for _ in range(2))
        double = None if int8_kv else in_double(ExecutorchDecoder(weights_of(made), **sizes, style="scattered"))
    with edgekit.open(asked.artifact, sequences=1, prefixes=0) as runtime:
        program, reference = program_of(runtime.engine, made.plan.storage), torch_of(Append(decoder))
        in_order = torch_of(InOrderForward(for_in_order)) if kernel_offset() is not None else None
        every = runtime.encode("\n".join(json.loads(line)["text"] for line in text.read_text().splitlines()))
        found: dict[str, list[tuple[float, float]]] = {}
        equal: list[float] = []
        for start in range(0, min(asked.texts * TOKENS, len(every) - TOKENS + 1), TOKENS):
            tokens = every[start : start + TOKENS]
            expected = reference(tokens, PIECE)
            said = program(tokens, PIECE)
            found.setdefault("program", []).append(compared(expected, said))
            if in_order is not None:
                # The program computes so many rows at once, and attention sums otherwise where more tokens ask.
                same_sums = in_order(tokens, MAX_ROWS)
                found.setdefault("program_from_torch_in_its_order", []).append(compared(same_sums, said))
                equal.append(float((same_sums == said).mean()))
            found.setdefault("torch_in_other_pieces", []).append(compared(expected, reference(tokens, OTHER_PIECE)))
            if double is not None:
                exact = torch_of(Append(double))(tokens, PIECE)
                found.setdefault("torch_from_double", []).append(compared(exact, expected))
                found.setdefault("program_from_double", []).append(compared(exact, said))
    figures: dict[str, Any] = {
        "tokens": len(found["program"]) * TOKENS,
        **{
            name: dict(zip(("same_top", "kl"), np.mean(pairs, 0).tolist(), strict=True))
            for name, pairs in found.items()
        },
        "logits_equal_to_the_bit": float(np.mean(equal)) if equal else None,
        "kv_bits": made.plan.storage.kv_bits,
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(figures, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
