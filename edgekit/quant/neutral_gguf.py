"""Neutral weights as a GGUF model: S4 as Q4_0, S8 as Q8_0, with the same integers and scales, and floats as they are.

The metadata is checked with edgekit's own GGUF reader, which knows what llama.cpp takes from a file and what it decides
by itself: a model is refused unless the reader finds the same model in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgekit.contracts.neutral import NeutralWeights, on_disk
from edgekit.contracts.recipe import GGUF_BLOCKS, Format, Recipe, tensors_alike
from edgekit.errors import EdgekitError, Unsupported
from edgekit.formats.gguf_types import TYPES
from edgekit.formats.gguf_writer import BLOCK, TYPE_IDS, MetadataValue, WrittenTensor, q4_0, q4_1, q8_0, write_gguf
from edgekit.model.families import model_from_config
from edgekit.model.gguf_config import ARCHITECTURES, TOP, GgufArchitecture, huggingface_model
from edgekit.model.parts import Layer, Rope
from edgekit.model.rope import frequencies
from edgekit.model.spec import ModelSpec
from edgekit.model.tensors import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PIECE_VALUES = 1 << 22
_TYPE_NAMES = {"s4": "Q4_0", "s8": "Q8_0", "float16": "F16", "bfloat16": "BF16", "float32": "F32"} | {
    kind: kind.upper() for kind in GGUF_BLOCKS
}
# (module, type name, float rows) → the rows in that type of llama.cpp's own.
Quantise = Callable[[str, str, "NDArray[np.float32]"], "NDArray[np.uint8]"]
_SAME_ARCHITECTURE = {"mistral": "llama"}  # family → the family as which llama.cpp computes it
_ROPE_FACTORS = "rope_freqs.weight"
# Fields that decide the logits, apart from layers and ropes.
_FIELDS = (
    "hidden_size", "intermediate_size", "heads", "vocab_size", "norm_epsilon", "norm_offset", "activation",
    "embedding_scale", "residual_scale", "logit_scale", "attention_scale", "attention_softcap", "logit_softcap",
    "qk_norm", "qk_norm_span", "pre_norms", "post_norms", "qkv_bias", "output_bias", "mlp_bias", "fused_qkv",
    "fused_gate_up", "tied", "experts", "per_layer_input", "layer_scalars", "centred_norms", "parallel", "gated",
)  # fmt: skip
_COPIED = ("Q4_0", "Q4_K", "IQ4_NL")  # on x86-64 with AVX2, as measured with the pinned library
_AS_WIDE = ("qwen2", "phi3")  # whose queries llama.cpp reads by the hidden size alone
_LAYER_FIELDS = ("kv_heads", "head_dim", "stores_kv", "has_values", "experts", "intermediate_size")


def write_neutral_gguf(weights: NeutralWeights, path: Path, context: int) -> None:
    """Write the model without a tokenizer, for callers that pass token ids. Raises `Unsupported` for others."""
    if reason := refusal(weights.model, weights.recipe, context):
        raise Unsupported(f"llama.cpp: {reason}")
    metadata = model_metadata(weights.model, context) | {"tokenizer.ggml.model": "none"}
    write_gguf(path, metadata, written_tensors(weights, context))


def refusal(model: ModelSpec, recipe: Recipe, context: int) -> str | None:
    """Return the reason why llama.cpp cannot compute this model for contexts up to `context`; None if it can."""
    found = architecture_of(model)
    if found is None:
        known = [*(each.model_type for each in ARCHITECTURES.values()), *_SAME_ARCHITECTURE]
        return f"{model.family} models are not written as GGUF; supported: {', '.join(known)}"
    formats = [rule.format for rule in recipe.rules]
    if any(each.kind not in _TYPE_NAMES or (each.minima and each.kind != "s4") for each in formats):
        return f"recipe {recipe.name} has a format that only other engines hold; choose an s4, s8 or float recipe"
    if all(layer.rope is None for layer in model.layers):
        return "none of its layers has positions, and llama.cpp rotates those of every family; use another target"
    ropes = {rope.kind for rope in model.ropes.values()}
    if "longrope" in ropes and any(rope.short_factor != rope.long_factor for rope in model.ropes.values()):
        return "its rule for longrope factors is not this model's; use another target"
    if odd := ropes - {"default", "linear", "llama3", "yarn", "longrope"}:
        return f"a {odd.pop()} rope is not written as GGUF; use another target"
    if found[1].model_type == "phi3" and _narrowest(model) < context:
        return f"it ignores the window of {_narrowest(model)} tokens of phi3 models; plan a context within it"
    if found[1].model_type in _AS_WIDE and model.layers[0].head_dim * model.heads != model.hidden_size:
        return "llama.cpp takes queries of this family to be as wide as the hidden state; use another target"
    return _unnamed(model) or _unblocked(model, recipe) or _difference(model, context)


def model_metadata(model: ModelSpec, context: int) -> dict[str, MetadataValue]:
    """Return the metadata of the model itself, without its tokenizer."""
    found = architecture_of(model)
    assert found is not None, model.family
    name, architecture = found
    layer, windows = model.layers[0], [layer.window for layer in model.layers]
    global_rope, window_rope = _ropes(model)
    metadata: dict[str, MetadataValue] = {
        "general.architecture": name,
        "general.type": "model",
        "general.name": model.name,
        f"{name}.block_count": len(model.layers),
        f"{name}.context_length": max(context, model.max_positions),
        f"{name}.embedding_length": model.hidden_size,
        f"{name}.feed_forward_length": model.intermediate_size,
        f"{name}.attention.head_count": model.heads,
        f"{name}.attention.head_count_kv": layer.kv_heads,
        f"{name}.attention.key_length": layer.head_dim,
        f"{name}.attention.value_length": layer.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": float(model.norm_epsilon),
        f"{name}.rope.dimension_count": global_rope.dim,
        f"{name}.rope.freq_base": float(global_rope.theta),
        f"{name}.vocab_size": model.vocab_size,
    }
    metadata |= {f"{name}.{key}": value for key, value in _scaling(global_rope).items()}
    if "attention.sliding_window" in architecture.keys and any(windows):
        metadata[f"{name}.attention.sliding_window"] = next(window for window in windows if window)
    if architecture.model_type == "gemma3_text":
        metadata[f"{name}.rope.freq_base_swa"] = float(window_rope.theta)
    if architecture.model_type == "gemma2":
        metadata[f"{name}.attn_logit_softcapping"] = float(model.attention_softcap or 0.0)
        metadata[f"{name}.final_logit_softcapping"] = float(model.logit_softcap or 0.0)
    return metadata


def written_tensors(
    weights: NeutralWeights, context: int, recipe: Recipe | None = None, quantise: Quantise | None = None
) -> list[WrittenTensor]:
    """Return every tensor of the file in the model's order; bytes are computed while they are written.

    With `recipe`, `quantise` converts float weights to llama.cpp's own formats; None writes the weights as they are.
    """
    tensors = [_written(weights, tensor, recipe or weights.recipe, quantise) for tensor in weights.model.tensors()]
    factors = _rope_factors(weights.model, context)
    if factors is not None:
        tensors.append(WrittenTensor(_ROPE_FACTORS, "F32", factors.shape, lambda: iter([factors])))
    return tensors


def stored_types(model: ModelSpec, recipe: Recipe, context: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and the shape of every tensor of the file, by its name there."""
    types = {
        gguf_name(model, tensor): (_type_name(tensor, recipe.format_of(tensor)), tensor.shape)
        for tensor in model.tensors()
    }
    factors = _rope_factors(model, context)
    return types if factors is None else types | {_ROPE_FACTORS: ("F32", factors.shape)}


def stored_bytes(model: ModelSpec, recipe: Recipe) -> tuple[int, int]:
    """Return the bytes of all tensors of the file, and of those that llama.cpp copies in the order of its kernels."""
    total = copied = 0
    for tensor, stored, number in tensors_alike(model, recipe):
        type_name = _type_name(tensor, stored)
        kind = TYPES[TYPE_IDS[type_name]]
        size = number * (tensor.size // kind.values * kind.bytes)
        total += size
        is_multiplied = tensor.role in ("linear", "head") or (tensor.role == "embedding" and model.tied)
        copied += size if type_name in _COPIED and is_multiplied else 0
    return total, copied


def gguf_name(model: ModelSpec, tensor: Tensor) -> str:
    """Return a tensor's name in the file."""
    found = architecture_of(model)
    assert found is not None, model.family
    name, _, kind = on_disk(model, tensor.name).rpartition(".")
    top = {theirs: ours for ours, theirs in TOP.items()}
    if name in top:
        return f"{top[name]}.{kind}"
    _, _, index, module = name.split(".", 3)
    return f"blk.{index}.{_parts(found[1])[module]}.{kind}"


def row_order(model: ModelSpec, module: str) -> NDArray[np.intp] | None:
    """Return the order of a module's rows in the file; None if it is the model's order.

    In some families, llama.cpp rotates neighbouring values of a head where the model rotates its two halves.
    """
    found = architecture_of(model)
    heads = {"q_proj": model.heads, "k_proj": model.layers[0].kv_heads}.get(module.rpartition(".")[2])
    if found is None or heads is None or not found[1].interleaved:
        return None
    width = model.layers[0].head_dim
    return np.arange(heads * width).reshape(heads, 2, width // 2).swapaxes(1, 2).reshape(-1)


def read_back(model: ModelSpec, context: int) -> ModelSpec:
    """Return the model that the metadata and the names of the file describe."""
    shapes = {gguf_name(model, tensor): tensor.shape for tensor in model.tensors()}
    factors = _rope_factors(model, context)
    if factors is not None:
        shapes[_ROPE_FACTORS] = factors.shape
    stored = {key: _as_stored(value) for key, value in model_metadata(model, context).items()}
    described = huggingface_model(
        stored, shapes, lambda name: [float(value) for value in factors] if factors is not None else [], "the metadata"
    )
    return model_from_config(described.config, model.name, "the metadata")


def architecture_of(model: ModelSpec) -> tuple[str, GgufArchitecture] | None:
    """Return llama.cpp's name of the model's architecture, and its description; None if there is none."""
    family = _SAME_ARCHITECTURE.get(model.family, model.family)
    return next((pair for pair in ARCHITECTURES.items() if pair[1].model_type == family), None)


def _parts(architecture: GgufArchitecture) -> Mapping[str, str]:
    return {module: part for part, module in architecture.layer.items()}


def _narrowest(model: ModelSpec) -> float:
    return min((layer.window for layer in model.layers if layer.window), default=math.inf)


@lru_cache(maxsize=64)  # a plan asks again for each recipe and context
def _unnamed(model: ModelSpec) -> str | None:
    """Return the reason why the first tensor without a GGUF name cannot be stored."""
    found = architecture_of(model)
    assert found is not None
    parts = _parts(found[1])
    for tensor in model.tensors():
        name = on_disk(model, tensor.name).rpartition(".")[0]
        if name not in TOP.values() and (name.count(".") < 3 or name.split(".", 3)[3] not in parts):
            return f"{tensor.name} has no place in a GGUF file of {found[0]}; use another target"
    return None


def _unblocked(model: ModelSpec, recipe: Recipe) -> str | None:
    """Return the reason why the first tensor whose rows are no whole blocks cannot be stored."""
    for tensor, stored, _ in tensors_alike(model, recipe):
        block = TYPES[TYPE_IDS[_type_name(tensor, stored)]].values
        if tensor.shape[-1] % block:
            take = "store as float16" if block == BLOCK else "choose mixed-4.5, or mlx"
            return f"rows of {tensor.shape[-1]} values ({tensor.module}) fill no blocks of {block}; {take}"
    return None


@lru_cache(maxsize=64)
def _difference(model: ModelSpec, context: int) -> str | None:
    """Return the first difference between the model and the one that llama.cpp would run; None if there is none."""
    try:
        read = read_back(model, context)
    except EdgekitError as error:
        return f"the model is not written as GGUF: {error}"
    for field in _FIELDS:
        ours, theirs = getattr(model, field), getattr(read, field)
        same = math.isclose(ours, theirs, rel_tol=1e-6) if isinstance(ours, float) and theirs else ours == theirs
        if not same:
            return f"it would run {field} {theirs} where the model has {ours}; use another target"
    if len(model.layers) != len(read.layers):
        return f"it would run {len(read.layers)} layers of {len(model.layers)}; use another target"
    for index, (ours, theirs) in enumerate(zip(model.layers, read.layers, strict=True)):
        for field in _LAYER_FIELDS:
            if getattr(ours, field) != getattr(theirs, field):
                return f"layer {index}: it would run {field} {getattr(theirs, field)}; use another target"
        if _window(ours, context) != _window(theirs, context):
            return (
                f"layer {index} sees {ours.window or 'all'} tokens and llama.cpp would show it "
                f"{theirs.window or 'all'}; plan a context within its window, or use another target"
            )
        if not _same_rope(model, ours, read, theirs, context):
            return f"layer {index}: it would rotate by other frequencies; use another target"
    return None


def _window(layer: Layer, context: int) -> int | None:
    return layer.window if layer.window and layer.window < context else None


def _same_rope(model: ModelSpec, ours: Layer, read: ModelSpec, theirs: Layer, context: int) -> bool:
    if ours.rope is None or theirs.rope is None:
        return ours.rope == theirs.rope
    one, other = frequencies(model.ropes[ours.rope], context), frequencies(read.ropes[theirs.rope], context)
    return math.isclose(one[1], other[1], rel_tol=1e-5) and np.allclose(one[0], other[0], rtol=1e-5, atol=0)


def _ropes(model: ModelSpec) -> tuple[Rope, Rope]:
    """Return the rope of layers without a window, and the rope of layers with one."""
    by_window = {bool(layer.window): model.ropes[layer.rope] for layer in model.layers if layer.rope is not None}
    first = next(iter(by_window.values()))
    return by_window.get(False, first), by_window.get(True, first)


def _scaling(rope: Rope) -> dict[str, MetadataValue]:
    if rope.kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.factor)}
    if rope.kind != "yarn":
        return {}
    assert rope.original_positions is not None
    keys: dict[str, MetadataValue] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope.factor),
        "rope.scaling.original_context_length": rope.original_positions,
    }
    usual = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    magnitude = frequencies(rope, rope.original_positions)[1]
    if not math.isclose(magnitude, usual, rel_tol=1e-9):
        keys["rope.scaling.yarn_attn_factor"] = magnitude / usual
    for name, value in (("beta_fast", rope.beta_fast), ("beta_slow", rope.beta_slow)):
        if value is not None:
            keys[f"rope.scaling.yarn_{name}"] = float(value)
    return keys


def _rope_factors(model: ModelSpec, context: int) -> NDArray[np.float32] | None:
    """Return the factors by which rotary frequencies are divided, where the file has a tensor for them."""
    rope = _ropes(model)[0]
    if rope.kind not in ("llama3", "longrope"):
        return None
    plain, _ = frequencies(Rope(theta=rope.theta, dim=rope.dim), context)
    slowed, _ = frequencies(rope, context)
    factors: NDArray[np.float32] = (np.asarray(plain) / np.asarray(slowed)).astype(np.float32)
    return factors


def _as_stored(value: MetadataValue) -> Any:
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _type_name(tensor: Tensor, stored: Format) -> str:
    if len(tensor.shape) == 1:
        return "F32"
    return "Q4_1" if stored.minima else _TYPE_NAMES[stored.kind]


def _written(weights: NeutralWeights, tensor: Tensor, recipe: Recipe, quantise: Quantise | None) -> WrittenTensor:
    name, type_name = gguf_name(weights.model, tensor), _type_name(tensor, recipe.format_of(tensor))
    order = row_order(weights.model, tensor.module)
    if len(tensor.shape) == 1:
        return WrittenTensor(name, type_name, tensor.shape, lambda: iter([_vector(weights, tensor, order)]))
    step = max(1, _PIECE_VALUES // tensor.shape[1])

    def pieces() -> Iterator[NDArray[Any]]:
        if order is not None:
            yield _packed(weights, tensor, type_name, order, quantise)
        else:
            for start in range(0, tensor.shape[0], step):
                yield _packed(weights, tensor, type_name, slice(start, min(start + step, tensor.shape[0])), quantise)
        weights.release()

    return WrittenTensor(name, type_name, tensor.shape, pieces)


def _vector(weights: NeutralWeights, tensor: Tensor, order: NDArray[np.intp] | None) -> NDArray[np.float32]:
    values = weights.floats(tensor.name)
    if weights.model.norm_offset and tensor.role == "norm":
        values = values + np.float32(1)
    return values if order is None else values[order]


def _packed(
    weights: NeutralWeights, tensor: Tensor, type_name: str, rows: Any, quantise: Quantise | None
) -> NDArray[Any]:
    """Return some rows of a matrix as the file stores them."""
    module = tensor.module
    if type_name in ("Q4_0", "Q4_1", "Q8_0") and quantise is None:
        block, some = (rows, slice(None)) if isinstance(rows, slice) else (None, rows)
        scales = weights.scales(module, block)[some]
        minima = weights.minima(module, block)
        if weights.format_of(module).scales not in (None, "float16"):
            _refuse_inexact(module, [scales] if minima is None else [scales, minima[some]])
        integers = weights.integers(module, block)[some]
        if minima is not None:
            return q4_1((integers + np.int8(8)).view(np.uint8), scales, minima[some])
        return (q4_0 if type_name == "Q4_0" else q8_0)(integers, scales)
    floats = weights.floats(tensor.name, rows) if isinstance(rows, slice) else weights.floats(tensor.name)[rows]
    if quantise is not None and not TYPES[TYPE_IDS[type_name]].is_float:
        return quantise(type_name, module, floats)
    if type_name == "BF16":
        return (floats.view(np.uint32) >> 16).astype("<u2")  # exact: they were stored as bfloat16
    return floats.astype("<f2" if type_name == "F16" else "<f4")


def _refuse_inexact(module: str, of_groups: Sequence[NDArray[np.float32]]) -> None:
    """Raise `Unsupported` for scales, or scales and minima, that float16 cannot represent, which other tools write.

    With minima, the smallest may be rounded to the numbers that are left there.
    """
    allowed = 2.0**-25 if len(of_groups) > 1 else 0.0
    with np.errstate(over="ignore"):
        changed = sum(int((np.abs(each.astype("<f2") - each) > allowed).sum()) for each in of_groups)
    if changed:
        raise Unsupported(
            f"llama.cpp: {module} has {changed:,} scales that float16 does not hold; choose --recipe s8, which rounds "
            "again"
        )
