"""The tensors of a model as its published checkpoints store them: names, shapes and roles.

A model is a `ModelSpec`, and its parts are those of `edgekit.model.spec`, which imports this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

# "expert": a linear of which a token reads only some; "buffer": stored, but not a parameter.
Role = Literal["embedding", "head", "linear", "expert", "norm", "bias", "router", "other", "buffer"]


class Tensor(NamedTuple):
    """One stored tensor. Recipes match `module`, its name without `.weight` or `.bias`."""

    name: str
    shape: tuple[int, ...]
    role: Role

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight").removesuffix(".bias")

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


class ModuleNames(NamedTuple):
    """The names of a layer's modules and norms, and of the norm before the head, in published checkpoints."""

    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    before_attention: str = "input_layernorm"
    before_feed: str = "post_attention_layernorm"
    last_norm: str = "norm"


NAMES = {
    "llama": ModuleNames(),
    "lfm2": ModuleNames(
        "self_attn.out_proj", "self_attn.q_layernorm", "self_attn.k_layernorm", "feed_forward.w1", "feed_forward.w3",
        "feed_forward.w2", "operator_norm", "ffn_norm", "embedding_norm",
    ),
}  # fmt: skip


def stored_tensors(model: Any) -> Iterator[Tensor]:
    """Yield every stored tensor with its Hugging Face name, layer by layer; a tied head is not stored."""
    hidden = model.hidden_size
    yield Tensor(f"{model.prefix}embed_tokens.weight", (model.vocab_size, hidden), "embedding")
    if model.encoder:
        yield from _encoder_tensors(model, model.encoder)
    if model.per_layer_input:
        yield from _per_layer_input_tensors(model, model.per_layer_input)
    for index, layer in enumerate(model.layers):
        name = f"{model.prefix}layers.{index}."
        norms = [Tensor(f"{name}{norm}.weight", (hidden,), "norm") if norm else None for norm in model.layer_norms()]
        yield from filter(None, norms[:1])
        if layer.conv_taps:
            yield from _convolution_tensors(model, f"{name}conv.", layer.conv_taps)
        elif layer.delta_rule:
            yield from _delta_rule_tensors(model, f"{name}linear_attn.", layer.delta_rule)
        else:
            yield from _attention_tensors(model, name, layer)
        yield from filter(None, norms[1:3])
        if layer.experts and model.experts:
            yield from _expert_tensors(model, name, model.experts)
        if not layer.experts or (model.experts and model.experts.layout == "fused"):
            yield from _dense_tensors(model, name, layer.intermediate_size or model.intermediate_size)
        yield from filter(None, norms[3:])
        if model.per_layer_input:
            yield from _layer_input_tensors(model, name, model.per_layer_input)
        if model.layer_scalars:
            yield Tensor(f"{name}layer_scalar", (1,), "buffer")
        yield from (
            Tensor(f"{name}{norm}.bias", (hidden,), "bias") for norm in model.layer_norms() if norm and model.encoder
        )
    if model.encoder:
        return
    yield Tensor(f"{model.prefix}{model.names.last_norm}.weight", (hidden,), "norm")
    if not model.tied:
        yield Tensor(f"{model.head}.weight", (model.vocab_size, hidden), "head")


def _encoder_tensors(model: Any, encoder: Any) -> Iterator[Tensor]:
    hidden, name = model.hidden_size, f"{model.prefix}embed_"
    for table, rows in (("positions", encoder.positions), ("types", encoder.token_types)):
        yield Tensor(f"{name}{table}.weight", (rows, hidden), "other")
    yield from (Tensor(f"{name}norm.weight", (hidden,), "norm"), Tensor(f"{name}norm.bias", (hidden,), "bias"))


def _attention_tensors(model: Any, name: str, layer: Any) -> Iterator[Tensor]:
    hidden, names, attention = model.hidden_size, model.names, f"{name}self_attn."
    queries, keys, _ = model.qkv_widths(layer)
    if model.fused_qkv:
        yield from _linear(f"{attention}qkv_proj", queries + 2 * keys, hidden, model.qkv_bias)
    else:
        yield from _linear(f"{attention}q_proj", queries * (1 + model.attention_gate), hidden, model.qkv_bias)
        if layer.stores_kv:
            yield from _linear(f"{attention}k_proj", keys, hidden, model.qkv_bias)
            if layer.has_values:
                yield from _linear(f"{attention}v_proj", keys, hidden, model.qkv_bias)
    if model.qk_norm:
        of_queries, of_keys = model.qk_norm_widths(layer)
        yield Tensor(f"{name}{names.query_norm}.weight", (of_queries,), "norm")
        if layer.stores_kv:
            yield Tensor(f"{name}{names.key_norm}.weight", (of_keys,), "norm")
    yield from _linear(f"{name}{names.output}", hidden, queries, model.output_bias)


def _convolution_tensors(model: Any, name: str, taps: int) -> Iterator[Tensor]:
    hidden = model.hidden_size
    yield from _linear(f"{name}in_proj", 3 * hidden, hidden, model.conv_bias)
    yield Tensor(f"{name}conv.weight", (hidden, 1, taps), "other")
    if model.conv_bias:
        yield Tensor(f"{name}conv.bias", (hidden,), "bias")
    yield from _linear(f"{name}out_proj", hidden, hidden, model.conv_bias)


def _delta_rule_tensors(model: Any, name: str, rule: Any) -> Iterator[Tensor]:
    hidden = model.hidden_size
    yield Tensor(f"{name}dt_bias", (rule.value_heads,), "other")
    yield Tensor(f"{name}A_log", (rule.value_heads,), "other")
    yield Tensor(f"{name}conv1d.weight", (rule.channels, 1, rule.taps), "other")
    yield Tensor(f"{name}norm.weight", (rule.value_dim,), "other")  # without the offset of the model's norms
    yield from _linear(f"{name}out_proj", hidden, rule.values)
    for part, rows in (("qkv", rule.channels), ("z", rule.values), ("b", rule.value_heads), ("a", rule.value_heads)):
        yield from _linear(f"{name}in_proj_{part}", rows, hidden)


def _dense_tensors(model: Any, name: str, size: int) -> Iterator[Tensor]:
    names = model.names
    if model.fused_gate_up:
        yield from _linear(f"{name}mlp.gate_up_proj", 2 * size, model.hidden_size, model.mlp_bias)
    else:
        if not model.encoder:
            yield from _linear(f"{name}{names.gate}", size, model.hidden_size, model.mlp_bias)
        yield from _linear(f"{name}{names.up}", size, model.hidden_size, model.mlp_bias)
    yield from _linear(f"{name}{names.down}", model.hidden_size, size, model.mlp_bias)


def _expert_tensors(model: Any, name: str, experts: Any) -> Iterator[Tensor]:
    hidden, count, size = model.hidden_size, experts.count, experts.intermediate_size
    if experts.layout == "fused":
        yield Tensor(f"{name}router.proj.weight", (count, hidden), "router")
        yield Tensor(f"{name}router.scale", (hidden,), "router")
        yield Tensor(f"{name}router.per_expert_scale", (count,), "router")
        yield Tensor(f"{name}experts.gate_up_proj", (count, 2 * size, hidden), "expert")
        yield Tensor(f"{name}experts.down_proj", (count, hidden, size), "expert")
        yield Tensor(f"{name}post_feedforward_layernorm_1.weight", (hidden,), "norm")
        yield Tensor(f"{name}post_feedforward_layernorm_2.weight", (hidden,), "norm")
        yield Tensor(f"{name}pre_feedforward_layernorm_2.weight", (hidden,), "norm")
        return
    block, parts = ("mlp", _GATED) if experts.layout == "separate" else ("block_sparse_moe", _W1W2W3)
    yield Tensor(f"{name}{block}.gate.weight", (count, hidden), "router")
    for expert in range(count):
        for part, is_down in parts:
            shape = (hidden, size) if is_down else (size, hidden)
            yield Tensor(f"{name}{block}.experts.{expert}.{part}.weight", shape, "expert")


def _per_layer_input_tensors(model: Any, extra: Any) -> Iterator[Tensor]:
    width = len(model.layers) * extra.size
    yield Tensor(f"{model.prefix}embed_tokens_per_layer.weight", (extra.vocab_size, width), "embedding")
    yield from _linear(f"{model.prefix}per_layer_model_projection", width, model.hidden_size)
    yield Tensor(f"{model.prefix}per_layer_projection_norm.weight", (extra.size,), "norm")
    for kind in ("altup_projections", "altup_unembed_projections"):
        for stream in range(extra.streams - 1):
            yield from _linear(f"{model.prefix}{kind}.{stream}", model.hidden_size, model.hidden_size)


def _layer_input_tensors(model: Any, name: str, extra: Any) -> Iterator[Tensor]:
    hidden, streams = model.hidden_size, extra.streams
    yield from _linear(f"{name}per_layer_input_gate", extra.size, hidden)
    yield from _linear(f"{name}per_layer_projection", hidden, extra.size)
    yield Tensor(f"{name}post_per_layer_input_norm.weight", (hidden,), "norm")
    if streams:
        yield Tensor(f"{name}altup.correct_output_scale", (hidden,), "other")
        yield Tensor(f"{name}altup.correction_coefs.weight", (streams, streams), "other")
        yield Tensor(f"{name}altup.prediction_coefs.weight", (streams * streams, streams), "other")
        yield Tensor(f"{name}altup.modality_router.weight", (streams, hidden), "router")
        yield Tensor(f"{name}altup.router_norm.weight", (hidden,), "norm")
        yield from _linear(f"{name}laurel.linear_left", extra.laurel_rank, hidden)
        yield from _linear(f"{name}laurel.linear_right", hidden, extra.laurel_rank)
        yield Tensor(f"{name}laurel.post_laurel_norm.weight", (hidden,), "norm")


_GATED = (("gate_proj", False), ("up_proj", False), ("down_proj", True))
_W1W2W3 = (("w1", False), ("w3", False), ("w2", True))


def _linear(name: str, outputs: int, inputs: int, bias: bool = False) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (outputs, inputs), "linear")
    if bias:
        yield Tensor(f"{name}.bias", (outputs,), "bias")
