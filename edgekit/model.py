"""What a model is: shapes, layers, windows, rope, vocabulary. Pure data; knows nothing of files, recipes or backends.

`edgekit.families` reads one from a Hugging Face `config.json`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from edgekit.frozen import Frozen

Role = Literal["embedding", "head", "linear", "norm", "bias", "router", "other"]


class Tensor(NamedTuple):
    """One stored tensor. `module` is its name without `.weight` / `.bias`: what recipes match."""

    name: str
    shape: tuple[int, ...]
    role: Role

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight").removesuffix(".bias")

    @property
    def count(self) -> int:
        return math.prod(self.shape)


class Rope(Frozen):
    """One rotary position embedding: `theta`, how many of the head's dimensions turn, and how it is stretched."""

    theta: float
    dim: int
    kind: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"] = "default"
    factor: float = 1.0
    original_positions: int | None = None
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


class Layer(Frozen):
    """One decoder layer, as far as layers of one model differ."""

    window: int | None = None  # tokens that attention reaches back, itself included; None: all
    rope: str | None = "default"  # key into ModelSpec.ropes; None: no positions (SmolLM3)
    kv_heads: int
    head_dim: int
    stores_kv: bool = True  # False where the layer reads the KV of an earlier one (Gemma 3n/4)
    experts: bool = False  # a mixture-of-experts feed-forward


class Experts(Frozen):
    """Sizes of a mixture of experts."""

    count: int
    active: int
    intermediate_size: int
    shared_intermediate_size: int = 0


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
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    prefix: str = "model."  # what decoder tensor names begin with; "language_model.model." in wrapped checkpoints
    extra_tensors: tuple[Tensor, ...] = ()  # sized but never exported (Gemma 3n/4, unknown families)

    @property
    def head_dim(self) -> int:
        return self.layers[0].head_dim

    @property
    def kv_heads(self) -> int:
        return self.layers[0].kv_heads

    def tensors(self) -> Iterator[Tensor]:
        """Every stored tensor with its Hugging Face name, in the order of the layers; a tied head is not stored."""
        raise AssertionError("written by the reader of families")

    @property
    def parameters(self) -> int:
        """How many parameters the model has: equal to what transformers counts for the same config."""
        return sum(tensor.count for tensor in self.tensors())
