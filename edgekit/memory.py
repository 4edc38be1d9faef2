"""Predicts memory by class: every formula on one page, each printing its own arithmetic.

Knows nothing of devices, of targets by name, or of what was measured: their facts come in as arguments.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from edgekit.model import Layer, ModelSpec
from edgekit.plan import Estimate, MemoryFacts, Plan
from edgekit.recipe import Format, Recipe
from edgekit.units import show_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable


class Term(NamedTuple):
    """One class of memory with the arithmetic that gave it."""

    name: str
    bytes: int
    arithmetic: str


class Account(NamedTuple):
    """An estimate and how it came about."""

    terms: tuple[Term, ...]

    @property
    def estimate(self) -> Estimate:
        return Estimate(**{f"{term.name}_bytes": term.bytes for term in self.terms})

    def explain(self) -> list[str]:
        """One line a class: its bytes and its formula with the numbers filled in."""
        return [
            f"{term.name.replace('_', ' '):<16} {show_bytes(term.bytes):>9}  = {term.arithmetic}" for term in self.terms
        ]


def explain(plan: Plan) -> list[str]:
    """The arithmetic of a plan's estimate, from the plan alone."""
    account = predict(
        plan.model,
        plan.recipe,
        plan.memory,
        held_tokens=plan.storage.capacity_tokens,
        sequences=plan.sequences,
        kv_bits=plan.storage.kv_bits,
        chunk_tokens=plan.chunk_tokens,
        draft_bytes=plan.estimate.draft_bytes,
        prefix_bytes=plan.estimate.prefix_bytes,
    )
    return account.explain()


KV_GROUP = 64  # quantised keys and values share a scale and a bias, 16 bits each, over so many


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
) -> Account:
    """The memory of `model` with `sequences` states that hold `held_tokens` each."""
    weights = stored_weight_bytes(model, recipe, facts)
    kv = kv_bytes(model, held_tokens, kv_bits, bounds_windows=facts.bounds_windows) * sequences
    activations = activation_bytes(model, chunk_tokens, sequences, facts.activation_bits)
    tokens = min(held_tokens, chunk_tokens)
    return Account(
        (
            Term(
                "mapped_weights",
                round(weights * facts.mapped_share),
                f"{weights:,} stored × {facts.mapped_share:g} mapped",
            ),
            Term(
                "private_weights",
                round(weights * facts.private_share),
                f"{weights:,} stored × {facts.private_share:g} copied",
            ),
            Term("kv", kv, _explain_kv(model, held_tokens, kv_bits, facts.bounds_windows, sequences)),
            Term("activation", activations, _explain_activations(model, tokens, sequences, facts.activation_bits)),
            Term("runtime", facts.runtime_bytes, "interpreter, vendor library and tokenizer"),
            Term("draft", draft_bytes, "draft model, its KV and activations" if draft_bytes else "no draft model"),
            Term("prefix", prefix_bytes, "prefix cache" if prefix_bytes else "no prefix cache"),
            Term("disk", round(weights * facts.disk_share), f"{weights:,} stored × {facts.disk_share:g} on disk"),
        )
    )


def stored_weight_bytes(model: ModelSpec, recipe: Recipe, facts: MemoryFacts) -> int:
    """Bytes of the weights as a target stores them."""
    stored, parameters = _stored(model, recipe, facts.scale_bits + facts.bias_bits, facts.row_group, facts.float_bits)
    if recipe.bits_per_weight is None:
        return stored
    # A budget is spent in full, unless its rules alone already cost more.
    return max(stored, int(parameters * recipe.bits_per_weight / 8))


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


def kv_bytes(model: ModelSpec, tokens: int, kv_bits: int, *, bounds_windows: bool = True) -> int:
    """Keys and values of one sequence. Layers with a window of their own hold no more, where the engine sees to it."""
    return sum(_layer_kv_bytes(layer, held, kv_bits) for layer, held in _held(model, tokens, bounds_windows))


def _held(model: ModelSpec, tokens: int, bounds_windows: bool) -> Iterable[tuple[Layer, int]]:
    for layer in model.layers:
        if layer.stores_kv:
            bounded = bounds_windows and layer.window is not None
            yield layer, min(tokens, layer.window or tokens) if bounded else tokens


def _layer_kv_bytes(layer: Layer, tokens: int, kv_bits: int) -> int:
    values = 2 * layer.kv_heads * layer.head_dim
    scales = -(-values // KV_GROUP) * 32 if kv_bits < 16 else 0
    return tokens * (values * kv_bits + scales) // 8


def activation_bytes(model: ModelSpec, chunk_tokens: int, sequences: int, bits: int) -> int:
    """What the largest chunk needs at once: the widest layer's intermediates, then the logits of the rows asked for."""
    width = _activation_width(model)
    layers = chunk_tokens * width * bits // 8
    # Prefill asks for one row a sequence; sampling holds them as 32-bit numbers, twice.
    logits = max(1, sequences) * model.vocab_size * 4 * 2
    return layers + logits


def _activation_width(model: ModelSpec) -> int:
    heads = max(model.heads * layer.head_dim + 2 * layer.kv_heads * layer.head_dim for layer in model.layers)
    feed_forward = model.intermediate_size
    if model.experts:
        experts = model.experts
        feed_forward = max(feed_forward, experts.active * experts.intermediate_size)
    # The residual, its norm and the result; then either attention or the feed-forward is alive.
    return 3 * model.hidden_size + max(2 * heads, 3 * feed_forward)


def _explain_kv(model: ModelSpec, tokens: int, kv_bits: int, bounds_windows: bool, sequences: int) -> str:
    counted: dict[tuple[int, int, int], int] = {}
    for layer, held in _held(model, tokens, bounds_windows):
        key = (layer.kv_heads, layer.head_dim, held)
        counted[key] = counted.get(key, 0) + 1
    parts = [
        f"{count} layers × 2 × {heads} heads × {dim} × {held:,} tokens" for (heads, dim, held), count in counted.items()
    ]
    scales = " + scales" if kv_bits < 16 else ""
    return f"{sequences} × ({' + '.join(parts)}) × {kv_bits} bit{scales}"


def _explain_activations(model: ModelSpec, tokens: int, sequences: int, bits: int) -> str:
    return (
        f"{tokens:,} tokens × {_activation_width(model):,} wide × {bits} bit"
        f" + {sequences} × {model.vocab_size:,} logits × 8 bytes"
    )
