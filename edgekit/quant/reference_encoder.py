"""The reference of encoders: one layer at a time, in float32; exports are compared with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from edgekit.model.spec import ModelSpec
from edgekit.quant.reference_decoder import embed, final_norm, last_norm, layer_forward, layer_tensors

if TYPE_CHECKING:
    import torch

    GetTensor = Callable[[str], torch.Tensor]


def hidden_states(spec: ModelSpec, get_tensor: GetTensor, tokens: Sequence[int]) -> torch.Tensor:
    """Return the hidden states [length, width] of one text after the last layer and the dense layers of vectors."""
    import torch
    from torch.nn import functional

    with torch.inference_mode():
        hidden = _of_bert(spec, get_tensor, tokens) if spec.is_bert else _of_decoder(spec, get_tensor, tokens)
        for dense in spec.embedding.dense if spec.embedding else ():
            bias = get_tensor(f"{dense.folder}.linear.bias") if dense.bias else None
            hidden = functional.linear(hidden, get_tensor(f"{dense.folder}.linear.weight"), bias)
        return hidden


def _of_decoder(spec: ModelSpec, get_tensor: GetTensor, tokens: Sequence[int]) -> torch.Tensor:
    """Return the normalised states of an encoder that has a decoder's layers."""
    hidden = embed(spec, get_tensor(f"{spec.prefix}embed_tokens.weight")[list(tokens)][None])
    for index in range(len(spec.layers)):
        hidden = layer_forward(spec, index, layer_tensors(spec, index, get_tensor), hidden)
    return final_norm(spec, get_tensor(last_norm(spec)), hidden)[0]


def _of_bert(spec: ModelSpec, get_tensor: GetTensor, tokens: Sequence[int]) -> torch.Tensor:
    from torch.nn import functional

    def norm(name: str, values: torch.Tensor) -> torch.Tensor:
        weight, bias = get_tensor(f"{name}.weight"), get_tensor(f"{name}.bias")
        return functional.layer_norm(values, (spec.hidden_size,), weight, bias, spec.norm_epsilon)

    def linear(name: str, values: torch.Tensor) -> torch.Tensor:
        return functional.linear(values, get_tensor(f"{name}.weight"), get_tensor(f"{name}.bias"))

    def heads(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(len(tokens), spec.heads, -1).transpose(0, 1)

    prefix = spec.prefix
    hidden = get_tensor(f"{prefix}embed_tokens.weight")[list(tokens)]
    hidden = hidden + get_tensor(f"{prefix}embed_positions.weight")[: len(tokens)]
    hidden = norm(f"{prefix}embed_norm", hidden + get_tensor(f"{prefix}embed_types.weight")[0])
    for index in range(len(spec.layers)):
        name = f"{prefix}layers.{index}"
        q, k, v = (heads(linear(f"{name}.self_attn.{kind}_proj", hidden)) for kind in "qkv")
        mixed = functional.scaled_dot_product_attention(q, k, v, scale=spec.attention_scale)
        mixed = linear(f"{name}.self_attn.o_proj", mixed.transpose(0, 1).reshape(len(tokens), -1))
        hidden = norm(f"{name}.post_attention_layernorm", hidden + mixed)
        fed = linear(f"{name}.mlp.up_proj", hidden)
        fed = functional.gelu(fed, approximate="tanh" if spec.activation == "gelu_tanh" else "none")
        hidden = norm(f"{name}.post_feedforward_layernorm", hidden + linear(f"{name}.mlp.down_proj", fed))
    return hidden
