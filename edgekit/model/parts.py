"""The parts of a model's specification: layers, ropes, experts and other blocks. Pure data."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from edgekit.common.base import Frozen
from edgekit.common.bounds import Positive, Share, Size, Text, TokenId, Tokens

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
    # Taps of a gated short convolution instead of attention (LFM2); such a layer stores no keys and values.
    conv_taps: Annotated[int, Field(ge=2, le=64)] | None = Field(None, exclude_if=lambda value: value is None)
    # Linear attention instead of attention; also without keys and values.
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


class ClampedSwiglu(Frozen):
    """A gated unit instead of activation × up (gpt-oss): `gate × sigmoid(alpha × gate) × (up + 1)`.

    The gate is cut off above `limit`, and up on both sides.
    """

    alpha: Positive
    limit: Positive


class Experts(Frozen):
    """Sizes of a mixture of experts."""

    count: Size
    active: Size
    intermediate_size: Size
    # As Mixtral, Qwen3, LFM2, Gemma 4 (with a dense one as well) and gpt-oss store them.
    layout: Literal["w1w2w3", "separate", "feed_forward", "fused", "stacks"]
    # The shares of a token's active experts sum to one. If not, and a softmax gives them, the shares of all experts do.
    normalise: bool = Field(True, exclude_if=lambda value: value)
    scoring: Literal["softmax", "sigmoid"] = Field("softmax", exclude_if=lambda value: value == "softmax")
    biased: bool = Field(False, exclude_if=lambda value: not value)  # a stored bias is added to choose experts (LFM2)
    linear_bias: bool = Field(False, exclude_if=lambda value: not value)  # of the router and of the experts (gpt-oss)
    swiglu: ClampedSwiglu | None = Field(None, exclude_if=lambda value: value is None)  # None: the model's activation

    @property
    def block(self) -> str:
        """The name of a mixture within its layer, in published checkpoints."""
        return {"w1w2w3": "block_sparse_moe", "feed_forward": "feed_forward"}.get(self.layout, "mlp")

    @property
    def router(self) -> str:
        """The name of the router's module within a layer."""
        return f"{self.block}.{'router' if self.layout == 'stacks' else 'gate'}"

    def modules(self, expert: int) -> tuple[str, str, str]:
        """Return the names of an expert's gate, up and down projection within a layer."""
        gate, up, down = ("gate_proj", "up_proj", "down_proj") if self.block == "mlp" else ("w1", "w3", "w2")
        name = f"{self.block}.experts.{expert}."
        return f"{name}{gate}", f"{name}{up}", f"{name}{down}"


Pooling = Literal["mean", "last", "cls", "max"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


class DenseLayer(Frozen):
    """A linear layer without activation that follows the pooling."""

    folder: Text  # of its weights, as in `modules.json`: "2_Dense"
    inputs: Size
    outputs: Size
    bias: bool


class TextEmbedding(Frozen):
    """Pooling, normalisation and prompts of a text embedding, as the model's files state them."""

    pooling: Pooling | None = None  # None: not stated
    normalise: bool = True
    max_tokens: Tokens | None = None  # of one text; None: as many as the model has positions
    prompts: Annotated[dict[Text, Text], Field(max_length=64)] = Field(default_factory=dict)  # put before a text
    default_prompt: Text | None = None
    dense: Annotated[tuple[DenseLayer, ...], Field(max_length=8, exclude_if=lambda value: not value)] = ()
    # Lengths that vectors may be cut to; empty: any. None: the model was not trained for shorter vectors.
    dimensions: Annotated[tuple[Size, ...] | None, Field(max_length=1024, exclude_if=lambda value: value is None)] = (
        None
    )


class Reranking(Frozen):
    """The way a model scores a document for a query.

    `classifier`: a pair of texts gives one logit. `qwen3`: after Qwen3-Reranker's prompt the score is the logit of one
    token, `yes`, less the logit of another, `no`.
    """

    kind: Literal["classifier", "qwen3"]
    activation: Literal["sigmoid", "identity"] = "sigmoid"
    yes: TokenId | None = None  # None: the token with that text
    no: TokenId | None = None


class Encoder(Frozen):
    """The parts of an encoder that a decoder lacks.

    BERT has learned positions, types of tokens, and norms with biases. Other encoders have the layers of a decoder,
    whose windows reach as far ahead as back (EmbeddingGemma).
    """

    positions: Size | None = None  # None: not BERT
    token_types: Size | None = None
    classifier: bool = Field(False, exclude_if=lambda value: not value)  # a pooler, and a classifier with one label


class PerLayerInput(Frozen):
    """A second embedding, of which each layer gets its own `size` values (Gemma 3n/4)."""

    vocab_size: Size
    size: Size
    streams: Annotated[int, Field(ge=0, le=64)] = 0  # AltUp: hidden states carried side by side (Gemma 3n)
    laurel_rank: Annotated[int, Field(ge=0, le=1 << 24)] = 0
