"""Offers of llama.cpp: CPUs on Linux and macOS, and the GPUs that a profile names, on which we never ran it."""

from __future__ import annotations

from collections.abc import Iterator

from edgekit.contracts.device import OS_TITLES, DeviceProfile
from edgekit.contracts.plan import SpeedFacts
from edgekit.contracts.recipe import GGUF_RECIPES, RECIPES, SMALL, Recipe
from edgekit.contracts.target import Offer
from edgekit.model.spec import ModelSpec
from edgekit_llamacpp.capabilities import capabilities
from edgekit_llamacpp.memory import facts

# Its blocks hold 32 values, so larger groups lose accuracy without saving bytes: they come last.
_RECIPES = ("float32", "float16", "s8", "balanced", "s4-g32", "mixed-4.5", "s4-g64", "s4-g128")

_ON_WINDOWS = "xllamacpp's library for Windows does not export llama.cpp's C API; use --target onnx"
_SPEED = SpeedFacts(
    bandwidth_share=0.92,
    layer_s=0.00015,
    prefill_shares=(("int8", 0.15), ("fp32", 0.6)),
    float_shares=(("fp32", 0.6),),
    row_share=0.36,
    spread=(0.65, 1.3),
    source="0.92 of what a Pi 5 can read (justine.lol/matmul); prompts at half of onnx's speed, one row at 0.36 of a "
    "prompt's, 0.15 ms a layer (engine_turns_amd.json and _intel.json, 0.5 and 0.13 billion weights)",
)
_CUDA = SpeedFacts(
    layer_s=0.00009,
    prefill_shares=(("fp16", 0.6), ("fp32", 1.2)),
    float_shares=(("fp16", 0.8), ("fp32", 1.6)),
    spread=(0.5, 1.25),
    source="Llama-3-8B at two widths on an RTX 4090 (XiongjieDai/GPU-Benchmarks-on-LLM-Inference); Jetsons gave half "
    "of that (nvidia-holoscan/holohub#170)",
)
_SLOW_PROMPTS = {"prefill_shares": (("fp16", 0.2), ("fp32", 0.4)), "float_shares": ()}  # a Radeon 8060S, from memory
_GPU_SPEEDS = {
    "metal": SpeedFacts(
        layer_s=0.00015,
        prefill_shares=(("fp16", 0.68), ("fp32", 0.68)),
        float_shares=(("fp16", 0.72), ("fp32", 0.72)),
        spread=(0.75, 1.2),
        source="llama-2-7b at three widths on ten chips (ggml-org/llama.cpp discussions/4167): 0.12 to 0.23 ms a layer",
    ),
    "cuda": _CUDA,
    "vulkan": _CUDA.model_copy(update=_SLOW_PROMPTS),
}


def recipes() -> Iterator[Recipe]:
    """Yield the recipes to choose from, best quality first; llama.cpp's own mixtures last."""
    for name in _RECIPES:
        yield RECIPES[name]
    yield from GGUF_RECIPES.values()
    yield SMALL


def offer(model: ModelSpec, device: DeviceProfile, backend: str, recipe: Recipe) -> Offer:
    """Return the offer in one recipe."""
    # Refusals that depend on the context (windows) come when the plan is known; evictions must work in any.
    able, shortest = (capabilities(model, recipe, backend, context) for context in (model.max_positions, 1))
    notes = [] if device.os in ("linux", "windows") else [f"never run by us on {OS_TITLES[device.os]}"]
    on_gpu = backend != "cpu"
    if on_gpu:
        notes.append(f"layers on a GPU ({backend}) were never run by us; exact mode is checked at opening")
    if recipe.is_native():
        notes.append("llama.cpp's own formats, quantised from the float model instead of the neutral weights")
    return Offer(
        target="llamacpp",
        backend=backend,
        recipe=recipe,
        capabilities=able.model_copy(update={"refusal": shortest.refusal}),
        only_by_name=True,  # until it is timed together with the other engines
        can_be_timed=not on_gpu,
        memory=facts(device, backend),
        speed=_GPU_SPEEDS[backend] if on_gpu else _SPEED,
        unavailable=_ON_WINDOWS if device.os == "windows" else None,
        notes=tuple(notes),
    )
