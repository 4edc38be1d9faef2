"""The conformance suites on every target: bitwise in exact mode, otherwise within rounding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import family_models as models
import pytest
from configs import TINY
from engines import make_model, row, spaced

from edgekit.device.load import load_profile
from edgekit.enginekit import recurrent as parts
from edgekit.model.families import model_from_config
from edgekit.plugins import load_target
from edgekit.testing import check_engine, check_export, check_target, write_adapter

SLOW, LONG = (pytest.mark.slow,), (pytest.mark.long,)
FAST, WIDE = {"level": 4}, "llama 3 rope, wide heads"
HYBRIDS, RECURRENT = ("lfm2", "qwen3_5"), [family for family in models.RECURRENT if "biases" in family]
NEAR = {32: 1e-5, 16: 5e-3, 8: 5e-3}  # of ONNX Runtime with float activations
LLAMACPP = {32: 0.08, 16: 0.08, 8: 0.1, 4: 0.3}


def exact(target: str, family: str, recipe: str, sequences: int, marks: Any = (), tolerance: float = 0.0, **more: Any):
    name = "-".join((family, recipe, "exact", *(f"{key} {value}" for key, value in more.items() if key != "level")))
    return row(target, family, recipe, True, tolerance, sequences, more, marks=marks, name=name)


def near(target: str, family: str, recipe: str, sequences: int, tolerance: float, marks: Any = (), **more: Any):
    name = "-".join((family, recipe, "near", *(f"{key} {value}" for key, value in more.items() if key != "level")))
    return row(target, family, recipe, False, tolerance, sequences, more, marks=marks, name=name)


def onnx() -> list[Any]:
    one = {**FAST, "exits": (1,)}
    families = ("mistral with a window", "qwen3", "smollm3", "phi3 with longrope", "gemma2", "gemma3", "hunyuan")
    rows = [exact("onnx", "llama", recipe, 10, **one) for recipe in ("s4-g32", "s4-g128", "s8", "float32")]
    rows += [exact("onnx", family, "s4-g64", 6, SLOW, **one) for family in families]
    rows += [exact("onnx", "qwen3", recipe, 6, kv_bits=8, **one) for recipe in ("s4-g64", "s8")]
    rows += [exact("onnx", "llama", "s4-g32", 10, kv_bits=8, exits=(1,))]
    rows += [near("onnx", "llama", "s4-g64", 15, NEAR[bits], planned=bits, exits=(1,)) for bits in (32, 16)]
    rows += [near("onnx", "llama", "s4-g32", 10, NEAR[bits], kv_bits=bits, exits=(1,), pieces=5) for bits in (16, 8)]
    rows += [exact("onnx", family, "s4-g64", 10, spacing=4, **FAST) for family in HYBRIDS]
    for family, bits in zip(RECURRENT * 2, (32, 16, 8), strict=False):
        rows += [near("onnx", family, "s4-g64", 6, 1e-5 if bits == 32 else 0.1, kv_bits=bits, spacing=4, pieces=5)]
    rows += [exact("onnx", "gemma4", "s4-g64", 15, **FAST)]
    rows += [near("onnx", "gemma4", "s4-g64", 10, 0.1, marks, kv_bits=bits) for bits, marks in ((16, LONG), (8, ()))]
    rows += [near("onnx", list(models.SHARING)[1], "s4-g64", 40, 1e-5)]
    for family, recipe in zip(models.EXPERTS, ("s4-g32", "s8", "s4-g32", "float32", "s8"), strict=True):
        rows += [exact("onnx", family, recipe, 6, SLOW if family in ("mixtral", "gpt_oss") else LONG, **one)]
    rows += [near("onnx", "qwen3_moe", "s4-g32", 10, 1e-4, exits=(1,)), near("onnx", "lfm2_moe", "s4-g32", 10, 1e-4)]
    rows += [exact("onnx", "llama", "s4-g32", 6, head=(1, 2, 3), **one)]
    rows += [near("onnx", "llama", "s4-g32", 10, 0.05, head=(1, 2, 3), **one)]
    for family in HYBRIDS:
        rows += [exact("onnx", family, "s4-g32", 10, head=(1, 2, 3), **FAST)]
        rows += [near("onnx", family, "s4-g32", 5, 0.05, LONG, head=(1, 2, 3), **FAST)]
    rows += [exact("onnx", "llama", recipe, 5, adapter_rank=8, **one) for recipe in ("s4-g32", "float32")]
    return [*rows, near("onnx", "llama", "s4-g32", 5, 1e-5, adapter_rank=8, exits=(1,))]


def mlx() -> list[Any]:
    # Shared, layers without positions; below, windows and experts (gpt_oss) and fused (phi3). Others differ in what a
    # layer computes alone.
    usual = ("gemma4", "cohere2")
    rows = [exact("mlx", family, "s4-g32", 6) for family in usual]
    rows += [exact("mlx", "gemma2", "s4-g32", 6, head=(1, 2, 3, 1))]
    rows += [exact("mlx", "lfm2", "s4-g32", 6, LONG, head=(1, 2, 3, 1))]
    rows += [exact("mlx", family, "s4-g32", 6, LONG) for family in models.EVERY if family not in usual]
    rows += [exact("mlx", family, "s4-g32", 6, kv_bits=bits) for family, bits in ((WIDE, 16), ("gpt_oss", 8))]
    for family, spacing, marks in (("lfm2", 4, LONG), ("lfm2_moe", 128, LONG), ("qwen3_5", 4, ())):
        rows += [exact("mlx", family, "s4-g64", 6, marks, spacing=spacing, adapter_rank=8)]
    for family, bits, marks in zip(RECURRENT, (4, 8), ((), LONG), strict=True):
        rows += [exact("mlx", family, "s4-g64", 6, marks, kv_bits=bits, spacing=4)]
    rows += [exact("mlx", "one layer", "s4-g32", 5, tolerance=1e-5, memoryless=True)]
    return [*rows, exact("mlx", "phi3 with longrope", "s4-g32", 5, adapter_rank=8)]


def llamacpp() -> list[Any]:
    others = ("llama untied, with biases", WIDE, "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma2", "one layer")
    rows = [exact("llamacpp", each, "s4-g32", 6, tolerance=0.06) for each in ("llama", "llama with yarn", "gemma3")]
    rows += [exact("llamacpp", family, "s4-g32", 6, SLOW, tolerance=0.06) for family in (*others, "wide heads")]
    formats = (("s8", 32), ("float16", 16), ("float32", 16))
    rows += [exact("llamacpp", "llama", recipe, 6, tolerance=0.06, planned=bits) for recipe, bits in formats]
    rows += [exact("llamacpp", "wide heads", "s4-g128", 6, tolerance=0.06, planned=32)]
    rows += [near("llamacpp", "wide heads", "s4-g32", 6, found, planned=bits) for bits, found in LLAMACPP.items()]
    return rows + [
        exact("llamacpp", family, "float32", 3, tolerance=0.06, planned=32, adapter_rank=8)
        for family in ("llama", "qwen3")
    ]


def executorch() -> list[Any]:
    one: dict[str, Any] = {"exits": (1,)}
    rows = [exact("executorch", "qwen2", "s4-g32", 4, tolerance=0.05, **one)]
    rows += [exact("executorch", "qwen2", "s4-g32", 4, LONG, tolerance=0.05, planned=8, **one)]
    rows += [near("executorch", "qwen2", "s4-g32", 4, 0.05, LONG, **one, **more) for more in ({}, {"planned": 8})]
    rows += [near("executorch", "gemma3", "float32", 4, 1e-4, LONG)]
    rows += [near("executorch", "gemma2", "float32", 4, 0.03, LONG, planned=8)]
    rows += [exact("executorch", "qwen2", "s4-g32", 6, LONG, head=(2, 1, 2), **one)]
    return [*rows, near("executorch", "qwen2", "s4-g32", 6, 0.3, LONG, head=(2, 1, 2), **one)]


@pytest.mark.parametrize(
    ("target", "family", "recipe", "is_exact", "tolerance", "sequences", "more"),
    [*onnx(), *mlx(), *llamacpp(), *executorch()],
)
@pytest.mark.parametrize("times", [1, pytest.param(15, marks=LONG)])
def test_an_engine_passes_the_suite(
    target: str, family: str, recipe: str, is_exact: bool, tolerance: float, sequences: int, more: dict[str, Any],
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`planned`: the width of the plan's cache; `kv_bits`: the only one that is offered of several."""
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    options: dict[str, Any] = dict(more)
    kv_bits, memoryless = options.pop("kv_bits", 0), options.pop("memoryless", False)
    if spacing := options.pop("spacing", 0):
        options["chunk_tokens"] = 16
        spaced(monkeypatch, spacing)
        monkeypatch.setattr(parts, "MOST_UNCERTAIN", 4 if kv_bits else parts.MOST_UNCERTAIN)  # a piece holds all
    if pieces := options.pop("pieces", 0):
        monkeypatch.setattr("edgekit_onnx.runner.TOKENS_AT_ONCE", pieces)
    if planned := options.pop("planned", 0):
        options["kv_bits"] = planned
    made, kv_bits = make_model(target, family, recipe, **options), kv_bits or planned * (target == "llamacpp")
    adapters = None
    if "adapter_rank" in options:
        one = write_adapter(tmp_path / "one", made.plan.model, seed=3, rank=3, only=lambda name: "mlp" not in name)
        two = write_adapter(tmp_path / "two", made.plan.model, seed=8, rank=8)
        adapters = (one, two)
    check_engine(
        lambda: made.open(exact=is_exact and target != "mlx", kv_bits=kv_bits),
        exact=is_exact, tolerance=tolerance, sequences=times * sequences, memoryless=memoryless, adapters=adapters,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("target", "family", "tolerance"),
    [row("onnx", "llama", 0.0), row("mlx", "one layer", 0.0), row("llamacpp", "one layer", 0.06)],
)
def test_an_export_passes_the_suite(target: str, family: str, tolerance: float) -> None:
    made = make_model(target, family, **(FAST if target == "onnx" else {}))
    check_export(load_target(target), made.plan, made.weights, exact=True, tolerance=tolerance, sequences=5)


@pytest.mark.parametrize(
    ("target", "family", "devices"),
    [
        ("onnx", "llama", ("pixel-9", "macbook-m4-16gb", "laptop-x86-8gb")),
        ("mlx", "mixtral", ("macbook-m4-16gb", "laptop-x86-8gb")),
        ("executorch", "gemma2", ("pixel-9", "iphone-16", "laptop-x86-8gb")),
        ("llamacpp", "llama", ("laptop-x86-8gb", "macbook-m4-16gb", "raspberry-pi-5-8gb", "pixel-9")),
        ("llamacpp", "gemma3", ("laptop-x86-8gb", "macbook-m4-16gb", "raspberry-pi-5-8gb", "pixel-9")),
    ],
)
def test_offers_pass_the_suite(target: str, family: str, devices: tuple[str, ...]) -> None:
    model = model_from_config(TINY[family], family, "config.json")
    check_target(load_target(target), [load_profile(name) for name in devices], model)


EXPORTING = """
import pathlib, sys
sys.modules.update(dict.fromkeys(("mlx", "mlx.core", "xllamacpp", "llama_cpp", "torch")))  # importing one fails
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.plugins import load_target
plan, out = Plan.model_validate_json(pathlib.Path(sys.argv[1]).read_text()), pathlib.Path(sys.argv[3])
out.mkdir()
load_target(plan.target).export(plan, NeutralWeights.open(sys.argv[2]), out, lambda *_: None)
"""


@pytest.mark.parametrize("target", [row("mlx"), row("llamacpp")])
def test_exporting_loads_neither_the_vendors_library_nor_torch(target: str, tmp_path: Path) -> None:
    made = make_model(target, "llama")
    (tmp_path / "plan.json").write_text(made.plan.to_json())
    words = [sys.executable, "-c", EXPORTING, tmp_path / "plan.json", made.weights.folder, tmp_path / "out"]
    subprocess.run(words, check=True)
    for path in made.files.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
