"""Predicts memory by class: every formula on one page, with the words in which it explains itself.

Knows nothing of devices, of targets by name, or of what was measured: their facts come in as arguments.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from edgekit.model import Layer, ModelSpec
from edgekit.plan import Estimate, MemoryFacts, Plan
from edgekit.recipe import Format, Recipe
from edgekit.units import show_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


KV_GROUPS: tuple[int, ...] = MemoryFacts.model_fields["cache_groups"].default
LONE_VERIFIED_ROWS, SHARED_VERIFIED_ROWS = 16, 3  # of logits: of a sequence that drafts alone, of each among others


def predict(
    model: ModelSpec,
    recipe: Recipe,
    facts: MemoryFacts,
    *,
    held_tokens: int,
    sequences: int,
    kv_bits: int,
    chunk_tokens: int,
    draft_bytes: int = 0,
    prefix_bytes: int = 0,
    adapter_rank: int = 0,
    context: int | None = None,
    exits: Sequence[int] = (),
    state_bytes: int | None = None,
    drafts: bool = False,
) -> Estimate:
    """The memory of `model` with `sequences` states that hold `held_tokens` each, of a `context` where that is more.

    An open engine's `state_bytes` knows a state better than the formula. `drafts`: proposals are verified.
    """
    weights = stored_weight_bytes(model, recipe, facts)
    state = cache_bytes(model, held_tokens, kv_bits, facts) if state_bytes is None else state_bytes
    cache = state * sequences
    running = activation_bytes(model, min(held_tokens, chunk_tokens), sequences, facts, drafts=drafts)
    running += widened_bytes(model, held_tokens, kv_bits, facts) + facts.running_bytes
    return Estimate(
        # Weights and tables of positions are clean pages of files; what is copied is copied again for some exits.
        mapped_weights_bytes=round(weights * facts.mapped_share)
        + _by_position_bytes(model, recipe, facts, max(context or 0, held_tokens)),
        private_weights_bytes=round(weights * facts.private_share) + _exit_bytes(model, recipe, facts, exits),
        kv_bytes=cache,
        # What comes after the opening has its room.
        activation_bytes=max(running, opening_bytes(model, recipe, facts) - cache - draft_bytes - prefix_bytes),
        runtime_bytes=facts.runtime_bytes + facts.layer_bytes * len(model.layers),
        draft_bytes=draft_bytes,
        prefix_bytes=prefix_bytes,
        adapter_bytes=adapter_bytes(model, adapter_rank, facts.float_bits or 32),
        disk_bytes=round(weights * facts.disk_share),
    )


def explain(plan: Plan) -> list[str]:
    """The arithmetic of a plan's estimate, one line a class, from the plan alone."""
    model, facts, found = plan.model, plan.memory, plan.estimate
    weights = stored_weight_bytes(model, plan.recipe, facts)
    tokens, bits = plan.storage.capacity_tokens, plan.storage.kv_bits
    lines = (
        ("mapped weights", found.mapped_weights_bytes, _explain_mapped(plan, weights)),
        ("private weights", found.private_weights_bytes, _explain_private(plan, weights)),
        ("cache", found.kv_bytes, _explain_kv(model, tokens, bits, facts, plan.sequences)),
        ("activations", found.activation_bytes, _explain_activations(plan)),
        ("runtime", found.runtime_bytes, _explain_runtime(plan)),
        (
            "draft",
            found.draft_bytes,
            "draft model, its cache and activations" if found.draft_bytes else "no draft model",
        ),
        ("prefixes", found.prefix_bytes, "prefix cache" if found.prefix_bytes else "no prefix cache"),
        (
            "adapters",
            found.adapter_bytes,
            f"one of rank {plan.adapter_rank} on every linear" if plan.adapter_rank else "no room for adapters",
        ),
        ("on disk", found.disk_bytes, f"{weights:,} stored × {facts.disk_share:g}"),
    )
    return [f"{name:<15} {show_bytes(size):>9} = {arithmetic}" for name, size, arithmetic in lines]


def _by_position_bytes(model: ModelSpec, recipe: Recipe, facts: MemoryFacts, tokens: int) -> int:
    """What a context has mapped beside the weights: tables of positions, rows of a table that the head does not use."""
    table = next(tensor for tensor in model.tensors() if tensor.role == "embedding")
    rows = min(facts.looked_up_bytes * tokens, recipe.format_of(table).bytes(table.shape)) if model.tied else 0
    return facts.position_bytes * tokens + rows


def _exit_bytes(model: ModelSpec, recipe: Recipe, facts: MemoryFacts, exits: Sequence[int]) -> int:
    """What exits copy: the linears of their layers, and the head."""
    if not facts.exit_copies:
        return 0
    scales, head = facts.scale_bits + facts.bias_bits, "embedding" if model.tied else "head"
    total = 0
    for layers in exits:
        mine = tuple(f"{model.prefix}layers.{index}." for index in range(layers))
        total += sum(
            _tensor_bytes(tensor.shape, recipe.format_of(tensor), scales, facts.row_group, facts.float_bits)
            for tensor in model.tensors()
            if tensor.role == head or (tensor.role == "linear" and tensor.name.startswith(mine))
        )
    return total


def stored_weight_bytes(model: ModelSpec, recipe: Recipe, facts: MemoryFacts) -> int:
    """Bytes of the weights as a target stores them."""
    stored, parameters = _stored(model, recipe, facts.scale_bits + facts.bias_bits, facts.row_group, facts.float_bits)
    if recipe.bits_per_weight is None:
        return stored
    # A budget is spent in full, unless its rules alone already cost more; what a target stores beside is not in it.
    beside = stored - _stored(model, recipe, 16, None, None)[0]
    return max(stored, int(parameters * recipe.bits_per_weight / 8) + beside)


@lru_cache(maxsize=256)
def _stored(
    model: ModelSpec, recipe: Recipe, scale_bits: int, row_group: int | None, float_bits: int | None
) -> tuple[int, int]:
    stored = parameters = 0
    for tensor in model.tensors():
        parameters += prod(tensor.shape)
        stored += _tensor_bytes(tensor.shape, recipe.format_of(tensor), scale_bits, row_group, float_bits)
    return stored, parameters


def _tensor_bytes(
    shape: tuple[int, ...], form: Format, scale_bits: int, row_group: int | None, float_bits: int | None
) -> int:
    inputs = shape[-1]
    rows = 1
    for size in shape[:-1]:
        rows *= size
    if form.is_float:
        return rows * inputs * float_bits // 8 if float_bits else form.bytes(shape)
    if form.kind == "s4":
        assert form.group is not None
        return rows * (inputs // 2 + inputs // form.group * scale_bits // 8)
    if form.kind == "s8":
        scales = -(-inputs // row_group) if row_group else 1
        return rows * (inputs + scales * scale_bits // 8)
    return form.bytes(shape)


def adapter_bytes(model: ModelSpec, rank: int, bits: int) -> int:
    """An adapter of `rank` on every linear of the layers: rank × (inputs + outputs) values for each."""
    shapes = (tensor.shape for tensor in model.tensors() if tensor.role == "linear" and len(tensor.shape) == 2)
    return sum(rank * sum(shape) for shape in shapes) * bits // 8 if rank else 0


def cache_bytes(model: ModelSpec, tokens: int, kv_bits: int, facts: MemoryFacts) -> int:
    """`kv_bytes` as a target holds them."""
    bounded, scales, groups = facts.bounds_windows, facts.cache_scale_bits, facts.cache_groups
    return kv_bytes(model, tokens, kv_bits, bounds_windows=bounded, scale_bits=scales, groups=groups)


def kv_bytes(
    model: ModelSpec, tokens: int, kv_bits: int, *, bounds_windows: bool = True, scale_bits: int = 32,
    groups: tuple[int, ...] = KV_GROUPS,
) -> int:  # fmt: skip
    """Keys and values of one sequence. Layers with a window of their own hold no more, where the engine sees to it."""
    return sum(
        _layer_kv_bytes(layer, held, kv_bits, scale_bits, groups)
        for layer, held in _held(model, tokens, bounds_windows)
    )


def _held(model: ModelSpec, tokens: int, bounds_windows: bool) -> Iterable[tuple[Layer, int]]:
    for layer in model.layers:
        if layer.stores_kv:
            bounded = bounds_windows and layer.window is not None
            yield layer, min(tokens, layer.window or tokens) if bounded else tokens


def _layer_kv_bytes(layer: Layer, tokens: int, kv_bits: int, scale_bits: int, groups: tuple[int, ...]) -> int:
    values = 2 * layer.kv_heads * layer.head_dim
    otherwise = groups[-1] if groups else layer.head_dim
    group = next((group for group in groups if layer.head_dim % group == 0), otherwise)
    scales = -(-values // group) * scale_bits if kv_bits < 16 else 0
    return tokens * (values * kv_bits + scales) // 8


def activation_bytes(
    model: ModelSpec, chunk_tokens: int, sequences: int, facts: MemoryFacts, *, drafts: bool = False
) -> int:
    """What the largest step needs at once: its widest layer, and the logits of the rows that sequences ask for."""
    return _step_bytes(model, facts, *_largest_step(model, chunk_tokens, sequences, facts, drafts))


def _step_bytes(model: ModelSpec, facts: MemoryFacts, tokens: int, rows: int) -> int:
    return layers_bytes(model, tokens, facts) + rows * model.vocab_size * 4


def layers_bytes(model: ModelSpec, tokens: int, facts: MemoryFacts) -> int:
    """The widest layer's intermediates of a chunk."""
    return round(tokens * _activation_width(model, facts) * facts.activation_bits / 8)


def _largest_step(
    model: ModelSpec, chunk_tokens: int, sequences: int, facts: MemoryFacts, drafts: bool
) -> tuple[int, int]:
    """Tokens and rows of the step that takes most: one that reads a prompt, or one in which all verify."""
    # Rows are 32-bit numbers; sampling copies one at a time.
    most, beside = verified_rows(sequences) if drafts else max(1, sequences), 1 + facts.planned_rows
    beside += most // 4 if drafts else 0  # where arrays of other sizes were, the heap keeps holes
    left = facts.verified_tokens if drafts else 0
    reading = chunk_tokens + left, beside + (most if sequences > 1 else 1)  # whoever is alone does one after the other
    returned = facts.returned_bytes is not None and layers_bytes(model, chunk_tokens, facts) >= facts.returned_bytes
    verifying = (min(chunk_tokens, most) if returned else chunk_tokens) + left, beside + most
    return max(reading, verifying, key=lambda step: _step_bytes(model, facts, *step))


def verified_rows(sequences: int) -> int:
    """So many rows, at most, are asked for in a step in which so many sequences decode and draft."""
    return max(LONE_VERIFIED_ROWS, SHARED_VERIFIED_ROWS * sequences)


def opening_bytes(model: ModelSpec, recipe: Recipe, facts: MemoryFacts) -> int:
    """What opening needs for a moment beyond what runs: a copy of the largest tensor, while there are no layers yet."""
    if not facts.opening_share:
        return 0
    bits, group, floats = facts.scale_bits + facts.bias_bits, facts.row_group, facts.float_bits
    most = 0.0
    for tensor in model.tensors():
        if tensor.role != "norm":
            form = recipe.format_of(tensor)
            values = _tensor_bytes(tensor.shape, form, 0, group, floats)
            scales = _tensor_bytes(tensor.shape, form, bits, group, floats) - values
            most = max(most, values * facts.opening_share + scales * facts.opening_scale_share)
    return max(0, round(most) - facts.layer_bytes * len(model.layers))


def widened_bytes(model: ModelSpec, tokens: int, kv_bits: int, facts: MemoryFacts) -> int:
    """A layer's quantised keys and values as it reads them, where the target widens them in memory first."""
    if kv_bits >= 16:
        return 0
    widest = max(2 * layer.kv_heads * layer.head_dim for layer in model.layers)
    return tokens * widest * facts.widened_bits // 8


def _activation_width(model: ModelSpec, facts: MemoryFacts) -> float:
    heads = max(model.heads * layer.head_dim + 2 * layer.kv_heads * layer.head_dim for layer in model.layers)
    feed_forward = model.intermediate_size
    if model.experts:
        experts = model.experts
        feed_forward = max(feed_forward, experts.active * experts.intermediate_size)
    attending, feeding = facts.head_copies * heads, facts.inner_copies * feed_forward
    # What lives through a layer; beside it either attention or the feed-forward is alive.
    beside = max(attending, feeding) if facts.reuses_activations else attending + feeding
    return facts.hidden_copies * model.hidden_size + beside


def _explain_kv(model: ModelSpec, tokens: int, kv_bits: int, facts: MemoryFacts, sequences: int) -> str:
    counted: dict[tuple[int, int, int], int] = {}
    for layer, held in _held(model, tokens, facts.bounds_windows):
        key = (layer.kv_heads, layer.head_dim, held)
        counted[key] = counted.get(key, 0) + 1
    parts = [
        f"{count} layers × 2 × {heads} heads × {dim} × {held:,} tokens" for (heads, dim, held), count in counted.items()
    ]
    scales = " + scales" if kv_bits < 16 and facts.cache_scale_bits else ""
    return f"{sequences} × ({' + '.join(parts)}) × {kv_bits} bit{scales}"


def _explain_runtime(plan: Plan) -> str:
    facts = plan.memory
    if not facts.layer_bytes:
        return "interpreter, vendor library and tokenizer"
    each = f"{len(plan.model.layers)} layers × {show_bytes(facts.layer_bytes)} of graph"
    return f"{show_bytes(facts.runtime_bytes)} of interpreter, vendor library and tokenizer + {each}"


def _explain_activations(plan: Plan) -> str:
    opening = opening_bytes(plan.model, plan.recipe, plan.memory)
    later = plan.estimate.kv_bytes + plan.estimate.draft_bytes + plan.estimate.prefix_bytes
    if opening and plan.estimate.activation_bytes == opening - later:
        return f"{show_bytes(opening)} to open the largest tensor, less the cache, which is not there yet"
    widened = widened_bytes(plan.model, plan.storage.capacity_tokens, plan.storage.kv_bits, plan.memory)
    cache = f" + {show_bytes(widened)} of one layer's cache, widened" if widened else ""
    once = f" + {show_bytes(plan.memory.running_bytes)} for the first step" if plan.memory.running_bytes else ""
    width, bits = _activation_width(plan.model, plan.memory), plan.memory.activation_bits
    drafts = plan.estimate.draft_bytes > 0
    tokens, rows = _largest_step(plan.model, plan.chunk_tokens, plan.sequences, plan.memory, drafts)
    return (
        f"{tokens:,} tokens × {width:,.0f} wide × {bits} bit{cache}"
        f" + {rows} × {plan.model.vocab_size:,} logits × 4 bytes{once}"
    )


def _explain_mapped(plan: Plan, weights: int) -> str:
    tokens = max(plan.context, plan.storage.capacity_tokens)
    tables = plan.memory.position_bytes * tokens
    rows = _by_position_bytes(plan.model, plan.recipe, plan.memory, tokens) - tables
    beside = f" + {tokens:,} positions × {plan.memory.position_bytes} bytes" if tables else ""
    beside += f" + {show_bytes(rows)} of rows that tokens look up" if rows else ""
    return f"{weights:,} stored × {plan.memory.mapped_share:g} mapped{beside}"


def _explain_private(plan: Plan, weights: int) -> str:
    again = _exit_bytes(plan.model, plan.recipe, plan.memory, plan.exits)
    beside = f" + {show_bytes(again)} again for exits" if again else ""
    return f"{weights:,} stored × {plan.memory.private_share:g} copied{beside}"
