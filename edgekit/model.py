"""What a model is: shapes, layers, windows, rope, vocabulary. Pure data; knows nothing of files, recipes or backends.

`edgekit.families` reads one from a Hugging Face `config.json`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from edgekit.frozen import Frozen

# "expert" is a linear of which only some are read for a token; "buffer" is stored, and is no parameter.
Role = Literal["embedding", "head", "linear", "expert", "norm", "bias", "router", "other", "buffer"]


class Tensor(NamedTuple):
    """One stored tensor. `module` is its name without `.weight` / `.bias`: what recipes match."""

    name: str
    shape: tuple[int, ...]
    role: Role

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight").removesuffix(".bias")

    @property
    def size(self) -> int:
        """How many values it holds."""
        return math.prod(self.shape)


class Rope(Frozen):
    """One rotary position embedding: `theta`, how many of the head's dimensions turn, and how it is stretched."""

    theta: float
    dim: int
    kind: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"] = "default"
    factor: float = 1.0
    original_positions: int | None = None  # trained at; where dynamic begins to stretch
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None
    beta_fast: float | None = None  # yarn
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()
    proportion: float = 1.0  # proportional: the share of the dim / 2 frequencies that turn; the others are zero


class Layer(Frozen):
    """One decoder layer, as far as layers of one model differ."""

    window: int | None = None  # tokens that attention reaches back, itself included; None: all
    rope: str | None = "default"  # key into ModelSpec.ropes; None: no positions (SmolLM3)
    kv_heads: int
    head_dim: int
    stores_kv: bool = True  # False where the layer reads the KV of an earlier one (Gemma 3n/4)
    has_values: bool = True  # False where values are the keys before their norm, and v_proj is not stored (Gemma 4)
    experts: bool = False  # a mixture-of-experts feed-forward
    intermediate_size: int | None = None  # where it differs from the model's (Gemma 3n/4)


class Experts(Frozen):
    """Sizes of a mixture of experts."""

    count: int
    active: int
    intermediate_size: int
    layout: Literal["w1w2w3", "separate", "fused"]  # as Mixtral, Qwen3 and Gemma 4 (beside a dense one) store them


class PerLayerInput(Frozen):
    """A second embedding, of which each layer gets its own `size` values (Gemma 3n/4)."""

    vocab_size: int
    size: int
    streams: int = 0  # AltUp: hidden states carried side by side (Gemma 3n)
    laurel_rank: int = 0


class ModelSpec(Frozen):
    """Everything that planning and exporting need to know of a model."""

    name: str
    family: str  # the config's model_type, e.g. "llama", "gemma3_text"
    exportable: str | None = None  # why it can be planned but not exported; None when it can be exported
    hidden_size: int
    intermediate_size: int
    heads: int
    vocab_size: int  # rows of the embedding, padding included
    layers: tuple[Layer, ...]
    ropes: dict[str, Rope]
    max_positions: int
    norm_epsilon: float
    norm_offset: bool = False  # Gemma stores w and uses 1 + w
    activation: Literal["silu", "gelu_tanh", "gelu", "relu2"] = "silu"
    embedding_scale: float = 1.0
    attention_scale: float
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    qk_norm: bool = False  # an RMS norm over each head of q and k, before rope
    post_norms: bool = False  # Gemma: a norm after attention and after the feed-forward, before the residual
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused_qkv: bool = False  # Phi-3 stores qkv_proj and gate_up_proj
    fused_gate_up: bool = False
    tied: bool
    experts: Experts | None = None
    per_layer_input: PerLayerInput | None = None
    layer_scalars: bool = False  # Gemma 4 stores one factor a layer
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    prefix: str = "model."  # what decoder tensor names begin with; "language_model.model." in wrapped checkpoints
    head: str = "lm_head"  # the module of an untied head

    def __hash__(self) -> int:
        # Its ropes are a mapping, which has no hash of its own; equality still compares everything.
        return hash((self.name, self.family, self.hidden_size, self.vocab_size, self.layers))

    @property
    def head_dim(self) -> int:
        return self.layers[0].head_dim

    @property
    def kv_heads(self) -> int:
        return self.layers[0].kv_heads

    def tensors(self) -> Iterator[Tensor]:
        """Every stored tensor with its Hugging Face name, in the order of the layers; a tied head is not stored."""
        hidden = self.hidden_size
        yield Tensor(f"{self.prefix}embed_tokens.weight", (self.vocab_size, hidden), "embedding")
        if self.per_layer_input:
            yield from self._per_layer_input_tensors(self.per_layer_input)
        for index, layer in enumerate(self.layers):
            name = f"{self.prefix}layers.{index}."
            yield Tensor(f"{name}input_layernorm.weight", (hidden,), "norm")
            yield from self._attention_tensors(f"{name}self_attn.", layer)
            yield Tensor(f"{name}post_attention_layernorm.weight", (hidden,), "norm")
            if self.post_norms:
                yield Tensor(f"{name}pre_feedforward_layernorm.weight", (hidden,), "norm")
            if layer.experts and self.experts:
                yield from self._expert_tensors(name, self.experts)
            if not layer.experts or (self.experts and self.experts.layout == "fused"):
                yield from self._dense_tensors(f"{name}mlp.", layer.intermediate_size or self.intermediate_size)
            if self.post_norms:
                yield Tensor(f"{name}post_feedforward_layernorm.weight", (hidden,), "norm")
            if self.per_layer_input:
                yield from self._layer_input_tensors(name, self.per_layer_input)
            if self.layer_scalars:
                yield Tensor(f"{name}layer_scalar", (1,), "buffer")
        yield Tensor(f"{self.prefix}norm.weight", (hidden,), "norm")
        if not self.tied:
            yield Tensor(f"{self.head}.weight", (self.vocab_size, hidden), "head")

    def _attention_tensors(self, name: str, layer: Layer) -> Iterator[Tensor]:
        hidden = self.hidden_size
        queries, keys = self.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        if self.fused_qkv:
            yield from _linear(f"{name}qkv_proj", queries + 2 * keys, hidden, self.qkv_bias)
        else:
            yield from _linear(f"{name}q_proj", queries, hidden, self.qkv_bias)
            if layer.stores_kv:
                yield from _linear(f"{name}k_proj", keys, hidden, self.qkv_bias)
                if layer.has_values:
                    yield from _linear(f"{name}v_proj", keys, hidden, self.qkv_bias)
        if self.qk_norm:
            yield Tensor(f"{name}q_norm.weight", (layer.head_dim,), "norm")
            if layer.stores_kv:
                yield Tensor(f"{name}k_norm.weight", (layer.head_dim,), "norm")
        yield from _linear(f"{name}o_proj", hidden, queries, self.output_bias)

    def _dense_tensors(self, name: str, size: int) -> Iterator[Tensor]:
        if self.fused_gate_up:
            yield from _linear(f"{name}gate_up_proj", 2 * size, self.hidden_size, self.mlp_bias)
        else:
            yield from _linear(f"{name}gate_proj", size, self.hidden_size, self.mlp_bias)
            yield from _linear(f"{name}up_proj", size, self.hidden_size, self.mlp_bias)
        yield from _linear(f"{name}down_proj", self.hidden_size, size, self.mlp_bias)

    def _expert_tensors(self, name: str, experts: Experts) -> Iterator[Tensor]:
        hidden, count, size = self.hidden_size, experts.count, experts.intermediate_size
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

    def _per_layer_input_tensors(self, extra: PerLayerInput) -> Iterator[Tensor]:
        width = len(self.layers) * extra.size
        yield Tensor(f"{self.prefix}embed_tokens_per_layer.weight", (extra.vocab_size, width), "embedding")
        yield from _linear(f"{self.prefix}per_layer_model_projection", width, self.hidden_size)
        yield Tensor(f"{self.prefix}per_layer_projection_norm.weight", (extra.size,), "norm")
        for kind in ("altup_projections", "altup_unembed_projections"):
            for stream in range(extra.streams - 1):
                yield from _linear(f"{self.prefix}{kind}.{stream}", self.hidden_size, self.hidden_size)

    def _layer_input_tensors(self, name: str, extra: PerLayerInput) -> Iterator[Tensor]:
        hidden, streams = self.hidden_size, extra.streams
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

    @property
    def parameters(self) -> int:
        """How many parameters the model has: equal to what transformers counts for the same config."""
        return _count_parameters(self)


@lru_cache(maxsize=64)
def _count_parameters(model: ModelSpec) -> int:
    # Counting walks every tensor, and a planner asks for each option.
    return sum(tensor.size for tensor in model.tensors() if tensor.role != "buffer")


_GATED = (("gate_proj", False), ("up_proj", False), ("down_proj", True))
_W1W2W3 = (("w1", False), ("w3", False), ("w2", True))


def _linear(name: str, outputs: int, inputs: int, bias: bool = False) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (outputs, inputs), "linear")
    if bias:
        yield Tensor(f"{name}.bias", (outputs,), "bias")
