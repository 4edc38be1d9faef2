"""Measures what each recipe and method loses of the bundled model, and writes the table of docs/quantisation.md.

    python examples/quantisation_figures.py [--model demo] [--samples 64] [--length 256] [--windows 40]

Text is cut into windows of 512 tokens. Every figure is over all their positions; the uncertainty is the standard error
over windows, paired where two models are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

import edgekit
from edgekit.recipe import Recipe, bits_per_weight, named_recipe
from edgekit.source import open_source
from edgekit.store import Store
from edgekit.weights import decoder
from edgekit.weights.calibration import read_calibration
from edgekit.weights.quantise import neutral_weights
from edgekit.weights.safetensors import TensorFolder

ROOT = Path(__file__).parents[1]
HELD_OUT = Path(edgekit.__file__).parent / "_demo" / "held_out.jsonl"
WINDOW = 512
BATCH = 4
BEGIN, END = "<!-- figures: written by examples/quantisation_figures.py -->", "<!-- end of figures -->"


def cases() -> list[tuple[str, Any, Recipe]]:
    """Name, method, recipe; mixed recipes get the bits that one step finer groups would cost."""
    found: list[tuple[str, Any, Recipe]] = [
        ("fp16", "none", named_recipe("float16")),
        ("s8", "rtn", named_recipe("s8")),
    ]
    for group in (32, 64, 128):
        found += [(f"s4-g{group}", method, named_recipe(f"s4-g{group}")) for method in ("rtn", "awq", "gptq")]
    base = named_recipe("s4-g128")
    for bits in (5.2, 5.6):
        mixed = base.model_copy(update={"name": f"s4-g128-to-{bits:g}", "bits_per_weight": bits})
        found.append((mixed.name, "gptq", mixed))
    return found


def windows_of(path: Path, tokenizer: Tokenizer, limit: int | None) -> torch.Tensor:
    ids: list[int] = []
    for line in path.read_text().splitlines():
        ids += tokenizer.encode(json.loads(line)["text"]).ids
    whole = torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).reshape(-1, WINDOW)
    return whole[:limit]


def log_probabilities(spec: Any, get_tensor: Any, batch: torch.Tensor) -> torch.Tensor:
    return decoder.logits(spec, get_tensor, batch).log_softmax(-1)


def measure(spec: Any, exact: list[torch.Tensor], get_tensor: Any, windows: torch.Tensor) -> dict[str, Any]:
    """Against what the float model said, window by window."""
    divergences, losses, exact_losses, same = [], [], [], []
    for batch, p in zip(torch.split(windows, BATCH), exact, strict=True):
        q = log_probabilities(spec, get_tensor, batch)
        divergences.append((p.exp() * (p - q)).sum(-1))
        targets = batch[:, 1:, None]
        losses.append(-q[:, :-1].gather(-1, targets)[..., 0].mean(-1))
        exact_losses.append(-p[:, :-1].gather(-1, targets)[..., 0].mean(-1))
        same.append((p.argmax(-1) == q.argmax(-1)).float().mean(-1))
    kl = torch.cat(divergences).double().clamp(min=0)
    loss, base, top = (torch.cat(each).double() for each in (losses, exact_losses, same))
    return {
        "perplexity": math.exp(loss.mean()),
        "log_perplexity_change": with_error(loss - base),
        "kl": with_error(kl.mean(-1)),
        "kl_999": float(np.quantile(kl.numpy(), 0.999)),
        "same_top": with_error(top),
    }


def with_error(values: torch.Tensor) -> list[float]:
    """Mean and standard error over windows."""
    return [float(values.mean()), float(values.std() / math.sqrt(len(values)))]


def table(figures: dict[str, Any]) -> str:
    lines = [
        "| recipe | method | bits | perplexity | Δ ln perplexity | mean KL | 99.9 % KL | same top-1 | KL / RTN's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rtn = {row["recipe"]: row["kl"][0] for row in figures["rows"] if row["method"] == "rtn"}
    for row in figures["rows"]:
        change, kl, top = row["log_perplexity_change"], row["kl"], row["same_top"]
        base = rtn.get(row["recipe"])
        ratio = f"{kl[0] / base:.2f}" if base and row["method"] in ("awq", "gptq") else ""
        lines.append(
            f"| {row['recipe']} | {row['method']} | {row['bits_per_weight']:.2f} | {row['perplexity']:.3f} | "
            f"{change[0]:+.4f} ± {change[1]:.4f} | {kl[0]:.5f} ± {kl[1]:.5f} | {row['kl_999']:.3f} | "
            f"{top[0]:.2%} ± {top[1]:.2%} | {ratio} |"
        )
    return "\n".join(lines)


def write_page(page: Path, figures: dict[str, Any]) -> None:
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    said = (
        f"Model `{figures['model']}` ({figures['parameters'] / 1e6:.1f} M parameters), {figures['windows']} windows of "
        f"{WINDOW} held-out tokens, calibrated on {figures['calibration']}.\n\n"
    )
    page.write_text(f"{before}{BEGIN}\n{said}{table(figures)}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, default=HELD_OUT)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--data", type=Path, default=ROOT / "docs" / "data" / "quantisation.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "quantisation.md")
    options = parser.parse_args()
    source = open_source(options.model, need_weights=True)
    windows = windows_of(options.text, Tokenizer.from_file(str(source.folder / "tokenizer.json")), options.windows)
    calibration = read_calibration(None, source.folder, sequences=options.samples, length=options.length)
    stored = TensorFolder.open(source.folder)
    floats = {tensor.name: torch.from_numpy(stored.floats(tensor.name)) for tensor in source.spec.tensors()}
    exact = [log_probabilities(source.spec, floats.__getitem__, batch) for batch in torch.split(windows, BATCH)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, method, recipe in cases():
            begun = time.process_time()
            weights = neutral_weights(
                source,
                recipe,
                method=method if method in ("rtn", "awq", "gptq") else None,
                calibration=calibration if method in ("awq", "gptq") else None,
                store=Store(Path(folder)),
            )
            seconds = time.process_time() - begun
            held = {
                tensor.name: torch.from_numpy(np.array(weights.tensor(tensor.name))) for tensor in source.spec.tensors()
            }
            row = {
                "recipe": name,
                "method": method,
                "bits_per_weight": bits_per_weight(weights.model, weights.recipe),
                **measure(source.spec, exact, held.__getitem__, windows),
                "cpu_seconds": round(seconds, 1),
                "sha256": weights.sha256,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    figures = {
        "model": source.name,
        "parameters": source.spec.parameters,
        "weights": {path.name: stored_hash for path, stored_hash in _hashes(stored).items()},
        "windows": len(windows),
        "calibration": calibration.fact.description,
        "rows": rows,
    }
    options.data.parent.mkdir(parents=True, exist_ok=True)
    options.data.write_text(json.dumps(figures, indent=1) + "\n")
    write_page(options.page, figures)
    print(table(figures))


def _hashes(stored: TensorFolder) -> dict[Path, str]:
    from edgekit.files import file_sha256

    return {path: file_sha256(path) for path in stored.files.values()}


if __name__ == "__main__":
    main()
