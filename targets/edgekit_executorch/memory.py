"""What an ExecuTorch program allocates: all its buffers have the planned size, whatever a caller requests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from edgekit.common.units import MIB
from edgekit.contracts.device import DeviceProfile
from edgekit.contracts.memory import LayerArrays, MemoryLoad, Term, sized, usual_terms
from edgekit.contracts.plan import MemoryFacts
from edgekit.contracts.recipe import RECIPES, Recipe, weight_bytes
from edgekit.contracts.stored_weights import tensor_bytes
from edgekit.contracts.token_costs import CacheFormat
from edgekit.model.spec import ModelSpec
from edgekit_executorch.layer_tensors import head_dim_of
from edgekit_executorch.layout import MAX_ROWS

# Private memory of an open runtime without any model: Python with torch and its operators, or a phone's app.
ON_DESKTOPS, ON_PHONES = 299_000_000, 60 * MIB
MEASURED = "measured on x86-64 Linux, torch and Python included"
CACHE = CacheFormat(scale_bits=32 + 8, groups=())  # the scale and zero point of each token of a head
_PHONES = ("android", "ios")
_LAYER_BYTES = 120_000  # a layer's part of the program
_ROW_BYTES = 8  # added by packing to each row of a matrix
_ARRAYS = LayerArrays(hidden_copies=3.25, inner_copies=3.25)
_WIDENED_BITS = 32  # per value of an 8-bit cache, while its layer reads it


def _float_bits(backend: str) -> int:
    return 16 if backend == "coreml" else 32


def facts(device: DeviceProfile, backend: str) -> MemoryFacts:
    """Return how the weights are stored, and what the runtime takes."""
    bits = _float_bits(backend)
    if backend != "xnnpack":
        return MemoryFacts(runtime_bytes=60 * MIB, float_bits=bits, source="prior: never run")
    if device.os in _PHONES:
        source = "measured on x86-64 Linux; without Python and torch on phones, where it was not run"
        return MemoryFacts(runtime_bytes=ON_PHONES, float_bits=bits, source=source)
    return MemoryFacts(runtime_bytes=ON_DESKTOPS, float_bits=bits, source=MEASURED)


def table_bytes(model: ModelSpec, recipe: Recipe, backend: str) -> tuple[int, int]:
    """Return the bytes of the token embedding in the recipe's format, and in the format that the program reads."""
    table = next(tensor for tensor in model.tensors() if tensor.role == "embedding")
    form, floats = recipe.format_of(table), table.size * _float_bits(backend) // 8
    stored = floats if form.is_float else form.bytes(table.shape)
    # Only XNNPACK reads an 8-bit embedding; the others store it in floats.
    return stored, stored if backend == "xnnpack" else floats


@lru_cache(maxsize=256)
def weight_shares(model: ModelSpec, recipe: Recipe, backend: str) -> tuple[float, float]:
    """Return the shares of the stored weights that are looked up and multiplied.

    A tied head shares the embedding's bytes in the file, but is multiplied too.
    """
    # XNNPACK's float linears have 32 bits, whatever the recipe rounds them to.
    stored = weight_bytes(model, RECIPES["float32"] if _float_bits(backend) == 32 and recipe.is_exact() else recipe)
    table = next(tensor for tensor in model.tensors() if tensor.role == "embedding")
    in_recipe, looked_up = table_bytes(model, recipe, backend)
    multiplied = stored if model.tied else stored - in_recipe
    if backend == "xnnpack":
        rows = sum(tensor.shape[0] for tensor in model.tensors() if tensor.role in ("linear", "head"))
        multiplied += _ROW_BYTES * (rows + table.shape[0] * model.tied)
    return looked_up / stored, multiplied / stored


def memory_terms(load: MemoryLoad) -> list[Term]:
    """Return the terms of a program."""
    model = load.model
    looked_up, multiplied = weight_shares(model, load.recipe, load.backend)
    if load.backend != "xnnpack":
        copied = looked_up + multiplied
        weights = load.weights(copied=copied, disk=copied)
        return usual_terms(load, weights, LayerArrays(bits=_float_bits(load.backend)))
    # A smaller cache is a part of the one that was built, whose whole memory is allocated.
    built = load if load.built_tokens is None else load._replace(held_tokens=load.built_tokens)
    used, whole = (CACHE.state_bytes(model, each.held_tokens, each.kv_bits) for each in (load, built))
    used = used if load.state_bytes is None else load.state_bytes
    weights = [*load.weights(mapped=looked_up, copied=multiplied), *_exits(load)]
    caches, runtime = built._replace(state_bytes=used).caches(CACHE), load.runtime(_LAYER_BYTES)
    return [
        *weights,
        built.tables(2 * 4 * sum(head_dim_of(model, name) for name in model.ropes)),
        caches,
        *load.peak(_step(built), [*weights, runtime[-1], caches]),
        sized("activation_bytes", max(0, whole - used), "of the built cache, which is not used"),
        *runtime,
        load.adapter(),
    ]


def _exits(load: MemoryLoad) -> Iterator[Term]:
    """Yield the copies that exits need: the linears of their layers, and the head."""
    model, head = load.model, "embedding" if load.model.tied else "head"
    for layers in load.exits:
        mine = tuple(f"{model.prefix}layers.{index}." for index in range(layers))
        size = sum(
            tensor_bytes(tensor.shape, load.recipe.format_of(tensor), load.facts)
            for tensor in model.tensors()
            if tensor.role == head or (tensor.role == "linear" and tensor.name.startswith(mine))
        )
        yield sized("private_weights_bytes", size, f"again for the exit after layer {layers}")


def _step(load: MemoryLoad) -> list[Term]:
    """Return the step for which the program plans its buffers, with the copy of an 8-bit cache in floats."""
    model = load.model
    tokens = load.call_tokens(load.held_tokens * load.sequences)
    # All windowed layers share one mask of 32 bits, and other layers need none.
    masks = tokens * load.held_tokens * 4 if any(layer.window is not None for layer in model.layers) else 0
    return [
        load.layer(_ARRAYS, tokens, load.logit_rows + MAX_ROWS),
        sized("activation_bytes", reading_bytes(load), f"to read the {load.kv_bits}-bit cache"),
        sized("activation_bytes", masks, "of attention's masks"),
    ]


def reading_bytes(load: MemoryLoad) -> int:
    """Return the bytes of one layer's keys and values in floats, while it reads a cache of fewer bits."""
    widest = max(sum(load.model.qkv_widths(layer)[1:]) for layer in load.model.layers)
    return load.held_tokens * widest * _WIDENED_BITS // 8 if load.kv_bits < 16 else 0
