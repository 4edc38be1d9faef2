"""The reference decoder: one layer at a time, in float32, for every family that is exported.

It is what calibration runs, what exports are compared with, and the plainest statement of what each field of a
ModelSpec means. It keeps no cache and holds no weights: a layer's tensors come by name and go when the layer is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from edgekit.model import Layer, ModelSpec
from edgekit.rope import frequencies

if TYPE_CHECKING:
    import torch

    Angles = tuple[torch.Tensor, torch.Tensor]
    Tensors = Mapping[str, torch.Tensor]  # name within the layer, e.g. "self_attn.q_proj.weight"
    Observe = Callable[[str, torch.Tensor], None]  # a linear's name within the layer, and its input


HEAD_ROWS = 8192


def ignore(name: str, inputs: torch.Tensor) -> None:
    """Observes nothing."""


def embed(spec: ModelSpec, rows: torch.Tensor) -> torch.Tensor:
    """Hidden states from embedding rows that were already looked up, [batch, length, hidden]."""
    return rows * spec.embedding_scale if spec.embedding_scale != 1.0 else rows


def layer_forward(
    spec: ModelSpec,
    index: int,
    tensors: Tensors,
    hidden: torch.Tensor,
    observe: Observe = ignore,
    context_tokens: int | None = None,
) -> torch.Tensor:
    """Hidden states [batch, length, hidden] after layer `index`; positions count from 0 in every sequence.

    `context_tokens` is the planned context, on which some ropes depend; None: the sequence itself.
    """
    angles = _angles(spec, spec.layers[index], hidden.shape[1], context_tokens or hidden.shape[1])
    normed = _norm(spec, tensors["input_layernorm.weight"], hidden)
    attended = _attention(spec, spec.layers[index], tensors, normed, angles, observe)
    if spec.post_norms:
        attended = _norm(spec, tensors["post_attention_layernorm.weight"], attended)
    hidden = hidden + attended
    before = "pre_feedforward_layernorm.weight" if spec.post_norms else "post_attention_layernorm.weight"
    fed = _feed_forward(spec, tensors, _norm(spec, tensors[before], hidden), observe)
    if spec.post_norms:
        fed = _norm(spec, tensors["post_feedforward_layernorm.weight"], fed)
    return hidden + fed


def head(spec: ModelSpec, norm: torch.Tensor, matrix: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Logits from the last layer's hidden states; `matrix` may be some rows of the head."""
    import torch

    logits = _norm(spec, norm, hidden) @ matrix.T
    if spec.logit_softcap is not None:
        logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
    return logits


def logits(
    spec: ModelSpec,
    get_tensor: Callable[[str], torch.Tensor],
    tokens: Sequence[int] | torch.Tensor,
    *,
    context_tokens: int | None = None,
    get_rows: Callable[[str, slice], torch.Tensor] | None = None,
    observe: Observe = ignore,
) -> torch.Tensor:
    """Logits [length, vocabulary] (or [batch, length, vocabulary]) of `tokens`, holding one layer at a time.

    With `get_rows`, embedding and head come by rows too: they are the largest tensors of most models.
    """
    import torch

    with torch.inference_mode():
        ids = torch.as_tensor(tokens)
        batch = ids if ids.ndim == 2 else ids[None]
        table = f"{spec.prefix}embed_tokens.weight"
        looked_up = get_tensor(table)[batch] if get_rows is None else _looked_up(table, batch, get_rows)
        hidden = embed(spec, looked_up)
        for index in range(len(spec.layers)):
            tensors = layer_tensors(spec, index, get_tensor)
            hidden = layer_forward(spec, index, tensors, hidden, observe, context_tokens)
        matrix, norm = table if spec.tied else f"{spec.head}.weight", get_tensor(f"{spec.prefix}norm.weight")
        if get_rows is None:
            found = head(spec, norm, get_tensor(matrix), hidden)
        else:
            starts = range(0, spec.vocab_size, HEAD_ROWS)
            blocks = [slice(start, min(start + HEAD_ROWS, spec.vocab_size)) for start in starts]
            found = torch.cat([head(spec, norm, get_rows(matrix, block), hidden) for block in blocks], dim=-1)
        return found if ids.ndim == 2 else found[0]


def _looked_up(table: str, batch: torch.Tensor, get_rows: Callable[[str, slice], torch.Tensor]) -> torch.Tensor:
    import torch

    rows = [get_rows(table, slice(token, token + 1)) for token in batch.flatten().tolist()]
    return torch.cat(rows).reshape(*batch.shape, -1)


def layer_tensors(spec: ModelSpec, index: int, get_tensor: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of one layer, by their names within it."""
    prefix = f"{spec.prefix}layers.{index}."
    names = [tensor.name for tensor in spec.tensors() if tensor.name.startswith(prefix)]
    return {name.removeprefix(prefix): get_tensor(name) for name in names}


def _norm(spec: ModelSpec, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    import torch

    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + spec.norm_epsilon)
    return values * scale * (1.0 + weight if spec.norm_offset else weight)


def _linear(tensors: Tensors, name: str, values: torch.Tensor) -> torch.Tensor:
    outputs = values @ tensors[f"{name}.weight"].T
    bias = tensors.get(f"{name}.bias")
    return outputs if bias is None else outputs + bias


def _attention(
    spec: ModelSpec, layer: Layer, tensors: Tensors, values: torch.Tensor, angles: Angles | None, observe: Observe
) -> torch.Tensor:
    import torch

    batch, length, _ = values.shape
    widths = [spec.heads * layer.head_dim, layer.kv_heads * layer.head_dim, layer.kv_heads * layer.head_dim]
    if spec.fused_qkv:
        observe("self_attn.qkv_proj", values)
        parts = list(torch.split(_linear(tensors, "self_attn.qkv_proj", values), widths, -1))
    else:
        parts = []
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            observe(name, values)
            parts.append(_linear(tensors, name, values))
    q, k, v = (part.reshape(batch, length, -1, layer.head_dim).transpose(1, 2) for part in parts)
    if spec.qk_norm:
        q = _norm(spec, tensors["self_attn.q_norm.weight"], q)
        k = _norm(spec, tensors["self_attn.k_norm.weight"], k)
    if angles is not None:
        q, k = _turn(q, *angles), _turn(k, *angles)
    groups = spec.heads // layer.kv_heads
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    mixed = _attend(spec, layer, q, k, v).transpose(1, 2).reshape(batch, length, -1)
    observe("self_attn.o_proj", mixed)
    return _linear(tensors, "self_attn.o_proj", mixed)


def _attend(spec: ModelSpec, layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    import torch
    from torch.nn import functional

    visible = _visible(q.shape[-2], layer.window)
    if spec.attention_softcap is None:  # the same sums, without holding all scores at once
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=spec.attention_scale)
    scores = torch.tanh(q @ k.transpose(-1, -2) * (spec.attention_scale / spec.attention_softcap))
    scores = (scores * spec.attention_softcap).masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ v


def _visible(length: int, window: int | None) -> torch.Tensor:
    """Which earlier positions [query, key] are seen: all, or the last `window`, itself included."""
    import torch

    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _angles(spec: ModelSpec, layer: Layer, length: int, context_tokens: int) -> Angles | None:
    """Cosine and sine [length, rotary / 2]; None where the layer knows no positions."""
    import torch

    if layer.rope is None:
        return None
    inverse, factor = frequencies(spec.ropes[layer.rope], context_tokens)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * torch.tensor(inverse, dtype=torch.float64)[None, :]
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def _turn(values: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2 × len(cosine) values of each head, the first half against the second; the rest stay."""
    import torch

    half = cosine.shape[-1]
    first, second, rest = values[..., :half], values[..., half : 2 * half], values[..., 2 * half :]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), -1)


def _feed_forward(spec: ModelSpec, tensors: Tensors, values: torch.Tensor, observe: Observe) -> torch.Tensor:
    if spec.fused_gate_up:
        observe("mlp.gate_up_proj", values)
        gate, up = _linear(tensors, "mlp.gate_up_proj", values).chunk(2, -1)
    else:
        observe("mlp.gate_proj", values)
        observe("mlp.up_proj", values)
        gate, up = _linear(tensors, "mlp.gate_proj", values), _linear(tensors, "mlp.up_proj", values)
    mixed = _activation(spec, gate) * up
    observe("mlp.down_proj", mixed)
    return _linear(tensors, "mlp.down_proj", mixed)


def _activation(spec: ModelSpec, values: torch.Tensor) -> torch.Tensor:
    from torch.nn import functional

    match spec.activation:
        case "silu":
            return functional.silu(values)
        case "gelu_tanh":
            return functional.gelu(values, approximate="tanh")
        case "gelu":
            return functional.gelu(values)
        case "relu2":
            return functional.relu(values).square()
