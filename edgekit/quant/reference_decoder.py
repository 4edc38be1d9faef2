"""The reference decoder: one layer at a time, in float32, for every family that is exported.

Calibration runs it, exports are compared with it, and it defines the meaning of each field of a ModelSpec. It keeps no
cache and no weights: a layer's tensors are read by name and dropped after the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from edgekit.model.parts import Experts, Layer, Rope
from edgekit.model.rope import frequencies
from edgekit.model.spec import ModelSpec
from edgekit.quant.delta_rule import gated_delta_rule
from edgekit.quant.side_inputs import SideInputs, layer_inputs, normed

if TYPE_CHECKING:
    import torch

    Angles = tuple[torch.Tensor, torch.Tensor]
    Tensors = Mapping[str, torch.Tensor]  # name within the layer, e.g. "self_attn.q_proj.weight"
    Observe = Callable[[str, torch.Tensor], None]  # a linear's name within the layer, and its input or output
    ApplyLinear = Callable[[str, torch.Tensor], torch.Tensor]  # the product of a linear, by its name within the layer
    Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # inputs [..., in] and weights [out, in]


HEAD_ROWS = 8192


def ignore(name: str, inputs: torch.Tensor) -> None:
    """Observe nothing."""


def product(inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the outputs [..., out] of a linear in float32."""
    return inputs @ weights.T


def embed(spec: ModelSpec, rows: torch.Tensor) -> torch.Tensor:
    """Return hidden states from looked-up embedding rows [batch, length, hidden]."""
    return _scaled(rows, spec.embedding_scale)


def layer_forward(
    spec: ModelSpec,
    index: int,
    tensors: Tensors,
    hidden: torch.Tensor,
    observe: Observe = ignore,
    context_tokens: int | None = None,
    observe_output: Observe = ignore,
    observe_cache: Observe = ignore,
    side_inputs: SideInputs | None = None,
    multiply: Multiply = product,
) -> torch.Tensor:
    """Return the hidden states [batch, length, hidden] after layer `index`. Every sequence starts at position 0.

    `side_inputs` passes from layer to layer what some models read in addition to the hidden states.

    `context_tokens` is the planned context, on which some ropes depend; None: the sequence itself. `observe` is called
    with each linear's input before its product, `observe_output` with its output, `observe_cache` with `keys` and
    `values` as a cache would hold them. `multiply` computes the products of linears.
    """

    def linear(name: str, values: torch.Tensor) -> torch.Tensor:
        observe(name, values)
        outputs = multiply(values, tensors[f"{name}.weight"])
        bias = tensors.get(f"{name}.bias")
        outputs = outputs if bias is None else outputs + bias
        observe_output(name, outputs)
        return outputs

    def norm(name: str | None, values: torch.Tensor) -> torch.Tensor:
        return values if name is None else _norm(spec, tensors[f"{name}.weight"], values)

    before_attention, after_attention, before_feed, after_feed = spec.layer_norms()
    layer, values = spec.layers[index], norm(before_attention, hidden)
    if layer.delta_rule:
        mixed = gated_delta_rule(spec, layer.delta_rule, tensors, values, linear)
    elif layer.conv_taps:
        mixed = _convolution(layer.conv_taps, tensors, values, linear)
    else:
        angles = _angles(spec, layer, hidden, context_tokens or hidden.shape[1])
        mixed = _attention(spec, index, tensors, values, angles, linear, observe_cache, side_inputs or SideInputs())
    hidden = hidden + _scaled(norm(after_attention, mixed), spec.residual_scale)
    values = norm(before_feed, hidden)
    if layer.experts and spec.experts:
        fed = _mixture(spec, spec.experts, tensors, values, linear)
    else:
        fed = _feed_forward(spec, values, linear)
    hidden = hidden + _scaled(norm(after_feed, fed), spec.residual_scale)
    if spec.per_layer_input:
        assert side_inputs is not None, "layers have inputs of their own"
        gate = _activation(spec, linear("per_layer_input_gate", hidden))
        mixed = linear("per_layer_projection", gate * side_inputs.input_of(index, spec.per_layer_input.size))
        hidden = hidden + norm("post_per_layer_input_norm", mixed)
    return hidden * tensors["layer_scalar"] if spec.layer_scalars else hidden


def head(spec: ModelSpec, norm: torch.Tensor, matrix: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return logits from the last layer's hidden states; `matrix` may be some rows of the head."""
    import torch

    logits = final_norm(spec, norm, hidden) @ matrix.T
    if spec.logit_softcap is not None:
        logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
    return logits


def final_norm(spec: ModelSpec, norm: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Normalise and scale the last layer's hidden states for the head."""
    return _scaled(_norm(spec, norm, hidden), spec.logit_scale)


def logits(
    spec: ModelSpec,
    get_tensor: Callable[[str], torch.Tensor],
    tokens: Sequence[int] | torch.Tensor,
    *,
    context_tokens: int | None = None,
    get_rows: Callable[[str, slice], torch.Tensor] | None = None,
    observe: Observe = ignore,
    observe_cache: Observe = ignore,
) -> torch.Tensor:
    """Return logits [length, vocabulary] (or [batch, length, vocabulary]) of `tokens`, holding one layer at a time.

    With `get_rows`, embedding and head are read by rows too: they are the largest tensors of most models. `observe` is
    called with each linear's module, by its name in the model, and its input; `observe_cache` with `layers.N.keys` and
    `layers.N.values` (`layer_forward`), after the same prefix.
    """
    import torch

    with torch.inference_mode():
        ids = torch.as_tensor(tokens)
        batch = ids if ids.ndim == 2 else ids[None]
        table = f"{spec.prefix}embed_tokens.weight"
        looked_up = get_tensor(table)[batch] if get_rows is None else _looked_up(table, batch, get_rows)
        hidden = embed(spec, looked_up)

        def read(name: str, rows: slice | None = None) -> torch.Tensor:
            if rows is None:
                return get_tensor(name)
            return get_tensor(name)[rows] if get_rows is None else get_rows(name, rows)

        side_inputs = layer_inputs(spec, batch, hidden, read)
        for index in range(len(spec.layers)):
            tensors = layer_tensors(spec, index, get_tensor)
            hidden = layer_forward(
                spec,
                index,
                tensors,
                hidden,
                of_layer(spec, index, observe),
                context_tokens,
                observe_cache=of_layer(spec, index, observe_cache),
                side_inputs=side_inputs,
            )
        matrix, norm = table if spec.tied else f"{spec.head}.weight", get_tensor(last_norm(spec))
        if get_rows is None:
            scores = head(spec, norm, get_tensor(matrix), hidden)
        else:
            starts = range(0, spec.vocab_size, HEAD_ROWS)
            blocks = [slice(start, min(start + HEAD_ROWS, spec.vocab_size)) for start in starts]
            scores = torch.cat([head(spec, norm, get_rows(matrix, block), hidden) for block in blocks], dim=-1)
        return scores if ids.ndim == 2 else scores[0]


def of_layer(spec: ModelSpec, index: int, observe: Observe) -> Observe:
    """Return an observer of one layer's linears that passes on their names in the model."""
    prefix = f"{spec.prefix}layers.{index}."
    return ignore if observe is ignore else lambda name, inputs: observe(prefix + name, inputs)


def last_norm(spec: ModelSpec) -> str:
    """Return the name of the tensor of the norm before the head."""
    return f"{spec.prefix}{spec.names.last_norm}.weight"


def _looked_up(table: str, batch: torch.Tensor, get_rows: Callable[[str, slice], torch.Tensor]) -> torch.Tensor:
    import torch

    rows = [get_rows(table, slice(token, token + 1)) for token in batch.flatten().tolist()]
    return torch.cat(rows).reshape(*batch.shape, -1)


def layer_tensors(spec: ModelSpec, index: int, get_tensor: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of one layer, by their names within it."""
    prefix = f"{spec.prefix}layers.{index}."
    names = [tensor.name for tensor in spec.tensors() if tensor.name.startswith(prefix)]
    return {name.removeprefix(prefix): get_tensor(name) for name in names}


def _scaled(values: torch.Tensor, factor: float) -> torch.Tensor:
    return values if factor == 1.0 else values * factor


def _norm(spec: ModelSpec, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return normed(values, spec.norm_epsilon) * (1.0 + weight if spec.norm_offset else weight)


def _attention(
    spec: ModelSpec,
    index: int,
    tensors: Tensors,
    values: torch.Tensor,
    angles: Angles | None,
    linear: ApplyLinear,
    observe_cache: Observe,
    side_inputs: SideInputs,
) -> torch.Tensor:
    import torch

    batch, length, _ = values.shape
    layer = spec.layers[index]
    widths = list(spec.qkv_widths(layer))
    if spec.fused_qkv:
        parts = list(torch.split(linear("self_attn.qkv_proj", values), widths, -1))
    else:
        parts = [linear(f"self_attn.{name}", values) for name in layer.projections]
    if layer.stores_kv and not layer.has_values:
        parts.append(parts[1])
    gate: torch.Tensor | None = None
    if spec.attention_gate:
        heads, gates = parts[0].reshape(batch, length, spec.heads, -1).chunk(2, -1)
        parts[0], gate = heads.flatten(2), gates.flatten(2)
    if spec.qk_norm:
        norms = zip((spec.names.query_norm, spec.names.key_norm), spec.qk_norm_widths(layer), strict=True)
        for position, (name, width) in enumerate([*norms][: len(parts)]):
            by_norm = parts[position].reshape(batch, length, -1, width)
            weight = None if spec.norms_after_rope else tensors[f"{name}.weight"]
            parts[position] = normed(by_norm, spec.norm_epsilon) if weight is None else _norm(spec, weight, by_norm)
    by_head = [part.reshape(batch, length, -1, layer.head_dim).transpose(1, 2) for part in parts]
    if angles is not None and layer.rope is not None:
        rope = spec.ropes[layer.rope]
        by_head[:2] = [_turn(rope, part, *angles) for part in by_head[:2]]
    if spec.norms_after_rope:
        weights = [tensors[f"{name}.weight"] for name in (spec.names.query_norm, spec.names.key_norm)]
        by_head[0] = by_head[0] * weights[0] * weights[1]
    if layer.stores_kv:
        if spec.value_norm:
            by_head[2] = normed(by_head[2], spec.norm_epsilon)
        side_inputs.keep(spec, index, by_head[1], by_head[2])
        observe_cache("keys", by_head[1])
        observe_cache("values", by_head[2])
    else:
        by_head += side_inputs.kept[spec.kv_owner(index)]
    q, k, v = by_head
    groups = spec.heads // layer.kv_heads
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    sinks = tensors["self_attn.sinks"] if spec.attention_sinks else None
    mixed = _attend(spec, layer, q, k, v, sinks).transpose(1, 2).reshape(batch, length, -1)
    return linear(spec.names.output, mixed if gate is None else mixed * gate.sigmoid())


def _convolution(taps: int, tensors: Tensors, values: torch.Tensor, linear: ApplyLinear) -> torch.Tensor:
    """Mix each channel over its last `taps` tokens, gated before and after (LFM2)."""
    from torch.nn import functional

    before, after, inputs = linear("conv.in_proj", values).chunk(3, -1)
    gated = functional.pad((before * inputs).transpose(1, 2), (taps - 1, 0))
    weight = tensors["conv.conv.weight"]
    mixed = functional.conv1d(gated, weight, tensors.get("conv.conv.bias"), groups=len(weight))
    return linear("conv.out_proj", after * mixed.transpose(1, 2))


def _attend(
    spec: ModelSpec, layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    import torch
    from torch.nn import functional

    length = q.shape[-2]
    visible = None
    if layer.window is not None and layer.window < length:
        visible = _visible(q, layer.window, both_ways=spec.encoder is not None)
    if spec.attention_softcap is None and sinks is None:  # the same sums, without holding all scores at once
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None and not spec.encoder, scale=spec.attention_scale
        )
    visible = _visible(q, layer.window)
    scores = q @ k.transpose(-1, -2) * (spec.attention_scale / (spec.attention_softcap or 1.0))
    if spec.attention_softcap is not None:
        scores = torch.tanh(scores) * spec.attention_softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., :length] @ v


def _visible(queries: torch.Tensor, window: int | None, *, both_ways: bool = False) -> torch.Tensor:
    """Return the mask [query, key]: all earlier positions, or the last `window`, the query itself included.

    `both_ways`: as many later ones too.
    """
    import torch

    places = torch.arange(queries.shape[-2], device=queries.device)
    distance = places[:, None] - places[None, :]
    if both_ways:
        distance = distance.abs()
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _angles(spec: ModelSpec, layer: Layer, hidden: torch.Tensor, context_tokens: int) -> Angles | None:
    """Return cosine and sine [length, rotary / 2]; None where the layer has no rotary positions.

    The processor computes them: not every GPU has float64.
    """
    import torch

    if layer.rope is None:
        return None
    inverse, factor = frequencies(spec.ropes[layer.rope], context_tokens)
    places = torch.arange(hidden.shape[1], dtype=torch.float64)
    angles = places[:, None] * torch.tensor(inverse, dtype=torch.float64)[None, :]
    cosine, sine = ((each * factor).float().to(hidden.device) for each in (angles.cos(), angles.sin()))
    return cosine, sine


def _turn(rope: Rope, values: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2 × len(cosine) values of each head, in pairs."""
    import torch

    width, axis = 2 * cosine.shape[-1], -1 if rope.interleaved else -2
    pairs = values[..., :width].reshape(*values.shape[:-1], *((-1, 2) if rope.interleaved else (2, -1)))
    first, second = pairs.unbind(axis)
    turned = torch.stack((first * cosine - second * sine, second * cosine + first * sine), axis)
    return torch.cat((turned.flatten(-2), values[..., width:]), -1)


def _feed_forward(spec: ModelSpec, values: torch.Tensor, linear: ApplyLinear) -> torch.Tensor:
    if spec.fused_gate_up:
        gate, up = linear("mlp.gate_up_proj", values).chunk(2, -1)
    else:
        gate, up = linear(spec.names.gate, values), linear(spec.names.up, values)
    return linear(spec.names.down, _activation(spec, gate) * up)


def _mixture(
    spec: ModelSpec, experts: Experts, tensors: Tensors, values: torch.Tensor, linear: ApplyLinear
) -> torch.Tensor:
    """Return each token's mix of its active experts. An expert without tokens is neither observed nor computed."""
    rows = values.flatten(0, -2)
    scores = rows @ tensors[f"{experts.router}.weight"].T
    if experts.linear_bias:
        scores = scores + tensors[f"{experts.router}.bias"]
    of_all = scores.softmax(-1) if experts.scoring == "softmax" else scores.sigmoid()
    ranked = of_all + tensors[f"{experts.block}.expert_bias"] if experts.biased else of_all
    chosen = ranked.topk(experts.active, -1).indices
    shares = of_all.gather(-1, chosen)
    if experts.normalise:  # LFM2's code adds 1e-6 to the sum, which changes less than rounding
        shares = shares / shares.sum(-1, keepdim=True)
    mixed = rows * 0.0
    for expert in sorted(set(chosen.flatten().tolist())):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up, down = experts.modules(expert)
        mine = rows[token]
        fed = linear(down, _gated(spec, experts, linear(gate, mine), linear(up, mine)))
        mixed = mixed.index_add(0, token, fed * shares[token, place, None])
    return mixed.view_as(values)


def _gated(spec: ModelSpec, experts: Experts, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if experts.swiglu is None:
        return _activation(spec, gate) * up
    limit = experts.swiglu.limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (gate * experts.swiglu.alpha).sigmoid() * (up + 1.0)


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
