"""The fields common to all decoders: sizes, heads, positions, token ids; checked before any allocation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from edgekit.model.families.fields import Fields
from edgekit.model.families.positions import MAX_POSITIONS, read_rope
from edgekit.model.parts import Layer, Rope
from edgekit.model.spec import ModelSpec

MAX_LAYERS, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_VOCAB = 1 << 10, 1 << 20, 1 << 22, 1 << 24
MAX_HEADS, MAX_HEAD_DIM = 1 << 12, 1 << 13
KINDS_OF_LAYER = ("full_attention", "sliding_attention")
Activation = Literal["silu", "gelu_tanh", "gelu", "relu2"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}


class Defaults(NamedTuple):
    """A family's defaults for fields that its published configs may omit. None: the field is required."""

    positions: int
    epsilon: float = 1e-6
    tied: bool = False
    heads: int | None = None
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden size over heads
    vocab_size: int | None = None


class Shapes(NamedTuple):
    """The checked sizes of a decoder, read from `fields`."""

    fields: Fields
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    tied: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]

    def layer(self, window: int | None = None, **changes: Any) -> Layer:
        """Return a layer of these sizes; a window that covers every position becomes None."""
        reach = window if window is not None and window < self.max_positions else None
        return Layer(**{"window": reach, "kv_heads": self.kv_heads, "head_dim": self.head_dim, **changes})

    def layer_of(self, kind: str, window: int | None, **changes: Any) -> Layer:
        """Return a layer of a model with one rope per kind of layer."""
        is_windowed = kind == "sliding_attention"
        return self.layer(window if is_windowed else None, rope="sliding" if is_windowed else "full", **changes)

    def layers_of(self, kinds: Iterable[str], window: int | None) -> tuple[Layer, ...]:
        """Return the layers of a model in which some have a window."""
        return tuple(self.layer(window if kind == "sliding_attention" else None) for kind in kinds)

    def rope(self, *, interleaved: bool = False, **usual: Any) -> Rope:
        """Read the rope of a model with one; `usual`: the family's defaults, as `read_rope` takes them."""
        rope = read_rope(self.fields, self.head_dim, self.max_positions, **usual)
        return rope.model_copy(update={"interleaved": interleaved})

    def biases(self) -> dict[str, Any]:
        """Return whether attention's products have biases, as fields of `ModelSpec`."""
        bias = self.fields.flag("attention_bias", False)
        return {"qkv_bias": bias, "output_bias": bias}

    def spec(self, name: str, family: str, layers: tuple[Layer, ...] | None = None, **choices: Any) -> ModelSpec:
        """Return the spec of the model; `choices` are the fields in which its family differs from Llama."""
        layers = layers or (self.layer(),) * self.layers
        if "ropes" not in choices:
            choices["ropes"] = {"default": choices.pop("rope", None) or self.rope()}
        if "activation" not in choices:
            choices["activation"] = read_activation(self.fields, "hidden_act", "silu")
        sizes = {field: getattr(self, field) for field in self._fields if field in ModelSpec.model_fields}
        choices.setdefault("attention_scale", self.head_dim**-0.5)
        return ModelSpec(**{**sizes, "name": name, "family": family, "layers": layers, **choices})


def read_shapes(fields: Fields, defaults: Defaults) -> Shapes:
    """Read the sizes in `fields`, completed by a family's defaults."""
    hidden = fields.count("hidden_size", MAX_HIDDEN)
    layers = fields.count("num_hidden_layers", MAX_LAYERS)
    heads = fields.count("num_attention_heads", MAX_HEADS, defaults.heads)
    fallback = heads if fields.has("num_key_value_heads") else defaults.kv_heads or heads
    kv_heads = fields.count("num_key_value_heads", MAX_HEADS, fallback)
    if heads % kv_heads:
        raise fields.refusal(
            "num_key_value_heads",
            f"does not divide the {heads} attention heads ({kv_heads} is taken); correct the file",
        )
    vocab_size = fields.count("vocab_size", MAX_VOCAB, defaults.vocab_size)
    bos = fields.token_ids("bos_token_id", vocab_size)
    return Shapes(
        fields=fields,
        hidden_size=hidden,
        intermediate_size=intermediate_size(fields, layers)[0],
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(fields, hidden, heads, defaults.head_dim),
        vocab_size=vocab_size,
        max_positions=fields.count("max_position_embeddings", MAX_POSITIONS, defaults.positions),
        norm_epsilon=fields.number("rms_norm_eps", 0.0, 1.0, defaults.epsilon),
        tied=fields.flag("tie_word_embeddings", defaults.tied),
        bos_id=bos[0] if bos else None,
        eos_ids=fields.token_ids("eos_token_id", vocab_size),
    )


def intermediate_size(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the feed-forward size of every layer; only Gemma 3n has one per layer."""
    if isinstance(fields.get("intermediate_size"), list):
        sizes = fields.counts_by_layer("intermediate_size", layers, MAX_INTERMEDIATE, least=1)
        assert sizes is not None
        return sizes
    return (fields.count("intermediate_size", MAX_INTERMEDIATE),) * layers


def _head_dim(fields: Fields, hidden: int, heads: int, default: int | None) -> int:
    if fields.get("head_dim") is None and default is None:
        if hidden % heads:
            raise fields.refusal("hidden_size", f"is not a multiple of the {heads} attention heads; correct the file")
        return hidden // heads
    return fields.count("head_dim", MAX_HEAD_DIM, default)


def read_activation(fields: Fields, field: str, default: str) -> Activation:
    """Return the feed-forward's activation by its name in `ModelSpec`."""
    activation = _ACTIVATIONS.get(fields.text(field, default))
    if activation is None:
        raise fields.unsupported(field, f"is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return activation


def read_window(fields: Fields, default: int | None = None) -> int | None:
    """Return the window of a windowed layer: None for null, `default` for an absent field."""
    if not fields.has("sliding_window"):
        return default
    return fields.maybe_count("sliding_window", MAX_POSITIONS)


def read_switched_window(fields: Fields, default: int | None = None) -> int | None:
    """Return the window if `use_sliding_window` is true, otherwise None."""
    window = read_window(fields, default)
    return window if fields.flag("use_sliding_window", False) else None


def read_kinds(fields: Fields, layers: int, default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the kind of every layer: `layer_types`, or the family's default."""
    return fields.choices("layer_types", layers, KINDS_OF_LAYER) or default


def alternating(layers: int, pattern: int) -> tuple[str, ...]:
    """Return the kinds of layers: every `pattern`-th has full attention, the others a window."""
    return tuple("sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(layers))
