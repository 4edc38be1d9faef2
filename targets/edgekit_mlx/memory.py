"""What MLX allocates: weights and caches as its own arrays, equal to its counters on Linux."""

from __future__ import annotations

from edgekit.common.units import MIB
from edgekit.contracts.memory import LayerArrays, MemoryLoad, Term, usual_terms
from edgekit.contracts.neutral import is_module
from edgekit.contracts.plan import MemoryFacts
from edgekit.contracts.recipe import GROUPS
from edgekit.contracts.recurrent import is_recurrent
from edgekit.model.spec import ModelSpec

_PAGE_BYTES = 16 << 10  # of Apple's systems; a row begins and ends inside pages
_METAL_RUNTIME_BYTES, _CPU_RUNTIME_BYTES = 150 * MIB, 41 * MIB


def facts(model: ModelSpec, *, on_metal: bool) -> MemoryFacts:
    """Return how the weights are stored, and what the runtime takes."""
    bits = 16 if on_metal else 32
    return MemoryFacts(
        runtime_bytes=_METAL_RUNTIME_BYTES if on_metal else _CPU_RUNTIME_BYTES,
        scale_bits=bits,
        bias_bits=bits,
        row_group=_row_group(model),
        float_bits=bits,
        own_row_bytes=_PAGE_BYTES,
        source="weights and caches: the sizes of MLX's own arrays, equal to its counters on Linux; activations twice, "
        "as MLX holds them on Linux until a layer is done, in hybrid models of both its halves; interpreter and "
        "libraries: "
        + ("a prior for macOS" if on_metal else "measured on Linux, private memory of three models less all others"),
    )


def _row_group(model: ModelSpec) -> int:
    """Return the group for which an s8 row's scale is repeated: the largest that divides every input size."""
    inputs = {tensor.shape[-1] for tensor in model.tensors() if is_module(tensor)}
    return next((group for group in GROUPS if all(each % group == 0 for each in inputs)), GROUPS[-1])


def memory_terms(load: MemoryLoad) -> list[Term]:
    """Return the terms of a model."""
    model = load.model
    arrays = LayerArrays(
        bits=32 if load.backend == "metal" else 64,  # twice, as MLX holds them on Linux until a layer is done
        # Fitted to Qwen3.5-0.8B, whose queries, keys and values also pass a convolution.
        head_copies=2.75 if any(layer.delta_rule for layer in model.layers) else 2.0,
        reuses=not is_recurrent(model),
    )
    return usual_terms(load, arrays=arrays)
