"""A model's shapes, layers, windows, ropes and vocabulary, independent of files, recipes and backends. Pure data.

`edgekit.model.families` reads one from a Hugging Face `config.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from edgekit.common.base import Frozen
from edgekit.common.bounds import Positive, Share, Size, Text, TokenId, Tokens
from edgekit.model.tensors import NAMES, ModuleNames, Tensor, stored_tensors

_Scale = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class Rope(Frozen):
    """One rotary position embedding: its base `theta`, the number of rotated dimensions, and its scaling."""

    theta: Annotated[float, Field(gt=1, le=1e15, allow_inf_nan=False)]
    dim: Annotated[int, Field(ge=2, le=1 << 20, multiple_of=2)]
    kind: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"] = "default"
    factor: Positive = 1.0
    original_positions: Tokens | None = None  # the context of the training; `dynamic` stretches the rope beyond it
    low_freq_factor: Positive | None = None  # llama3
    high_freq_factor: Positive | None = None
    beta_fast: Positive | None = None  # yarn
    beta_slow: Positive | None = None
    attention_factor: _Scale | None = None
    mscale: _Scale | None = None
    mscale_all_dim: _Scale | None = None
    truncate: bool = True
    short_factor: tuple[Positive, ...] = ()  # longrope
    long_factor: tuple[Positive, ...] = ()
    interleaved: bool = False  # rotates neighbouring pairs of values instead of a head's two halves (ERNIE 4.5)
    proportion: Share = 1.0  # proportional: the share of the dim / 2 frequencies that rotate; the others are zero

    @model_validator(mode="after")
    def _has_its_parameters(self) -> Rope:
        if self.kind in ("dynamic", "yarn", "llama3", "longrope") and self.original_positions is None:
            raise ValueError(f"a rope of kind {self.kind} needs original_positions")
        if self.kind == "dynamic" and self.dim < 4:
            raise ValueError("a dynamic rope needs at least 4 rotary values")
        if self.kind == "llama3" and (
            self.low_freq_factor is None
            or self.high_freq_factor is None
            or self.high_freq_factor <= self.low_freq_factor
        ):
            raise ValueError("a llama3 rope needs a low_freq_factor below its high_freq_factor")
        if self.kind == "longrope":
            if self.original_positions == 1:
                raise ValueError("a longrope needs original_positions above 1")
            if len(self.short_factor) != self.dim // 2 or len(self.long_factor) != self.dim // 2:
                raise ValueError(f"a longrope of dim {self.dim} needs {self.dim // 2} short and long factors")
        return self


class DeltaRule(Frozen):
    """Sizes of a gated delta rule (Qwen3.5): linear attention with a memory of `key_dim` × `value_dim` for each head.

    Queries, keys and values pass through a convolution over `taps` tokens first. A head of queries and keys serves
    consecutive heads of values.
    """

    key_heads: Size
    value_heads: Size
    key_dim: Size
    value_dim: Size
    taps: Annotated[int, Field(ge=2, le=64)]

    @model_validator(mode="after")
    def _heads_agree(self) -> DeltaRule:
        if self.value_heads % self.key_heads:
            raise ValueError(f"key_heads: {self.key_heads} does not divide {self.value_heads} value heads")
        return self

    @property
    def keys(self) -> int:
        """Values in the keys of one token, and in its queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Values of one token that pass through the convolution."""
        return 2 * self.keys + self.values


class Layer(Frozen):
    """One decoder layer: the properties in which layers of one model differ."""

    window: Tokens | None = None  # tokens that attention sees, the current one included; None: all
    rope: Text | None = "default"  # key into ModelSpec.ropes; None: no positions (SmolLM3)
    kv_heads: Size
    head_dim: Size
    stores_kv: bool = True  # False where the layer reads the KV of an earlier one (Gemma 3n/4)
    has_values: bool = True  # False where values are the keys before their norm, and v_proj is not stored (Gemma 4)
    experts: bool = False  # a mixture-of-experts feed-forward
    intermediate_size: Size | None = None  # where it differs from the model's (Gemma 3n/4)
    # Taps of a gated short convolution in place of attention (LFM2); such a layer stores no keys and values.
    conv_taps: Annotated[int, Field(ge=2, le=64)] | None = Field(None, exclude_if=lambda value: value is None)
    # Linear attention in place of attention; also without keys and values.
    delta_rule: DeltaRule | None = Field(None, exclude_if=lambda value: value is None)

    @property
    def kind(self) -> tuple[int | None, str | None]:
        """Window and rope, by which a layer finds the one whose keys and values it reads."""
        return self.window, self.rope

    @property
    def projections(self) -> tuple[str, ...]:
        """Linears of attention's inputs. A layer may read the keys and values of another, or its keys as values."""
        return ("q_proj", "k_proj", "v_proj")[: 1 + self.stores_kv + (self.stores_kv and self.has_values)]

    @property
    def is_recurrent(self) -> bool:
        """True where the layer keeps a recurrent part of fixed size instead of keys and values."""
        return self.conv_taps is not None or self.delta_rule is not None


class Experts(Frozen):
    """Sizes of a mixture of experts."""

    count: Size
    active: Size
    intermediate_size: Size
    layout: Literal["w1w2w3", "separate", "fused"]  # as Mixtral, Qwen3 and Gemma 4 (beside a dense one) store them


Pooling = Literal["mean", "last", "cls", "max"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


class TextEmbedding(Frozen):
    """Pooling, normalisation and prompts of a text embedding, as the model's files state them."""

    pooling: Pooling | None = None  # None: not stated
    normalise: bool = True
    max_tokens: Tokens | None = None  # of one text; None: as many as the model has positions
    prompts: Annotated[dict[Text, Text], Field(max_length=64)] = Field(default_factory=dict)  # put before a text
    default_prompt: Text | None = None
    # Lengths that vectors may be cut to; empty: any. None: the model was not trained for shorter vectors.
    dimensions: Annotated[tuple[Size, ...] | None, Field(max_length=1024, exclude_if=lambda value: value is None)] = (
        None
    )


class Encoder(Frozen):
    """The tensors of a BERT encoder that a decoder lacks: learned positions, types of tokens, and norms with biases."""

    positions: Size
    token_types: Size


class PerLayerInput(Frozen):
    """A second embedding, of which each layer gets its own `size` values (Gemma 3n/4)."""

    vocab_size: Size
    size: Size
    streams: Annotated[int, Field(ge=0, le=64)] = 0  # AltUp: hidden states carried side by side (Gemma 3n)
    laurel_rank: Annotated[int, Field(ge=0, le=1 << 24)] = 0


class ModelSpec(Frozen):
    """Everything that planning and exporting need to know about a model."""

    name: Text
    family: Text  # the config's model_type, e.g. "llama", "gemma3_text"
    exportable: Text | None = None  # the reason why it can be planned but not exported; None: it can be exported
    hidden_size: Size
    intermediate_size: Size
    heads: Size
    vocab_size: Size  # rows of the embedding, padding included
    layers: Annotated[tuple[Layer, ...], Field(min_length=1, max_length=4096)]
    ropes: Annotated[dict[Text, Rope], Field(max_length=64)]
    max_positions: Tokens
    norm_epsilon: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    norm_offset: bool = False  # Gemma stores w and uses 1 + w
    activation: Literal["silu", "gelu_tanh", "gelu", "relu2"] = "silu"
    embedding_scale: Positive = 1.0
    residual_scale: Positive = 1.0  # scales the outputs of attention and feed-forward (Granite)
    logit_scale: Positive = 1.0
    attention_scale: Positive
    attention_softcap: Positive | None = None
    logit_softcap: Positive | None = None
    qk_norm: bool = False  # an RMS norm over q and k, before rope
    qk_norm_span: Literal["head", "layer"] = "head"  # over each head, or over all heads together (OLMo)
    # A norm without weights over each head of values (Gemma 4).
    value_norm: bool = Field(False, exclude_if=lambda value: not value)
    pre_norms: bool = True  # a norm before attention and before the feed-forward
    post_norms: bool = False  # a norm after attention and after the feed-forward, before the residual
    # Each head's rows of q_proj are followed by those of a gate, whose sigmoid scales the head's output (Qwen3.5).
    attention_gate: bool = Field(False, exclude_if=lambda value: not value)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused_qkv: bool = False  # Phi-3 stores qkv_proj and gate_up_proj
    fused_gate_up: bool = False
    tied: bool
    experts: Experts | None = None
    per_layer_input: PerLayerInput | None = None
    layer_scalars: bool = False  # Gemma 4 stores one factor a layer
    bos_id: TokenId | None = None
    eos_ids: tuple[TokenId, ...] = ()
    prefix: Text = "model."  # of decoder tensor names; "language_model.model." in wrapped checkpoints
    head: Text = "lm_head"  # the module of an untied head
    naming: Literal["llama", "lfm2"] = Field("llama", exclude_if=lambda value: value == "llama")  # of other modules
    conv_bias: bool = Field(False, exclude_if=lambda value: not value)  # of short convolutions and their projections
    # None: a decoder. An encoder attends in both directions, normalises after each residual, and has no head.
    encoder: Annotated[Encoder | None, Field(exclude_if=lambda value: value is None)] = None
    embedding: Annotated[TextEmbedding | None, Field(exclude_if=lambda value: value is None)] = None

    @model_validator(mode="after")
    def _parts_agree(self) -> ModelSpec:
        if not (self.pre_norms or self.post_norms):
            raise ValueError("pre_norms: a layer needs norms before or after its parts")
        for index, layer in enumerate(self.layers):
            if self.heads % layer.kv_heads:
                raise ValueError(f"layers.{index}.kv_heads: {layer.kv_heads} does not divide {self.heads} heads")
            if layer.rope is not None and layer.rope not in self.ropes:
                raise ValueError(f"layers.{index}.rope: {layer.rope[:100]!r} is not among the ropes")
            if layer.rope is not None and self.ropes[layer.rope].dim > layer.head_dim:
                raise ValueError(f"layers.{index}.rope: rotates more than the {layer.head_dim} values of a head")
            if layer.experts and self.experts is None:
                raise ValueError(f"layers.{index}.experts: the model has no experts")
            if self._reads_other_shapes(index):
                raise ValueError(
                    f"layers.{index}.stores_kv: no earlier layer has keys and values of its kind and shape"
                )
        return self

    def __hash__(self) -> int:
        # Cheap, because the planner looks specs up in caches thousands of times; equality still compares everything.
        return hash((self.name, self.family, self.hidden_size, self.vocab_size, len(self.layers)))

    @property
    def names(self) -> ModuleNames:
        """The names of modules in this model's checkpoints."""
        return NAMES[self.naming]

    @property
    def head_dim(self) -> int:
        return self.layers[0].head_dim

    @property
    def kv_heads(self) -> int:
        return self.layers[0].kv_heads

    def kv_owner(self, index: int) -> int:
        """Return the layer whose keys and values layer `index` attends to: itself, or the last one of its kind."""
        layer = self.layers[index]
        if layer.stores_kv or layer.is_recurrent:
            return index
        owners = (other for other in reversed(range(index)) if self.layers[other].stores_kv)
        return next((other for other in owners if self.layers[other].kind == layer.kind), -1)

    def _reads_other_shapes(self, index: int) -> bool:
        """Return True if a layer's keys and values would be those of a layer with other shapes, or of none."""
        owner, layer = self.kv_owner(index), self.layers[index]
        found = self.layers[owner]
        return owner < 0 or (found.kv_heads, found.head_dim) != (layer.kv_heads, layer.head_dim)

    def qkv_widths(self, layer: Layer) -> tuple[int, int, int]:
        """Return the numbers of values in the queries, keys and values of one token in `layer`."""
        keys = layer.kv_heads * layer.head_dim
        return self.heads * layer.head_dim, keys, keys

    def qk_norm_widths(self, layer: Layer) -> tuple[int, int]:
        """Return the numbers of values that one norm of queries and one norm of keys cover."""
        queries, keys, _ = self.qkv_widths(layer)
        return (queries, keys) if self.qk_norm_span == "layer" else (layer.head_dim, layer.head_dim)

    def layer_norms(self) -> tuple[str | None, str | None, str | None, str | None]:
        """Return the names of a layer's norms: before and after attention, before and after the feed-forward.

        Published checkpoints call the norm before the feed-forward `post_attention_layernorm`, unless a norm after
        attention takes that name.
        """
        if not self.post_norms:
            return self.names.before_attention, None, self.names.before_feed, None
        before = ("input_layernorm", "pre_feedforward_layernorm") if self.pre_norms else (None, None)
        return before[0], "post_attention_layernorm", before[1], "post_feedforward_layernorm"

    def tensors(self) -> Iterator[Tensor]:
        """Yield every stored tensor with its Hugging Face name, layer by layer; a tied head is not stored."""
        return stored_tensors(self)

    @property
    def parameters(self) -> int:
        """The number of parameters, equal to the one that transformers counts for the same config."""
        return _count_parameters(self)


@lru_cache(maxsize=64)
def _count_parameters(model: ModelSpec) -> int:
    # Counting walks every tensor, and a planner asks for each candidate.
    return sum(tensor.size for tensor in model.tensors() if tensor.role != "buffer")
