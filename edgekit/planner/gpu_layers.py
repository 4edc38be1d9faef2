"""Divides a model between a GPU and the host's processor: how many layers fit, and what each side then holds.

Layers are counted as llama.cpp counts them: the head is one, and with it the last layers run on the GPU.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

from edgekit.contracts.memory import MemoryLoad
from edgekit.contracts.plan import Estimate, MemoryFacts, Plan, Speed
from edgekit.contracts.recipe import Recipe
from edgekit.contracts.stored_weights import stored_weight_bytes, tensor_bytes
from edgekit.model.spec import ModelSpec

# Bandwidth of the RAM of a GPU's host, which profiles do not state: 80 % of two channels of DDR4-3200.
HOST_READ_BYTES_S = 41e9
NEVER_RUN = "never run by us"


class GpuShares(NamedTuple):
    """The shares of a model that lie on the GPU: 1 is all of it."""

    weights: float  # of the stored weights that the GPU holds
    moved: float  # of the stored weights that the processor no longer needs; a tied embedding it still looks up
    linears: float  # of the weights of layers and head
    cache: float  # of keys and values


def most_layers(model: ModelSpec) -> int:
    """Return the layers of a model with its head, as `Plan.gpu_layers` counts them."""
    return len(model.layers) + 1


@lru_cache(maxsize=4096)
def shares_of(model: ModelSpec, recipe: Recipe, facts: MemoryFacts, gpu_layers: int) -> GpuShares:
    """Return the shares of a model that lie on a GPU which runs that many layers."""
    first = len(model.layers) + 1 - gpu_layers
    prefixes = tuple(f"{model.prefix}layers.{index}." for index in range(max(0, first), len(model.layers)))
    head = "embedding" if model.tied else "head"
    layers = heads = everything = repeating = 0
    for tensor in model.tensors():
        size = tensor_bytes(tensor.shape, recipe.format_of(tensor), facts)
        everything += size
        repeating += size if f"{model.prefix}layers." in tensor.name or tensor.role == head else 0
        layers += size if tensor.name.startswith(prefixes) else 0
        heads += size if gpu_layers and tensor.role == head else 0
    widths = [layer.kv_heads * layer.head_dim if layer.stores_kv else 0 for layer in model.layers]
    cached = sum(widths[max(0, first) :]) if gpu_layers else 0
    return GpuShares(
        weights=(layers + heads) / everything,
        moved=(layers + (0 if model.tied else heads)) / everything,
        linears=(layers + heads) / repeating,
        cache=cached / max(1, sum(widths)),
    )


def divided(estimate: Estimate, load: MemoryLoad, gpu_layers: int | None) -> Estimate:
    """Divide the estimate of a processor alone between the processor and a GPU that runs `gpu_layers`."""
    kind = load.facts.gpu_memory
    if kind is None or gpu_layers is None:
        return estimate
    shares = shares_of(load.model, load.recipe, load.facts, gpu_layers)
    stored = stored_weight_bytes(load.model, load.recipe, load.facts)
    on_gpu, moved = round(stored * shares.weights), round(stored * shares.moved)
    update = {"private_weights_bytes": round(estimate.private_weights_bytes * (1 - shares.linears))}
    if kind != "mapped":
        update["mapped_weights_bytes"] = max(0, estimate.mapped_weights_bytes - moved)
    if kind == "shared":
        update["private_weights_bytes"] += on_gpu
    if kind == "own":
        kv, adapters = round(estimate.kv_bytes * shares.cache), round(estimate.adapter_bytes * shares.linears)
        buffers = estimate.activation_bytes if gpu_layers else 0  # each side has buffers for a whole step
        update |= {"kv_bytes": estimate.kv_bytes - kv, "adapter_bytes": estimate.adapter_bytes - adapters}
        update["gpu_bytes"] = on_gpu + kv + adapters + buffers
    return estimate.model_copy(update=update)


def most_that_fit(estimate: Estimate, load: MemoryLoad, gpu_bytes: int, most: int) -> int:
    """Return the largest number of layers that fit in a GPU's own memory. Memory that is shared holds all of them.

    `estimate` is the estimate for a processor alone.
    """
    if load.facts.gpu_memory != "own":
        return most
    numbers = range(1, most + 1)  # each takes more than the one before
    return bisect_right(numbers, gpu_bytes, key=lambda count: divided(estimate, load, count).gpu_bytes or 0)


def with_host_layers(speed: Speed, read_bytes: int, share: float, bandwidth_bytes_s: float) -> Speed:
    """Return the speed of a model whose layers read only `share` of a token's bytes in the GPU's memory."""
    if share >= 1:
        return speed
    host_bytes = read_bytes * (1 - share)
    seconds = 1 / speed.decode_tokens_per_s + host_bytes / HOST_READ_BYTES_S - host_bytes / bandwidth_bytes_s
    gigabytes = HOST_READ_BYTES_S / 1e9
    basis = f"{speed.basis}; {1 - share:.0%} of the weights are read in RAM at {gigabytes:g} GB/s, an assumption"
    # How fast the host's processor reads a prompt is not known.
    update = {"basis": basis, "prefill_tokens_per_s": None, "first_token_s": None}
    return speed.decoding_at(1 / seconds).model_copy(update=update)


def describe(plan: Plan) -> str | None:
    """Return what a plan says of its GPU layers, e.g. `24 of 31 (vulkan; never run by us)`; None without a GPU."""
    if plan.memory.gpu_memory is None or plan.gpu_layers is None:
        return None
    return f"{plan.gpu_layers} of {most_layers(plan.model)} ({plan.backend}; {NEVER_RUN})"
