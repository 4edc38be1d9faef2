"""`edgekit inspect`: the contents of a folder of neutral weights, of a sealed artifact or of a GGUF file."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import click
from pydantic import Field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgekit.artifact import artifact
from edgekit.cli._console import console as new_console, print_below
from edgekit.cli._options import json_option, options
from edgekit.common.base import Frozen
from edgekit.common.units import show_bytes
from edgekit.contracts.installed import holds_artifact
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import source_notes
from edgekit.contracts.recipe import bits_per_weight, weight_bytes
from edgekit.errors import InvalidInput
from edgekit.model.source import open_source, open_tensors
from edgekit.quant.own_integers import own_integers
from edgekit.runtime.generation.chat_format import chat_format
from edgekit.runtime.generation.chat_template import read_template
from edgekit.runtime.generation.tokenizer import read_codec, read_eos

_BLOCK_VALUES = 1 << 20


class InspectOptions(Frozen):
    tensor: str | None = Field(
        default=None, description="Show one module: its scales, its integers and its rounding error."
    )
    verify: bool = Field(default=False, description="Check every hash and every scale as well.")
    chat_format: bool = Field(default=False, description="Print the strings between chat messages, as JSON.")


@click.command()
@click.argument("folder", metavar="PATH", type=Path)
@options(choice=InspectOptions)
@json_option("Print JSON.")
def command(folder: Path, choice: InspectOptions, as_json: bool) -> None:
    """Show the contents of PATH: neutral weights from `quantize`, an artifact from `export`, or a GGUF file."""
    console, tensor = new_console(soft_wrap=True, wide=200), choice.tensor
    if choice.chat_format:
        _print_chat_format(folder)
        return
    if folder.suffix.lower() == ".gguf" and not folder.is_dir():
        if tensor is not None or choice.verify:
            raise InvalidInput(f"{folder} is a GGUF file; --tensor and --verify are for files that edgekit wrote")
        gguf = _gguf_facts(folder)
        _print_json(gguf) if as_json else _print_gguf(console, gguf)
        return
    if holds_artifact(folder):
        if tensor is not None:
            raise InvalidInput(f"{folder} is an artifact; --tensor looks into neutral weights (`edgekit quantize`)")
        sealed = artifact.verify(folder) if choice.verify else artifact.read_manifest(folder)
        facts = {"sha256": sealed.sha256, "manifest": sealed.manifest.model_dump(mode="json")}
        _print_json(facts) if as_json else _print_artifact(console, sealed)
        return
    weights = NeutralWeights.open(folder, verify=choice.verify)
    if tensor is not None:
        facts = _module_facts(weights, tensor)
        _print_json(facts) if as_json else _print_module(console, facts)
    else:
        rows = [_row(weights, module) for module in weights.modules()]
        if as_json:
            _print_json(_weights_facts(weights) | {"modules": rows})
        else:
            _print_weights(console, weights, rows)


def _print_chat_format(folder: Path) -> None:
    sealed = artifact.read_manifest(folder)
    codec, ends = read_codec(sealed.folder), read_eos(sealed.folder, sealed.plan.model.eos_ids)
    with closing(read_template(sealed.folder)) as template:
        written = [codec.decode([token], skip_special=False) for token in sorted(ends)]
        _print_json(chat_format(template, written).model_dump())


def _print_json(facts: dict[str, Any]) -> None:
    click.echo(json.dumps(facts, indent=1))


def _weights_facts(weights: NeutralWeights) -> dict[str, Any]:
    manifest = weights.manifest
    return {
        "model": weights.model.name,
        "family": weights.model.family,
        "parameters": weights.model.parameters,
        "recipe": weights.recipe.name,
        "method": manifest.method,
        "calibration": manifest.calibration.model_dump() if manifest.calibration else None,
        "bits_per_weight": round(bits_per_weight(weights.model, weights.recipe), 4),
        "weight_bytes": weight_bytes(weights.model, weights.recipe),
        "sha256": weights.sha256,
        "source_files": manifest.source_files,
        "tools": manifest.tools,
        "notes": list(manifest.notes),
    }


def _row(weights: NeutralWeights, module: str) -> dict[str, Any]:
    tensor, stored = weights.tensor_of(module), weights.format_of(module)
    statistics = weights.manifest.statistics.get(module)
    return {
        "module": module,
        "shape": list(tensor.shape),
        "format": str(stored),
        "bits_per_weight": round(stored.bytes(tensor.shape) * 8 / tensor.size, 3),
        "bytes": stored.bytes(tensor.shape),
        "weight_error": statistics.weight_error if statistics else None,
        "output_error": statistics.output_error if statistics else None,
    }


def _print_weights(console: Console, weights: NeutralWeights, rows: list[dict[str, Any]]) -> None:
    facts = _weights_facts(weights)
    rest = f" by {facts['method']}, {facts['bits_per_weight']:.3f} bits per weight, {show_bytes(facts['weight_bytes'])}"
    console.print(Text.assemble((facts["model"], "bold"), f" ({facts['family']}) as ", (facts["recipe"], "bold"), rest))
    text = facts["calibration"]
    print_below(f"calibration {text['description']}, sha256 {text['sha256'][:16]}" if text else "no calibration")
    print_below(f"sha256 {facts['sha256']}")
    for name, sha256 in facts["source_files"].items():
        print_below(f"made of {name} {sha256[:16]}")
    print_below("made by " + ", ".join(f"{name} {version}" for name, version in facts["tools"].items()))
    for note in facts["notes"]:
        print_below(f"note {note}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("module", "shape", "format", "bits", "size", "weight error", "output error"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("module", "format") else "right")
    for row in rows:
        table.add_row(
            row["module"],
            " × ".join(map(str, row["shape"])),
            row["format"],
            f"{row['bits_per_weight']:.2f}",
            show_bytes(row["bytes"]),
            _percent(row["weight_error"]),
            _percent(row["output_error"]),
        )
    console.print(table)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.3%}"


def _module_facts(weights: NeutralWeights, module: str) -> dict[str, Any]:
    """Compute exact statistics of a module's scales and integers, block by block of rows."""
    import numpy as np

    facts = _row(weights, module)
    if weights.format_of(module).is_float:
        return facts
    scales = weights.scales(module)
    outputs, inputs = weights.tensor_of(module).shape
    step = max(1, _BLOCK_VALUES // inputs)
    counts: Any = np.zeros(256, np.int64)
    for start in range(0, outputs, step):
        values = weights.integers(module, slice(start, start + step))
        counts += np.bincount(values.reshape(-1).astype(np.int16) + 128, minlength=256)
    used = np.flatnonzero(counts)
    edge = counts[used[0]] + counts[used[-1]]
    return facts | {
        "scales": {
            "count": int(scales.size),
            "least": float(scales.min()),
            "median": float(np.median(scales)),
            "greatest": float(scales.max()),
            "first_row": [float(value) for value in scales[0, :8]],
        },
        "integers": {
            "least": int(used[0]) - 128,
            "greatest": int(used[-1]) - 128,
            "zeros": int(counts[128]) / (outputs * inputs),
            "at_the_ends": int(edge) / (outputs * inputs),
        },
    }


def _print_module(console: Console, facts: dict[str, Any]) -> None:
    shape = " × ".join(map(str, facts["shape"]))
    console.print(
        Text.assemble((facts["module"], "bold"), f" {shape}, {facts['format']}, {show_bytes(facts['bytes'])}")
    )
    if facts["weight_error"] is not None:
        console.print(f"  rounding error {facts['weight_error']:.4%} of the squared weights")
    if facts["output_error"] is not None:
        console.print(f"  and {facts['output_error']:.4%} of the squared outputs on the calibration text")
    if "scales" in facts:
        scales, integers = facts["scales"], facts["integers"]
        console.print(
            f"  {scales['count']:,} scales from {scales['least']:.3g} to {scales['greatest']:.3g},"
            f" median {scales['median']:.3g}"
        )
        console.print("  first row: " + " ".join(f"{value:.4g}" for value in scales["first_row"]))
        console.print(
            f"  integers from {integers['least']} to {integers['greatest']}; {integers['zeros']:.1%} zeros,"
            f" {integers['at_the_ends']:.1%} at the ends"
        )


def _gguf_facts(path: Path) -> dict[str, Any]:
    """Describe the model of a GGUF file and the storage of each tensor."""
    source = open_source(path)
    own = own_integers(source)
    with open_tensors(source.weights) as tensors:
        files = {name: place.stat().st_size for name, place in tensors.files.items()}
        rows = [
            {"tensor": name, "shape": list(entry.shape), "type": entry.dtype, "bytes": entry.bytes}
            for name, entry in tensors.entries.items()
        ]
    return {
        "model": source.name,
        "family": source.spec.family,
        "parameters": source.spec.parameters,
        "context": source.spec.max_positions,
        "quantised_as": source.quantised_as,
        "files": files,
        "companions": str(source.folder),
        "notes": [
            *source.notes,
            *source_notes(source.quantised_as, own.recipe if own else None),
            *(own.notes if own else ()),
        ],
        "tensors": rows,
    }


def _print_gguf(console: Console, facts: dict[str, Any]) -> None:
    size = show_bytes(sum(facts["files"].values()))
    rest = f" ({facts['family']}), {facts['parameters']:,} parameters, context {facts['context']:,}, {size}"
    console.print(Text.assemble((facts["model"], "bold"), rest))
    console.print(f"  config and tokenizer in {facts['companions']}")
    for note in facts["notes"]:
        print_below(f"note {note}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("tensor", "shape", "type", "size"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("tensor", "type") else "right")
    for row in facts["tensors"]:
        table.add_row(row["tensor"], " × ".join(map(str, row["shape"])), row["type"], show_bytes(row["bytes"]))
    console.print(table)


def _print_artifact(console: Console, sealed: artifact.Artifact) -> None:
    plan, manifest = sealed.plan, sealed.manifest
    rest = f" as {plan.built_as}, context {plan.context:,}, {plan.storage.kv_bits}-bit cache"
    console.print(Text.assemble((plan.model.name, "bold"), " for ", (plan.device, "bold"), rest))
    print_below(f"sha256 {sealed.sha256}")
    print_below(f"neutral weights {manifest.weights_sha256}")
    print_below(f"self-check: {manifest.self_check}")
    private, mapped = plan.estimate.private_bytes, plan.estimate.mapped_weights_bytes
    console.print(
        f"  planned {show_bytes(private)} of private memory, {show_bytes(plan.budget_bytes)} allowed,"
        f" and {show_bytes(mapped)} of mapped weights; {plan.speed.decode_tokens_per_s:g} tok/s"
    )
    print_below("made by " + ", ".join(f"{name} {version}" for name, version in manifest.tools.items()))
    for note in (*plan.source_notes, *plan.kv_notes):
        print_below(f"note {note}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("file", "size", "sha256"):
        table.add_column(name, no_wrap=True)
    for name, fact in manifest.files.items():
        table.add_row(name, show_bytes(fact.bytes), fact.sha256[:16])
    console.print(table)
