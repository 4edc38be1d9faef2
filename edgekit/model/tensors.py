"""A tensor as published checkpoints store it, and the names of modules. `ModelSpec.tensors` lists a model's tensors."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

# "expert": a linear of which a token reads only some; "buffer": stored, but not a parameter.
Role = Literal["embedding", "head", "linear", "expert", "norm", "bias", "router", "other", "buffer"]


_STACKED_ON = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


class Tensor(NamedTuple):
    """One stored tensor. Recipes match `module`, its name without `.weight` or `.bias`."""

    name: str
    shape: tuple[int, ...]
    role: Role

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight").removesuffix(".bias")

    @property
    def stack(self) -> str:
        """The first module of those that read the same inputs, which servers store as one tensor."""
        parent, _, name = self.module.rpartition(".")
        return f"{parent}.{_STACKED_ON.get(name, name)}"

    @property
    def is_linear(self) -> bool:
        """True for a matrix of a layer that activations are multiplied with and recipes quantise."""
        return self.role in ("linear", "expert") and len(self.shape) == 2

    @property
    def is_of_expert(self) -> bool:
        """True for a matrix of an expert and for its bias."""
        return self.role == "expert" or (self.role == "bias" and ".experts." in self.name)

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
    # Before and after attention, before and after the feed-forward, in a model with norms after them.
    with_post_norms: tuple[str, str, str, str] = (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    )  # fmt: skip


NAMES = {
    "llama": ModuleNames(),
    "hunyuan": ModuleNames(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm"),
    "glm4": ModuleNames(
        with_post_norms=(
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm",
        )
    ),
    "lfm2": ModuleNames(
        "self_attn.out_proj", "self_attn.q_layernorm", "self_attn.k_layernorm", "feed_forward.w1", "feed_forward.w3",
        "feed_forward.w2", "operator_norm", "ffn_norm", "embedding_norm",
    ),
}  # fmt: skip
