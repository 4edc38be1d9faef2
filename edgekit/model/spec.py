"""A model's shapes, layers, ropes and vocabulary, and the tensors that follow. Independent of recipes and backends.

`edgekit.model.families` reads one from a Hugging Face `config.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field, model_validator

from edgekit.common.base import Frozen
from edgekit.common.bounds import Positive, Size, Text, TokenId, Tokens
from edgekit.model.parts import DeltaRule, Encoder, Experts, Layer, PerLayerInput, Reranking, Rope, TextEmbedding
from edgekit.model.tensors import NAMES, ModuleNames, Tensor


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
    centred_norms: bool = Field(False, exclude_if=lambda value: not value)  # layer norms without biases (Cohere)
    activation: Literal["silu", "gelu_tanh", "gelu", "relu2"] = "silu"
    embedding_scale: Positive = 1.0
    residual_scale: Positive = 1.0  # scales the outputs of attention and feed-forward (Granite)
    logit_scale: Positive = 1.0
    attention_scale: Positive
    attention_softcap: Positive | None = None
    logit_softcap: Positive | None = None
    qk_norm: bool = False  # an RMS norm over q and k, before rope
    qk_norm_span: Literal["head", "layer"] = "head"  # over each head, or over all heads together (OLMo)
    # The norms come after the rope (Hunyuan). Rotating keeps a head's mean square, so cached keys are normalised and
    # rotated, both weights scale the queries, and evictions can rotate cached keys back. Scores depend on positions
    # themselves, not only on distances.
    norms_after_rope: bool = Field(False, exclude_if=lambda value: not value)
    # A norm without weights over each head of values (Gemma 4).
    value_norm: bool = Field(False, exclude_if=lambda value: not value)
    pre_norms: bool = True  # a norm before attention and before the feed-forward
    post_norms: bool = False  # a norm after attention and after the feed-forward, before the residual
    # Attention and feed-forward read the same normalised input, and both are added to the residual stream (Cohere).
    parallel: bool = Field(False, exclude_if=lambda value: not value)
    gated: bool = Field(True, exclude_if=lambda value: value)  # False: the activation of `up` alone (Arcee)
    # In q_proj, every head's rows are followed by the rows of a gate, whose sigmoid scales the head's output (Qwen3.5).
    attention_gate: bool = Field(False, exclude_if=lambda value: not value)
    # Each head has a learnt logit in its softmax, which takes a share of the weights and has no value (gpt-oss).
    attention_sinks: bool = Field(False, exclude_if=lambda value: not value)
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
    # Of other modules.
    naming: Literal["llama", "lfm2", "hunyuan", "glm4"] = Field("llama", exclude_if=lambda value: value == "llama")
    conv_bias: bool = Field(False, exclude_if=lambda value: not value)  # of short convolutions and their projections
    # None: a decoder. An encoder attends in both directions, and has no head.
    encoder: Annotated[Encoder | None, Field(exclude_if=lambda value: value is None)] = None
    embedding: Annotated[TextEmbedding | None, Field(exclude_if=lambda value: value is None)] = None
    reranking: Annotated[Reranking | None, Field(exclude_if=lambda value: value is None)] = None

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
    def is_bert(self) -> bool:
        """True for an encoder with learned positions, whose layers normalise after each residual."""
        return self.encoder is not None and self.encoder.positions is not None

    @property
    def vector_size(self) -> int:
        """The number of values of a text's vector: the width of a hidden state, or of the last dense layer."""
        dense = self.embedding.dense if self.embedding else ()
        return dense[-1].outputs if dense else self.hidden_size

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

    @property
    def storing_layers(self) -> tuple[int, ...]:
        """The layers that store keys and values."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.stores_kv)

    def kv_owner(self, index: int) -> int:
        """Return the layer whose keys and values layer `index` attends to: itself, or the last one of its kind."""
        layer = self.layers[index]
        if layer.stores_kv or layer.is_recurrent:
            return index
        owners = (other for other in reversed(range(index)) if self.layers[other].stores_kv)
        return next((other for other in owners if self.layers[other].kind == layer.kind), -1)

    def _reads_other_shapes(self, index: int) -> bool:
        """Return True if a layer that shares a cache would read a cache of other shapes, or none."""
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
            return self.names.before_attention, None, None if self.parallel else self.names.before_feed, None
        before_attention, after_attention, before_feed, after_feed = self.names.with_post_norms
        if not self.pre_norms:
            return None, after_attention, None, after_feed
        return before_attention, after_attention, before_feed, after_feed

    def tensors(self) -> Iterator[Tensor]:
        """Yield every stored tensor with its Hugging Face name, layer by layer; a tied head is not stored."""
        return iter(_tensors(self))

    @property
    def parameters(self) -> int:
        """The number of parameters, equal to the one that transformers counts for the same config."""
        return _count_parameters(self)


@lru_cache(maxsize=64)
def _count_parameters(model: ModelSpec) -> int:
    # Counting walks every tensor, and a planner asks for each candidate.
    return sum(tensor.size for tensor in model.tensors() if tensor.role != "buffer")


@lru_cache(maxsize=4)
def _tensors(model: ModelSpec) -> tuple[Tensor, ...]:
    # A planner walks over the tensors of one model dozens of times, and a model of experts has thousands.
    return tuple(_stored_tensors(model))


def _stored_tensors(model: ModelSpec) -> Iterator[Tensor]:
    hidden = model.hidden_size
    yield Tensor(f"{model.prefix}embed_tokens.weight", (model.vocab_size, hidden), "embedding")
    if model.is_bert and model.encoder:
        yield from _bert_tensors(model, model.encoder)
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
            Tensor(f"{name}{norm}.bias", (hidden,), "bias") for norm in model.layer_norms() if norm and model.is_bert
        )
    for dense in model.embedding.dense if model.embedding else ():
        yield from _linear(f"{dense.folder}.linear", dense.outputs, dense.inputs, dense.bias)
    if model.encoder and model.encoder.classifier:
        yield from _linear(f"{model.prefix}pooler.dense", hidden, hidden, bias=True)
        yield Tensor("classifier.weight", (1, hidden), "other")
        yield Tensor("classifier.bias", (1,), "bias")
    if not model.is_bert:
        yield Tensor(f"{model.prefix}{model.names.last_norm}.weight", (hidden,), "norm")
    if not (model.encoder or model.tied):
        yield Tensor(f"{model.head}.weight", (model.vocab_size, hidden), "head")


def _bert_tensors(model: ModelSpec, encoder: Encoder) -> Iterator[Tensor]:
    hidden, name = model.hidden_size, f"{model.prefix}embed_"
    for table, rows in (("positions", encoder.positions), ("types", encoder.token_types)):
        assert rows is not None
        yield Tensor(f"{name}{table}.weight", (rows, hidden), "other")
    yield from (Tensor(f"{name}norm.weight", (hidden,), "norm"), Tensor(f"{name}norm.bias", (hidden,), "bias"))


def _attention_tensors(model: ModelSpec, name: str, layer: Layer) -> Iterator[Tensor]:
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
    if model.attention_sinks:
        yield Tensor(f"{attention}sinks", (model.heads,), "other")
    yield from _linear(f"{name}{names.output}", hidden, queries, model.output_bias)


def _convolution_tensors(model: ModelSpec, name: str, taps: int) -> Iterator[Tensor]:
    hidden = model.hidden_size
    yield from _linear(f"{name}in_proj", 3 * hidden, hidden, model.conv_bias)
    yield Tensor(f"{name}conv.weight", (hidden, 1, taps), "other")
    if model.conv_bias:
        yield Tensor(f"{name}conv.bias", (hidden,), "bias")
    yield from _linear(f"{name}out_proj", hidden, hidden, model.conv_bias)


def _delta_rule_tensors(model: ModelSpec, name: str, rule: DeltaRule) -> Iterator[Tensor]:
    hidden = model.hidden_size
    yield Tensor(f"{name}dt_bias", (rule.value_heads,), "other")
    yield Tensor(f"{name}A_log", (rule.value_heads,), "other")
    yield Tensor(f"{name}conv1d.weight", (rule.channels, 1, rule.taps), "other")
    yield Tensor(f"{name}norm.weight", (rule.value_dim,), "other")  # without the offset of the model's norms
    yield from _linear(f"{name}out_proj", hidden, rule.values)
    for part, rows in (("qkv", rule.channels), ("z", rule.values), ("b", rule.value_heads), ("a", rule.value_heads)):
        yield from _linear(f"{name}in_proj_{part}", rows, hidden)


def _dense_tensors(model: ModelSpec, name: str, size: int) -> Iterator[Tensor]:
    names = model.names
    if model.fused_gate_up:
        yield from _linear(f"{name}mlp.gate_up_proj", 2 * size, model.hidden_size, model.mlp_bias)
    else:
        if model.gated and not model.is_bert:
            yield from _linear(f"{name}{names.gate}", size, model.hidden_size, model.mlp_bias)
        yield from _linear(f"{name}{names.up}", size, model.hidden_size, model.mlp_bias)
    yield from _linear(f"{name}{names.down}", model.hidden_size, size, model.mlp_bias)


def _expert_tensors(model: ModelSpec, name: str, experts: Experts) -> Iterator[Tensor]:
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
    yield Tensor(f"{name}{experts.router}.weight", (count, hidden), "router")
    if experts.linear_bias:
        yield Tensor(f"{name}{experts.router}.bias", (count,), "bias")
    if experts.biased:
        yield Tensor(f"{name}{experts.block}.expert_bias", (count,), "buffer")
    shapes = (size, hidden), (size, hidden), (hidden, size)
    for expert in range(count):
        for module, shape in zip(experts.modules(expert), shapes, strict=True):
            yield Tensor(f"{name}{module}.weight", shape, "expert")
            if experts.linear_bias:
                yield Tensor(f"{name}{module}.bias", shape[:1], "bias")


def _per_layer_input_tensors(model: ModelSpec, extra: PerLayerInput) -> Iterator[Tensor]:
    width = len(model.layers) * extra.size
    yield Tensor(f"{model.prefix}embed_tokens_per_layer.weight", (extra.vocab_size, width), "embedding")
    yield from _linear(f"{model.prefix}per_layer_model_projection", width, model.hidden_size)
    yield Tensor(f"{model.prefix}per_layer_projection_norm.weight", (extra.size,), "norm")
    for kind in ("altup_projections", "altup_unembed_projections"):
        for stream in range(extra.streams - 1):
            yield from _linear(f"{model.prefix}{kind}.{stream}", model.hidden_size, model.hidden_size)


def _layer_input_tensors(model: ModelSpec, name: str, extra: PerLayerInput) -> Iterator[Tensor]:
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


def _linear(name: str, outputs: int, inputs: int, bias: bool = False) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (outputs, inputs), "linear")
    if bias:
        yield Tensor(f"{name}.bias", (outputs,), "bias")
