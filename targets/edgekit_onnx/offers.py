"""Offers of ONNX Runtime: the CPU, and CUDA where a wheel for the machine exists."""

from __future__ import annotations

from collections.abc import Iterator

from edgekit.common.units import KIB, MIB
from edgekit.contracts.device import DeviceProfile
from edgekit.contracts.plan import MemoryFacts, SpeedFacts
from edgekit.contracts.recipe import RECIPES, Recipe
from edgekit.contracts.target import Offer
from edgekit.model.spec import ModelSpec
from edgekit_onnx.capabilities import capabilities
from edgekit_onnx.float16_kv import TOKENS_AT_ONCE
from edgekit_onnx.kernels import planned_kernels

DERIVING_BYTES = 4 * MIB  # the onnx package, which derives graphs: 3.9 MiB were measured
ADAPTED_LINEAR_BYTES = 58 << 10  # measured: 54 and 63 KB on models of 30 and 6 layers
_DELTA_RULE_BYTES = 1 * MIB  # of the graph of a delta rule: 19 MiB were measured for 18 layers
_BERT_RECIPES = ("float32", "float16", "s8")
_ENCODER_RECIPES = (*_BERT_RECIPES, "s4-g32", "s4-g64")
_RECIPES = ("float16", "s8", "balanced", "s4-g32", "mixed-4.5", "s4-g64", "s4-g128")
# The arena of activations shrinks with a call for logits once earlier calls exceeded both limits. Memory kept for one
# size does not serve a larger one, and returning it takes little time compared with processing that many tokens.
KEPT_TOKENS, RETURNED_BYTES = 32, 1 * MIB

_CPU_MEMORY = MemoryFacts(
    mapped_share=1.0,
    private_share=0.0,
    runtime_bytes=42 * MIB,
    library_bytes=9 * MIB + 256 * KIB,  # 32.7 MiB were measured before the tokenizer is read
    deriving_bytes=DERIVING_BYTES,
    layer_bytes=118 * KIB,
    adapted_linear_bytes=ADAPTED_LINEAR_BYTES,
    opening_share=1.0,
    opening_scale_share=1.46,
    cache_scale_bits=0,
    half_cache_tokens=TOKENS_AT_ONCE,
    scale_bits=32,
    bias_bits=32,  # packed weights store the sum of every block with its scale
    row_group=128,
    float_bits=32,
    activation_bits=32,
    hidden_copies=8.7,
    inner_copies=2.7,
    head_copies=2.65,
    reuses_activations=False,  # its arena keeps free memory in pieces of the requested sizes
    running_bytes=2 * MIB + 640 * KIB,
    returned_bytes=RETURNED_BYTES,
    verified_tokens=KEPT_TOKENS,
    looked_up_bytes=1 * MIB,  # the system maps the pages around a row too: 10 MiB for ten rows
    own_row_bytes=2 * MIB,  # the system maps as much around a row; 1.7 MB were measured
    own_input_copies=12.0,
    recurrent_copies=1.0,
    disk_share=3.3,
    cached_share=2.4,
    source="measured on x86-64 Linux over random models of 0.01 to 1.2 billion weights "
    "(examples/benchmarks/memory_contract.py); weights saved pre-packed are mapped, and that copy takes 2.4 "
    "times the artifact",
)
_CPU_SPEED = SpeedFacts(
    layer_s=0.00015,
    prefill_shares=(("int8", 0.30), ("fp32", 1.2)),
    float_shares=(("fp32", 0.9),),
    spread=(0.7, 1.35),
    source="measured on 2 x86-64 cores with AVX-512 VNNI: int8 products in prefill, and 0.15 ms a layer, what steps of "
    "0.13 and 0.5 billion weights have in common (engine_turns_intel.json)",
)
_CUDA_MEMORY = MemoryFacts(
    mapped_share=0.0,
    private_share=1.0,
    runtime_bytes=600 * MIB,
    scale_bits=16,
    row_group=128,
    float_bits=16,
    activation_bits=16,
    source="prior: weights are copied to the device, the CUDA context and libraries take some 600 MiB",
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
        memory=_memory(model, recipe, cuda),
        speed=_CUDA_SPEED if cuda else _CPU_SPEED,
        unavailable="there is no CUDA on macOS; use the mlx target" if cuda and device.os == "macos" else None,
        notes=("written and checked on the CPU provider; never run on CUDA",)
        if cuda
        else planned_kernels(device.simd, recipe),
    )


def _memory(model: ModelSpec, recipe: Recipe, cuda: bool) -> MemoryFacts:
    facts = _CUDA_MEMORY if cuda else _CPU_MEMORY
    # The scale of an s8 row is repeated for groups of the other matrices' size.
    group = min((rule.format.group for rule in recipe.rules if rule.format.group), default=facts.row_group)
    numbers = sum(rope.dim for rope in model.ropes.values())  # a cosine and a sine for each rotated pair
    rules = sum(layer.delta_rule is not None for layer in model.layers)
    layer_bytes = facts.layer_bytes + _DELTA_RULE_BYTES * rules // len(model.layers)
    return facts.model_copy(
        update={"row_group": group, "position_bytes": 0 if cuda else 4 * numbers, "layer_bytes": layer_bytes}
    )
