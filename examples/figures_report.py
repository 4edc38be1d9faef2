"""Figures that other scripts stored, as a report that the page of performance shows beside the measured ones.

python examples/figures_report.py docs/data && python -m edgekit.measure.performance docs
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from edgekit.files import write_file
from edgekit.measure.results import Figures, Report


def executorch(found: dict[str, Any]) -> Figures:
    model, size, memory, speed = found["model"], found["size"], found["memory"], found["speed"]
    rows = [
        ("lowering", f"{found['lowering']['wall_s']:.0f} s"),
        ("file over its weights in theory", f"{size['ratio']:.4f}"),
        ("memory measured over predicted", f"{1 / memory['ratio']:.3f}"),
    ]
    for name, tokens in (("decode", 1), ("verify_4", 4), ("prefill", speed["prefill"]["tokens"])):
        ours, torch = (speed[name][who]["median_s"] for who in ("program", "torch_bfloat16"))
        rows.append((f"{tokens} tokens, ms", f"{ours * 1e3:.1f}"))
        rows.append((f"{tokens} tokens, times torch eager in bfloat16", f"{torch / ours:.1f}"))
        if narrow := speed[name].get("program_8_bits"):
            rows.append((f"{tokens} tokens with an 8-bit cache, ms", f"{narrow['median_s'] * 1e3:.1f}"))
    if "narrow" in found:
        cache, held = (each["memory"]["cache_bytes"] for each in (found["narrow"], found))
        rows.append(("8-bit cache over 32 bits", f"{cache / held:.3f}"))
        rows.append(("with it, memory measured over predicted", f"{1 / found['narrow']['memory']['ratio']:.3f}"))
    return Figures(
        title=f"executorch: {model['parameters'] / 1e6:.0f} M parameters, random, {model['recipe']}, "
        f"{found['machine']['threads']} threads",
        head=("figure", "value"),
        rows=tuple(rows),
        source="examples/executorch_figures.py",
    )


def plain(title: str, source: str, found: dict[str, Any]) -> Figures:
    """Numbers under their names."""
    rows = []
    for name, value in found.items():
        if isinstance(value, dict):
            rows += [(f"{name}: {one}", f"{number:.4g}") for one, number in value.items()]
        elif isinstance(value, int | float):
            rows.append((name, f"{value:.4g}"))
    return Figures(title=title, head=("figure", "value"), rows=tuple(rows), source=source)


def main() -> None:
    data = Path(sys.argv[1])

    def stored(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((data / name).read_text())
        return found

    tables = (
        plain(
            "onnx: 1.2 B parameters, random, s4-g128, 2 threads, 512 tokens of prompt",
            "examples/onnx_figures.py",
            stored("onnx.json"),
        ),
        plain("Many requests: 1.2 B parameters on onnx", "examples/serving_figures.py", stored("serving.json")),
        executorch(stored("executorch.json")),
    )
    report = Report(title="Figures of the targets and the runtime", tables=tables)
    write_file(data / "targets.json", (report.model_dump_json(indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
