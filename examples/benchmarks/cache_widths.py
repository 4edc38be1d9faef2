"""Measures what narrow caches lose: KL, perplexity and equal top tokens against the widest cache, on held-out text.

    edgekit export smollm2.gguf --device this --target onnx --recipe float32 --context 8192 -o smollm2.edgekit
    python -m examples.benchmarks.cache_widths smollm2.edgekit [--tokens 2048] [--json docs/data/cache_widths.json]

The artifact should have float weights, so that only the cache differs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import edgekit
from edgekit.artifact.artifact import open_artifact
from edgekit.common.divergence import Pair, divergence_of
from edgekit.common.files import write_output
from edgekit.contracts.engine import Engine
from edgekit.contracts.feeding import feed
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.planner.memory import cache_bytes

HELD_OUT = Path(__file__).parent / "held_out"
KINDS = ("code", "prose")


def logits_of(engine: Engine, tokens: list[int], bits: int) -> Any:
    state = engine.start(KVCacheConfig(capacity_tokens=len(tokens), kv_bits=bits))
    logits = feed(engine, state, tokens, len(tokens))
    state.close()
    return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tokens", type=int, default=2048, help="of each text")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with edgekit.open(arguments.artifact, prefixes=0) as runtime:
        engine, plan = runtime.engine, open_artifact(arguments.artifact).plan
        texts = {kind: runtime.encode((HELD_OUT / f"{kind}.txt").read_text())[: arguments.tokens] for kind in KINDS}
        widest, *narrower = engine.abilities.kv_bits
        wide = {kind: logits_of(engine, tokens, widest) for kind, tokens in texts.items()}
        for bits in narrower:
            taken = engine.state_bytes(KVCacheConfig(capacity_tokens=arguments.tokens, kv_bits=bits))
            predicted = cache_bytes(plan.model, arguments.tokens, bits, plan.memory)
            row: dict[str, Any] = {"bits": bits, "bytes": taken, "predicted_bytes": predicted}
            for kind, tokens in texts.items():
                found = divergence_of([Pair(tuple(tokens), wide[kind], logits_of(engine, tokens, bits))])
                row[kind] = {
                    "kl_mean": found.kl_mean,
                    "kl_error": found.kl_error,
                    "kl_p999": found.kl_p999,
                    "same_top": found.same_top,
                    "perplexity_change": found.perplexity / found.reference_perplexity - 1,
                }
            rows.append(row)
            print(json.dumps(row), flush=True)
    if arguments.json:
        found_rows = {"artifact": arguments.artifact.stem, "tokens": arguments.tokens, "rows": rows}
        write_output(arguments.json, (json.dumps(found_rows, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
