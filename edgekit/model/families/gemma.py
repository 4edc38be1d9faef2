"""Reads Gemma 2, 3, 3n and 4, text models; 3n, and 4 with experts, are sized and planned, not exported."""

from __future__ import annotations

import math
import re
from typing import Any

from edgekit.model.families.experts import MAX_EXPERTS, read_experts
from edgekit.model.families.fields import Fields
from edgekit.model.families.positions import read_ropes_by_kind
from edgekit.model.families.shapes import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_VOCAB,
    Defaults,
    Shapes,
    alternating,
    intermediate_size,
    read_activation,
    read_kinds,
    read_shapes,
    read_window,
)
from edgekit.model.parts import Encoder, Experts, PerLayerInput
from edgekit.model.spec import ModelSpec

_CAP = (1e-3, 1e6)
_BOTH_WAYS_CAPPED = "an encoder with capped scores can be planned, but no target exports it"
_BOTH_WAYS = "its attention looks both ways, so it is an encoder and cannot generate"
_STREAMS = "its four streams of hidden states (AltUp) can be sized and planned, but no target exports them yet"
_EXPERTS = "experts next to a dense feed-forward can be sized and planned, but no target exports them yet"
_FEWER_ROWS = "has fewer per-layer embeddings than tokens; correct vocab_size_per_layer_input"


def read_gemma2(fields: Fields, name: str) -> ModelSpec:
    """Read Gemma 2: every other layer windowed, one rope, softcaps on scores and logits."""
    shapes = read_shapes(fields, Defaults(positions=8192, tied=True, head_dim=256, kv_heads=4))
    window = read_window(fields, 4096)
    kinds = read_kinds(fields, shapes.layers, alternating(shapes.layers, 2))
    return shapes.spec(
        name,
        "gemma2",
        shapes.layers_of(kinds, window),
        **_common(shapes),
        **_scaled(fields),
        norm_offset=True,
        attention_softcap=_softcap(fields, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(fields, "final_logit_softcapping", 30.0),
    )


def read_gemma3(fields: Fields, name: str) -> ModelSpec:
    """Read Gemma 3: five windowed layers per global one, one rope per kind, norms on q and k.

    EmbeddingGemma is the same with attention in both directions.
    """
    defaults = Defaults(positions=131_072, tied=True, head_dim=256, heads=8, kv_heads=4, vocab_size=262_208)
    shapes = read_shapes(fields, defaults)
    window = read_window(fields, 4096)
    pattern = fields.count("sliding_window_pattern", MAX_LAYERS, 6)
    kinds = read_kinds(fields, shapes.layers, alternating(shapes.layers, pattern))
    both_ways = fields.flag("use_bidirectional_attention", False)
    softcap = _softcap(fields, "attn_logit_softcapping")
    if both_ways and window is not None:
        window = window // 2 + 1  # to each side, the token itself included
    return shapes.spec(
        name,
        "gemma3_text",
        tuple(shapes.layer_of(kind, window) for kind in kinds),
        ropes=read_ropes_by_kind(fields, shapes.head_dim, shapes.head_dim, shapes.max_positions),
        **_common(shapes),
        **_scaled(fields),
        norm_offset=True,
        qk_norm=True,
        attention_softcap=softcap,
        logit_softcap=_softcap(fields, "final_logit_softcapping"),
        exportable=_BOTH_WAYS_CAPPED if both_ways and softcap is not None else None,
        encoder=Encoder() if both_ways else None,
    )


def read_gemma3n(fields: Fields, name: str) -> ModelSpec:
    """Read Gemma 3n: four streams, per-layer embeddings, and last layers that reuse the KV of earlier ones."""
    defaults = Defaults(positions=32_768, tied=True, head_dim=256, heads=8, kv_heads=2, vocab_size=262_400)
    shapes = read_shapes(fields, defaults)
    window = read_window(fields, 512)
    kinds = read_kinds(fields, shapes.layers, alternating(shapes.layers, 5))
    owners = _kv_owners(fields, kinds, default=15)
    sizes = intermediate_size(fields, shapes.layers)
    return shapes.spec(
        name,
        "gemma3n_text",
        tuple(
            shapes.layer_of(kind, window, stores_kv=index < owners, intermediate_size=sizes[index])
            for index, kind in enumerate(kinds)
        ),
        ropes=read_ropes_by_kind(fields, shapes.head_dim, shapes.head_dim, shapes.max_positions),
        **_common(shapes),
        attention_scale=1.0,
        qk_norm=True,
        logit_softcap=_softcap(fields, "final_logit_softcapping", 30.0),
        per_layer_input=PerLayerInput(
            vocab_size=fields.count("vocab_size_per_layer_input", MAX_VOCAB, 262_144),
            size=fields.count("hidden_size_per_layer_input", MAX_HIDDEN, 256),
            streams=fields.count("altup_num_inputs", 64, 4),
            laurel_rank=fields.count("laurel_rank", MAX_HIDDEN, 64),
        ),
        exportable=_STREAMS,
    )


def read_gemma4(fields: Fields, name: str) -> ModelSpec:
    """Read Gemma 4: larger heads in global layers; optional shared KV, per-layer embeddings and experts."""
    defaults = Defaults(positions=131_072, tied=True, head_dim=256, heads=8, kv_heads=4, vocab_size=262_144)
    shapes = read_shapes(fields, defaults)
    window = read_window(fields, 512)
    kinds = list(read_kinds(fields, shapes.layers, alternating(shapes.layers, 6)))
    kinds[-1] = "full_attention"
    owners = _kv_owners(fields, tuple(kinds), default=0)
    keys_are_values = fields.flag("attention_k_eq_v", False)
    experts = _gemma4_experts(fields)
    wide = fields.flag("use_double_wide_mlp", False)
    heads = _gemma4_heads(fields, shapes, kinds, keys_are_values)
    layers = []
    for index, (kind, (kv_heads, head_dim)) in enumerate(zip(kinds, heads, strict=True)):
        shared = index >= owners
        layers.append(
            shapes.layer_of(
                kind,
                window,
                kv_heads=kv_heads,
                head_dim=head_dim,
                stores_kv=not shared,
                has_values=not (keys_are_values and kind == "full_attention"),
                experts=experts is not None,
                intermediate_size=2 * shapes.intermediate_size if wide and shared else None,
            )
        )
    size = fields.count("hidden_size_per_layer_input", MAX_HIDDEN, 256, least=0)
    ropes = read_ropes_by_kind(
        fields,
        next((layer.head_dim for layer in layers if layer.rope == "full"), shapes.head_dim),
        next((layer.head_dim for layer in layers if layer.rope == "sliding"), shapes.head_dim),
        shapes.max_positions,
        proportional=True,
    )
    vocab = fields.count("vocab_size_per_layer_input", MAX_VOCAB, 262_144, least=0)  # 0 if the size is 0
    return shapes.spec(
        name,
        "gemma4_text",
        tuple(layers),
        ropes=ropes,
        **_common(shapes),
        attention_scale=1.0,
        qk_norm=True,
        logit_softcap=_softcap(fields, "final_logit_softcapping"),
        experts=experts,
        per_layer_input=PerLayerInput(vocab_size=vocab, size=size) if size else None,
        layer_scalars=True,
        value_norm=True,
        exportable=_gemma4_reason(fields, experts, size, vocab < shapes.vocab_size),
    )


def _common(shapes: Shapes) -> dict[str, Any]:
    """Return the spec fields common to all Gemmas: scaled embeddings, norms before and after, one switch for biases."""
    return {
        "activation": read_activation(shapes.fields, "hidden_activation", "gelu_pytorch_tanh"),
        "embedding_scale": math.sqrt(shapes.hidden_size),
        "post_norms": True,
        **shapes.biases(),
    }


def _scaled(fields: Fields) -> dict[str, float]:
    return {"attention_scale": fields.number("query_pre_attn_scalar", 1e-3, 1e6, 256.0) ** -0.5}


def _softcap(fields: Fields, field: str, default: float | None = None) -> float | None:
    return fields.maybe_number(field, *_CAP) if fields.has(field) else default


def _kv_owners(fields: Fields, kinds: tuple[str, ...], default: int) -> int:
    """Return how many of the first layers have their own KV; later ones reuse the last one's of their kind."""
    shared = fields.count("num_kv_shared_layers", MAX_LAYERS, default, least=0)
    owners = len(kinds) - shared
    if shared and (owners < 1 or set(kinds[:owners]) != set(kinds)):
        raise fields.refusal(
            "num_kv_shared_layers",
            f"of {len(kinds)} layers read the KV of earlier ones, and none of their kind is left; correct the file",
        )
    return owners


def _gemma4_reason(fields: Fields, experts: Experts | None, size: int, fewer_rows: bool) -> str | None:
    """Return why a Gemma 4 is planned and not exported; None if it is exported. Text attends causally by default."""
    direction = fields.get("use_bidirectional_attention")
    if direction not in (None, False, "vision"):
        if direction not in (True, "all"):
            raise fields.unsupported("use_bidirectional_attention", "is not supported; supported: vision")
        return _BOTH_WAYS
    if experts:
        return _EXPERTS
    return _FEWER_ROWS if size and fewer_rows else None


def _gemma4_experts(fields: Fields) -> Experts | None:
    if not fields.flag("enable_moe_block", False):
        return None
    return read_experts(
        fields,
        fields.count("num_experts", MAX_EXPERTS),
        fields.count("top_k_experts", MAX_EXPERTS),
        fields.count("moe_intermediate_size", MAX_INTERMEDIATE),
        "fused",
    )


def _gemma4_heads(fields: Fields, shapes: Shapes, kinds: list[str], keys_are_values: bool) -> list[tuple[int, int]]:
    """Return KV heads and head size of each layer; older files state only global layers, newer ones list all."""
    by_layer = fields.section("per_layer_config")
    is_listed = fields.get("per_layer_config") is not None  # empty if all layers are alike
    # Keys are layers, padded by zeros so that they sort.
    listed = {int(key): key for key in (by_layer.names() if by_layer else ()) if re.fullmatch("[0-9]{1,4}", key)}
    global_dim = fields.count("global_head_dim", MAX_HEAD_DIM, 512)
    global_kv = fields.maybe_count("num_global_key_value_heads", MAX_HEADS)
    global_kv = global_kv if keys_are_values else None
    heads = []
    for index, kind in enumerate(kinds):
        kv_heads, head_dim = shapes.kv_heads, shapes.head_dim
        if by_layer and (one := by_layer.section(listed.get(index, str(index)))):
            if strange := set(one.names()) - {"head_dim", "num_key_value_heads"}:
                raise one.unsupported(sorted(strange)[0], "cannot differ by layer")
            head_dim = one.count("head_dim", MAX_HEAD_DIM, head_dim)
            kv_heads = one.count("num_key_value_heads", MAX_HEADS, kv_heads)
        elif not is_listed and kind == "full_attention":
            kv_heads, head_dim = global_kv or kv_heads, global_dim
        if shapes.heads % kv_heads:
            raise fields.refusal("num_global_key_value_heads", f"does not divide the {shapes.heads} attention heads")
        heads.append((kv_heads, head_dim))
    return heads
