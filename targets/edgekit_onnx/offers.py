"""Offers of ONNX Runtime: the CPU, and CUDA where a wheel for the machine exists."""

from __future__ import annotations

from collections.abc import Iterator

from edgekit.contracts.device import THIS, THIS_CPU, DeviceProfile
from edgekit.contracts.plan import SpeedFacts
from edgekit.contracts.recipe import RECIPES, Recipe
from edgekit.contracts.target import Offer
from edgekit.model.spec import ModelSpec
from edgekit_onnx.capabilities import capabilities
from edgekit_onnx.memory import facts
from edgekit_onnx.product_kernels import product_kernels

_BERT_RECIPES = ("float32", "float16", "s8")
_ENCODER_RECIPES = (*_BERT_RECIPES, "s4-g32", "s4-g64")
_RECIPES = ("float16", "s8", "balanced", "s4-g32", "mixed-4.5", "s4-g64", "s4-g128")
_CPU_SPEED = SpeedFacts(
    layer_s=0.00015,
    prefill_shares=(("int8", 0.30), ("fp32", 1.2)),
    float_shares=(("fp32", 0.9),),
    spread=(0.7, 1.35),
    source="measured on 2 x86-64 cores with AVX-512 VNNI: int8 products in prefill, and 0.15 ms a layer, what steps of "
    "0.13 and 0.5 billion weights have in common (engine_turns_intel.json)",
)
_CUDA_SPEED = SpeedFacts(
    bandwidth_share=0.87,
    layer_s=0.00009,
    prefill_shares=(("fp16", 0.40), ("fp32", 0.8)),
    spread=(0.5, 1.25),
    source="prior: never run here",
)


def recipes(model: ModelSpec, backend: str) -> Iterator[Recipe]:
    """Yield the recipes to choose from, best quality first."""
    decoders = _RECIPES if backend == "cuda" else ("float32", *_RECIPES)
    encoders = _BERT_RECIPES if model.is_bert else _ENCODER_RECIPES
    for name in encoders if model.encoder else decoders:
        yield RECIPES[name]


def offer(model: ModelSpec, device: DeviceProfile, backend: str, recipe: Recipe) -> Offer:
    """Return the offer in one recipe."""
    cuda = backend == "cuda"
    return Offer(
        target="onnx",
        backend=backend,
        recipe=recipe,
        capabilities=capabilities(model, recipe, backend),
        can_be_timed=model.encoder is None and not cuda,
        memory=facts(recipe, cuda, device.name in (THIS, THIS_CPU) and product_kernels() is not None),
        speed=_CUDA_SPEED if cuda else _CPU_SPEED,
        unavailable="there is no CUDA on macOS; use the mlx target" if cuda and device.os == "macos" else None,
        notes=("written and checked on the CPU provider; never run on CUDA",) if cuda else (),
    )
