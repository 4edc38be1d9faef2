"""Measures what products in bfloat16 save when a model is calibrated, and what they change; writes JSON.

    python -m examples.benchmarks.bfloat16_figures float32|bfloat16 MODEL --work FOLDER --data FILE

Run it once with each and compare: `balanced` by gptq on the default text, one thread, processor seconds; the divergence
is that of `quantisation_figures`, window by window. FOLDER keeps weights, one folder for each kind of product.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from edgekit.calibrating import calibration_for
from edgekit.common.content_store import ContentStore
from edgekit.contracts.recipe import named_recipe
from edgekit.model.source import open_source
from edgekit.quant import compute
from edgekit.quant.pipeline import neutral_weights
from examples.benchmarks import quantisation_figures as figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("products", choices=("float32", "bfloat16"))
    parser.add_argument("model")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    compute._has_bfloat16 = lambda: options.products == "bfloat16"  # type: ignore[assignment]
    source, recipe = open_source(options.model, need_weights=True), named_recipe("balanced")
    text = calibration_for(source, [recipe], calibrate="default")
    begun, scored_s = time.process_time(), 0.0

    def note(done: float, total: float, what: str) -> None:
        nonlocal scored_s
        if what.startswith("sensitivity"):
            scored_s = time.process_time() - begun

    store = ContentStore(options.work / options.products)
    weights = neutral_weights(source, recipe, method="gptq", calibration=text, store=store, progress=note)
    row: dict[str, Any] = {
        "model": source.name,
        "products": options.products,
        "processor_s": round(time.process_time() - begun, 1),
        "of_it_predicting_losses_s": round(scored_s, 1),
        "promoted": len(weights.recipe.rules) - len(recipe.rules),
        "text": {},
    }
    floats = figures.floats_of(source)
    for kind in figures.KINDS:
        held = figures.held_out(source, kind, 2048, floats.__getitem__)
        found = figures.compare(source.spec, floats.__getitem__, figures.getter(weights), held, "float")
        row["text"][kind] = found["kl"]
        print(f"{kind}: KL {figures.mean_and_error(found['kl'])}", flush=True)
    rows = json.loads(options.data.read_text())["rows"] if options.data.exists() else []
    kept = [old for old in rows if (old["model"], old["products"]) != (row["model"], row["products"])]
    options.data.write_text(json.dumps({"rows": [*kept, row]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
