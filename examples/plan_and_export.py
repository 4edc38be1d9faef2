"""Plan a model for two devices, and export it for this machine.

python -m examples.plan_and_export demo demo.edgekit
"""

from __future__ import annotations

import sys
from pathlib import Path

import edgekit
from edgekit.errors import DoesNotFit


def will_it_fit(model: str, devices: list[str]) -> dict[str, bool]:
    """Print what each device would run. No weight is downloaded or converted for this."""
    fits = {}
    for device in devices:
        try:
            plan = edgekit.plan(model, device, context=2048)
        except DoesNotFit as error:
            print(f"{device}: {error}")
            fits[device] = False
            continue
        memory = plan.estimate.total_bytes / 2**20
        print(
            f"{device}: {plan.target} with {plan.recipe.name}, {memory:.0f} MiB, "
            f"about {plan.speed.decode_tokens_per_s:.0f} tokens/s"
        )
        fits[device] = True
    return fits


def export_here(model: str, output: Path) -> Path:
    """Quantise and export `model` for this machine; return the artifact's folder.

    Weights are rounded to the nearest, in seconds. Without `effort` a small model is calibrated, which takes minutes.
    """

    def show(done: float, total: float, what: str) -> None:
        print(f"\r{done / total if total else 1.0:4.0%}  {what:<60.60}", end="", file=sys.stderr)

    artifact = edgekit.export(
        model, output, "this", recipe="s4-g64", context=1024, effort="quick", report=edgekit.Reporter(show)
    )
    print(file=sys.stderr)
    print(f"{artifact.folder}: {artifact.manifest.self_check}")
    return artifact.folder


def main(model: str, output: str) -> None:
    will_it_fit(model, ["iphone-16-pro", "raspberry-pi-5-8gb"])
    with edgekit.open(export_here(model, Path(output))) as runtime:
        print(runtime.generate("def add(a, b):", max_tokens=16).text)


if __name__ == "__main__":
    main(*sys.argv[1:3])
