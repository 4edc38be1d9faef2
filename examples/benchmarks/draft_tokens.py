"""Measures draft tokens of an MTP part, as JSON: the share of a text that they cover, and the bytes of a draft.

    python -m examples.benchmarks.draft_tokens MODEL [--measure FOLDER]

MODEL has a tokenizer of a vocabulary about as large as Qwen3.5's. The bytes are those of Qwen3.5 of 0.8 B parameters:
its weights in s4-g32, all of which a step reads, and the matrices of its MTP part in 32 bits, which each draft reads.
`--measure` makes artifacts with random weights of these shapes for onnx and gives the measured costs, in steps.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

import edgekit
from edgekit.artifact.draft_vocabulary import draft_tokens
from edgekit.artifact.export import export
from edgekit.contracts.recipe import named_recipe
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.model import mtp
from edgekit.model.families import model_from_config
from edgekit.model.head_spec import HEAD, TARGET_NORM, HeadSpec
from edgekit.model.source import open_source
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.quant.calibration import Document, encode
from edgekit.quant.random_weights import random_weights
from edgekit.quant.source_files import copy_companions
from examples.benchmarks.random_artifacts import TOKENIZER
from examples.benchmarks.random_models import QWEN3_5_800M

ROWS, MEASURED = (2048, 4096, 8192, 16384, 32768, 65536), (8192, 32768)
ACCEPTED = (0.5, 0.7, 0.9)  # of the proposals whose token has a row
VERIFY = 1.1  # cost of verifying one proposal, in steps


def texts() -> dict[str, list[Document]]:
    """Texts that are not in the bundled corpus from which the tokens are chosen."""
    held_out = (files("edgekit") / "_demo" / "held_out.jsonl").read_text().splitlines()
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    return {
        "held_out": [Document(json.loads(line)["text"], is_chat=True) for line in held_out],
        "docs": [Document(page.read_text(), is_chat=True) for page in pages],
    }


def step_bytes() -> int:
    model, recipe = model_from_config(QWEN3_5_800M, "qwen", "qwen"), named_recipe("s4-g32")
    return sum(recipe.format_of(tensor).bytes(tensor.shape) for tensor in model.tensors())


def part(rows: int) -> HeadSpec:
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "tie_word_embeddings": False}
    layer = model_from_config({**QWEN3_5_800M, **one}, "mtp", "mtp")
    made = partial(HeadSpec, kind="mtp", layer=layer, target_hidden_size=layer.hidden_size, sha256="0" * 64)
    return made(draft_vocab_size=rows, hidden_layers=(24,), norm_output=True)


def by_rows(model: str) -> dict[str, Any]:
    source, step = open_source(model), step_bytes()
    encoded = {name: encode(documents, source.folder) for name, documents in texts().items()}
    found = []
    for rows in ROWS:
        chosen = draft_tokens(source.folder, source.spec, rows)
        covered = {name: round(float(np.isin(tokens, chosen).mean()), 4) for name, tokens in encoded.items()}
        size = 4 * sum(prod(shape) for _, shape in part(rows).tensors())
        gain = {str(each): round((1 + each * covered["held_out"]) / (VERIFY + size / step), 3) for each in ACCEPTED}
        found.append(
            {"rows": rows, "covered": covered, "draft_bytes": size, "share": round(size / step, 3), "gain": gain}
        )
    return {"tokenizer": source.name, "vocabulary": source.spec.vocab_size, "step_bytes": step, "rows": found}


def measured(folder: Path) -> Iterator[dict[str, Any]]:
    weights, checkpoint, draw = folder / "weights", folder / "part", np.random.default_rng(0)
    random_weights(weights, QWEN3_5_800M, named_recipe("s4-g32"), "random")
    copy_companions(TOKENIZER, weights)
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(QWEN3_5_800M))
    shapes = {f"mtp.{name}": shape for name, shape in part(1).tensors() if name not in (HEAD, TARGET_NORM)}
    with TensorWriter(checkpoint / "mtp.safetensors", {name: ("F32", shapes[name]) for name in shapes}) as writer:
        for name, shape in shapes.items():
            writer.write(name, draw.standard_normal(shape, np.float32) * np.float32(0.02))
        writer.seal()
    for rows in MEASURED:
        mtp.DRAFT_TOKENS = rows
        asked = PlanRequest(target="onnx", context=1024, drafter=str(checkpoint), threads=1)
        artifact = export(make_plans(weights, ["this"], asked)[0], folder / str(rows))
        with edgekit.open(artifact.folder, draft="head") as runtime:
            runtime.generate("def fibonacci(n):", max_tokens=24)
            report = runtime.speculation()
        assert report is not None
        cost = round(report.proposals[0].draft_cost, 3)
        verify = {tokens: round(each, 3) for tokens, each in report.verify_cost.items()}
        yield {"rows": rows, "draft_cost": cost, "verify_cost": verify, "load": round(os.getloadavg()[0], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a model with a large tokenizer, such as Gemma 3")
    parser.add_argument("--measure", type=Path, help="a folder, which must not exist, for random artifacts (3 GB)")
    asked = parser.parse_args()
    told = by_rows(asked.model)
    if asked.measure:
        asked.measure.mkdir()
        told["measured"] = list(measured(asked.measure))
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
