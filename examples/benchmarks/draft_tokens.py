"""What rows of an MTP part's head gain and cost, as JSON: the share of texts that they can draft, and bytes of a draft.

    python -m examples.benchmarks.draft_tokens MODEL

MODEL has a tokenizer of a vocabulary about as large as Qwen3.5's. The bytes are those of Qwen3.5 of 0.8 B parameters:
its weights in s4-g32, all of which a step reads, and the matrices of its MTP part in 32 bits, which each draft reads.
"""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from math import prod
from pathlib import Path

import numpy as np

from edgekit.artifact.draft_vocabulary import draft_tokens
from edgekit.contracts.recipe import named_recipe
from edgekit.model.families import model_from_config
from edgekit.model.head_spec import HeadSpec
from edgekit.model.source import open_source
from edgekit.quant.calibration import Document, encode
from examples.benchmarks.random_models import QWEN3_5_800M

ROWS = (2048, 4096, 8192, 16384, 32768, 65536)
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


def draft_bytes(rows: int) -> int:
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "tie_word_embeddings": False}
    layer = model_from_config({**QWEN3_5_800M, **one}, "mtp", "mtp")
    sizes = {"draft_vocab_size": rows, "target_hidden_size": layer.hidden_size, "hidden_layers": (24,)}
    spec = HeadSpec(kind="mtp", layer=layer, sha256="0" * 64, norm_output=True, **sizes)
    return 4 * sum(prod(shape) for _, shape in spec.tensors())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a model with a large tokenizer, such as Gemma 3")
    source = open_source(parser.parse_args().model)
    encoded = {name: encode(documents, source.folder) for name, documents in texts().items()}
    step, found = step_bytes(), []
    for rows in ROWS:
        chosen = draft_tokens(source.folder, source.spec, rows)
        covered = {name: float(np.isin(tokens, chosen).mean()) for name, tokens in encoded.items()}
        share = draft_bytes(rows) / step
        gain = {str(a): (1 + a * covered["held_out"]) / (VERIFY + share) for a in ACCEPTED}
        found.append({"rows": rows, "covered": covered, "draft_bytes": draft_bytes(rows), "share": share, "gain": gain})
    told = {"tokenizer": source.name, "vocabulary": source.spec.vocab_size, "step_bytes": step, "rows": found}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
