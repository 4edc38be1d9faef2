"""Predicted memory beside measured memory of artifacts of the llamacpp target, over contexts, sequences and caches.

    python -m examples.benchmarks.llamacpp_memory ARTIFACT... [--contexts 512 2048] [--sequences 1 4] \\
        [--kv-bits 16 8] [--exact] [--buffers] [--json FILE]

Each setting runs in a process of its own: the artifact is planned anew for the context, opened, and every sequence is
filled to its last tokens. The most private memory that was seen, opening included, is compared with the prediction of
the opened runtime.
`--buffers` prints the sizes that llama.cpp logs itself.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import edgekit
from edgekit.artifact.artifact import open_artifact, seal
from edgekit.common.units import MIB
from edgekit.contracts.manifest import MANIFEST
from edgekit.contracts.plan import Plan
from edgekit.device.load import load_profile
from examples.benchmarks.process_memory import HighWater

ANSWER_TOKENS = 8
_BUFFER = re.compile(r"(\S+) +(model|KV|compute|output) buffer size += +([\d.]+) MiB")


def planned_anew(artifact: Path, context: int, out: Path) -> Path:
    """Seal a copy of an artifact whose plan has this context and today's facts."""
    from edgekit_llamacpp.offers import offer

    opened = open_artifact(artifact)
    plan: Plan = opened.plan
    facts = offer(plan.model, load_profile("this"), plan.backend, plan.recipe).memory
    kept = {name: getattr(plan.memory, name) for name in ("tokenizer_bytes", "tokenizer_reading_bytes")}
    plan = plan.model_copy(
        update={
            "context": context,
            "storage": plan.storage.model_copy(update={"capacity_tokens": context}),
            "memory": facts.model_copy(update=kept),
        }
    )
    staging = out.with_suffix(".staging")
    shutil.copytree(artifact, staging, ignore=shutil.ignore_patterns(MANIFEST))
    seal(staging, out, plan, weights_sha256=opened.manifest.weights_sha256, tools={}, self_check="none: figures")
    return out


def measure(artifact: Path, sequences: int, kv_bits: int, exact: bool) -> dict[str, Any]:
    """Open, fill every sequence, and return what was predicted."""
    buffers: dict[str, float] = {}
    callback = _log_buffers(buffers)
    with edgekit.open(artifact, sequences=sequences, kv_bits=kv_bits, exact=exact, prefixes=0) as runtime:
        assert runtime.artifact is not None
        plan = runtime.artifact.plan
        length = plan.storage.capacity_tokens - ANSWER_TOKENS - 1
        prompts = [
            [(7 + 31 * place + number) % plan.model.vocab_size for place in range(length)]
            for number in range(sequences)
        ]
        streams = [runtime.submit(each, max_tokens=ANSWER_TOKENS, ignore_eos=True) for each in prompts]
        for stream in streams:
            stream.answer()
        memory = runtime.memory()
    del callback
    classes = {
        each.name: [each.predicted_bytes, each.measured_bytes] for each in memory.classes if each.predicted_bytes
    }
    return {
        "predicted": memory.predicted_private_bytes,
        "classes": classes,
        "estimate": memory.predicted.model_dump(),
        "buffers": buffers,
    }


def _log_buffers(found: dict[str, float]) -> Any:
    """Keep the sizes that llama.cpp logs; the returned callback must live as long as the model."""
    from edgekit_llamacpp import library, structs

    def keep(level: int, text: bytes, _: Any) -> None:
        line = _BUFFER.search(text.decode(errors="replace"))
        if line:
            found[f"{line[1]} {line[2]}"] = found.get(f"{line[1]} {line[2]}", 0.0) + float(line[3])

    callback = structs.LogCallback(keep)
    library.load().llama_log_set(callback, None)
    return callback


def _child(artifact: Path, sequences: int, kv_bits: int, exact: bool) -> dict[str, Any]:
    arguments = [str(artifact), str(sequences), str(kv_bits), str(int(exact))]
    command = [sys.executable, "-m", "examples.benchmarks.llamacpp_memory", "--child", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    water = HighWater(process.pid)
    water.start()
    answer, errors = process.communicate()
    water.is_over.set()
    water.join()
    if process.returncode:
        return {"failed": errors.strip().splitlines()[-1:]}
    found: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return {**found, "measured": water.most}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        path, sequences, bits, exact = sys.argv[2:]
        print(json.dumps(measure(Path(path), int(sequences), int(bits), exact == "1")))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--kv-bits", type=int, nargs="+", default=[16, 8])
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--buffers", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = []
    print(f"{'artifact':<16}{'context':>8}{'seqs':>5}{'bits':>5}{'predicted':>11}{'measured':>10}{'off':>8}")
    for artifact, context in product(asked.artifacts, asked.contexts):
        with tempfile.TemporaryDirectory(dir=artifact.parent) as temporary:
            made = planned_anew(artifact, context, Path(temporary) / artifact.name)
            for sequences, bits in product(asked.sequences, asked.kv_bits):
                row = {"artifact": artifact.name, "context": context, "sequences": sequences, "kv_bits": bits}
                row |= _child(made, sequences, bits, asked.exact)
                rows.append(row)
                print(_line(row), flush=True)
                if asked.buffers:
                    print(f"    {row.get('buffers')}\n    {row.get('estimate')}\n    {row.get('classes')}", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    start = f"{row['artifact']:<16}{row['context']:>8,}{row['sequences']:>5}{row['kv_bits']:>5}"
    if "failed" in row:
        return f"{start}  {row['failed']}"
    predicted, measured = row["predicted"], row["measured"]
    return f"{start}{predicted / MIB:>11.1f}{measured / MIB:>10.1f}{predicted / measured - 1:>8.1%}"


if __name__ == "__main__":
    main()
