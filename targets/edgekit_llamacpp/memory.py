"""What llama.cpp allocates: the file, and buffers of the planned sizes, as it logs them on x86-64 Linux."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from edgekit.common.units import MIB
from edgekit.contracts.device import DeviceProfile
from edgekit.contracts.memory import LayerArrays, MemoryLoad, Term, sized
from edgekit.contracts.plan import MemoryFacts
from edgekit.contracts.recipe import Recipe
from edgekit.contracts.token_costs import CacheFormat
from edgekit.model.spec import ModelSpec
from edgekit.quant.neutral_gguf import stored_bytes
from edgekit_llamacpp.context import CELLS, OUTPUTS
from edgekit_llamacpp.exactness import SPARE_TOKENS

CACHE = CacheFormat(scale_bits=16, groups=(32,), step_tokens=CELLS)
ARRAYS = LayerArrays(hidden_copies=5.0, head_copies=1.0)
_MASK_BITS, _EXACT_MASK_BITS, _SCORE_BYTES = 16, 32, 4


def facts(device: DeviceProfile, backend: str) -> MemoryFacts:
    """Return how the weights are stored, and where the layers on a GPU lie. Metal maps the file, others copy it."""
    kind: Literal["own", "shared", "mapped"] = "own" if device.vram else "mapped" if backend == "metal" else "shared"
    on_gpu = backend != "cpu"
    prior = "prior: the layers on the GPU as they are stored, and buffers as large as the processor's on both sides; "
    return MemoryFacts(
        runtime_bytes=41 * MIB,
        scale_bits=16,
        scale_group=32,
        gpu_memory=kind if on_gpu else None,
        source=(prior if on_gpu else "")
        + "the file, its 4-bit matrices copied once more in the order of the kernels; buffers as llama.cpp logs "
        "them on x86-64 Linux",
    )


def memory_terms(load: MemoryLoad) -> list[Term]:
    """Return the terms of a model on a processor alone."""
    if load.exact:
        load = load._replace(held_tokens=load.held_tokens + SPARE_TOKENS)
    weights = load.weights(mapped=1.0, copied=_repacked_share(load.model, load.recipe))
    caches = load.caches(CACHE)
    return [*weights, caches, *load.peak(_step(load), [*weights, caches]), *load.runtime(), load.adapter()]


@lru_cache(maxsize=64)
def _repacked_share(model: ModelSpec, recipe: Recipe) -> float:
    """Return the share of the file that is copied once more, in the order of the kernels."""
    stored, repacked = stored_bytes(model, recipe)
    return repacked / stored


def _step(load: MemoryLoad) -> list[Term]:
    """Return the step for which buffers are allocated: a chunk, and the rows of logits of all sequences."""
    model, cells, rows = load.model, CACHE.tokens(load.held_tokens), load.logit_rows + OUTPUTS
    tokens = load.call_tokens(cells * load.sequences)  # there is room for one chunk of every sequence
    # Reserved rows reuse the memory of a layer's arrays, except the residual.
    reserved = min(rows, OUTPUTS)
    row = ARRAYS.row_bytes(model)
    residual = round(tokens * ARRAYS.hidden_copies * model.hidden_size * ARRAYS.bits / 8)
    size = max(ARRAYS.layers_bytes(model, tokens), residual + reserved * row) + (rows - reserved) * row
    largest = load.layer(ARRAYS, tokens, rows, size)
    if not load.exact:
        return [largest, load.masks(tokens, cells, _MASK_BITS)]
    # Exact mode holds a chunk's attention scores over the whole cache, and its masks in 32 bits.
    heads = max(sum(model.qkv_widths(layer)) for layer in model.layers)
    scores = residual + _SCORE_BYTES * tokens * (model.heads * cells + 2 * heads)
    if scores > size:
        largest = sized("activation_bytes", scores, "of attention's scores")
    return [largest, load.masks(tokens, cells, _EXACT_MASK_BITS)]
