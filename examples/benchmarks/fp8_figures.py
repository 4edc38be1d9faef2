"""Measures what FP8 loses: weights, activations and cache rounded in float32 as a server rounds them.

    python -m examples.benchmarks.fp8_figures --models demo smollm2 [--disturbed]

Every row compares with the float model, on held-out text that nothing is calibrated on. `s8` stands beside for scale.
`--disturbed` compares the emulation with itself instead, the inputs of its linears changed a little before they are
rounded: as close as two servers of one FP8 model can be expected to come.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from edgekit.apps.handover.bundle import NeutralReader
from edgekit.apps.handover.fp8 import round_activations, round_cache, write_fp8
from edgekit.apps.handover.make import recipe_for
from edgekit.common.divergence import Pair, divergence_of
from edgekit.contracts.recipe import named_recipe
from edgekit.model.source import ModelSource, open_source, open_tensors
from edgekit.quant import reference_decoder
from edgekit.quant.pipeline import neutral_weights, no_progress
from edgekit.quant.shards import reader
from edgekit.testing.real_models import smollm2

if TYPE_CHECKING:
    import torch

    GetTensor = Callable[[str], torch.Tensor]

HELD_OUT = Path(__file__).parent / "held_out"
MODELS: dict[str, Callable[[], str | Path]] = {"demo": lambda: "demo", "smollm2": smollm2}
WINDOWS, WINDOW = 4, 256  # of each kind of text
ignore = reference_decoder.ignore


def windows_of(source: ModelSource) -> Iterator[list[int]]:
    """Yield windows of the held-out texts."""
    tokenizer = Tokenizer.from_file(str(source.folder / "tokenizer.json"))
    for text in sorted(HELD_OUT.glob("*.txt")):
        ids = tokenizer.encode(text.read_text()).ids
        for start in range(0, min(len(ids), WINDOWS * WINDOW), WINDOW):
            yield ids[start : start + WINDOW]


def measure(name: str) -> Iterator[str]:
    """Yield a row of the table for each form of a model."""
    source = open_source(MODELS[name](), need_weights=True).with_weights()
    spec, windows = source.spec, list(windows_of(source))
    with tempfile.TemporaryDirectory() as place, open_tensors(source.weights) as tensors:
        fp8 = write_fp8(source, recipe_for(source, named_recipe("fp8")), Path(place) / "fp8", no_progress)
        s8 = NeutralReader(neutral_weights(source, recipe_for(source, named_recipe("s8")), method="rtn"))
        forms = {
            "s8, weights": (s8.tensor, ignore, ignore),
            "FP8, weights": (fp8.tensor, ignore, ignore),
            "FP8, weights and activations (`-r fp8`)": (fp8.tensor, round_activations, ignore),
            "the same, and an FP8 cache": (fp8.tensor, round_activations, round_cache),
            "float, and an FP8 cache": (reader(tensors, spec), ignore, round_cache),
        }
        exact = [reference_decoder.logits(spec, reader(tensors, spec), window).numpy() for window in windows]
        for form, (get_tensor, observe, observe_cache) in forms.items():
            pairs = (
                Pair(
                    tuple(window),
                    reference,
                    reference_decoder.logits(
                        spec, get_tensor, window, observe=observe, observe_cache=observe_cache
                    ).numpy(),
                )
                for window, reference in zip(windows, exact, strict=True)
            )
            found = divergence_of(pairs)
            yield (
                f"| {spec.name} | {form} | {found.kl_mean:.5f} ± {found.kl_error:.5f} | {found.same_top:.2%} |"
                f" {found.reference_perplexity:.2f} → {found.perplexity:.2f} |"
            )


def shaken(by: float) -> Callable[[str, torch.Tensor], None]:
    """Return an observer that adds relative noise to the inputs of linears before it rounds them to FP8."""
    import torch

    noise = torch.Generator().manual_seed(0)

    def observe(name: str, inputs: torch.Tensor) -> None:
        inputs.mul_(1 + by * torch.randn(inputs.shape, generator=noise))
        round_activations(name, inputs)

    return observe


def in_bfloat16(name: str, inputs: torch.Tensor) -> None:
    """Round the inputs of a linear to bfloat16 and then to FP8, as a server does that computes in bfloat16."""
    inputs.copy_(inputs.bfloat16().float())
    round_activations(name, inputs)


def measure_disturbed(name: str) -> Iterator[str]:
    """Yield a row of the table for each disturbance of a model in FP8."""
    source = open_source(MODELS[name](), need_weights=True).with_weights()
    spec, windows = source.spec, list(windows_of(source))[::WINDOWS]  # one of each kind of text
    with tempfile.TemporaryDirectory() as place:
        weights = write_fp8(source, recipe_for(source, named_recipe("fp8")), Path(place) / "fp8", no_progress)
        get_tensor = cache(weights.tensor)
        exact = [
            reference_decoder.logits(spec, get_tensor, window, observe=round_activations).numpy() for window in windows
        ]
        forms = {
            "noise of 0.000001": shaken(1e-6),
            "noise of 0.0001": shaken(1e-4),
            "rounded to bfloat16": in_bfloat16,
            "not rounded to FP8": ignore,
        }
        for form, observe in forms.items():
            found = divergence_of(
                Pair(
                    tuple(window),
                    reference,
                    reference_decoder.logits(spec, get_tensor, window, observe=observe).numpy(),
                )
                for window, reference in zip(windows, exact, strict=True)
            )
            yield f"| {spec.name} | {form} | {found.kl_mean:.5f} ± {found.kl_error:.5f} | {found.same_top:.2%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--disturbed", action="store_true")
    given = parser.parse_args()
    if given.disturbed:
        print("| model | inputs of linears | mean KL | same top-1 |\n|---|---|---|---|")
    else:
        print("| model | form | mean KL | same top-1 | perplexity |\n|---|---|---|---|---|")
    for name in given.models:
        for row in measure_disturbed(name) if given.disturbed else measure(name):
            print(row, flush=True)


if __name__ == "__main__":
    main()
