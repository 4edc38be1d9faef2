"""The reference decoder: one layer at a time, in float32, for every family that is exported.

Calibration runs it, and exports are compared with it. It keeps no cache and no weights: a layer's tensors are read by
name and dropped after the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from edgekit.model import decoder
from edgekit.model.decoder import Projection
from edgekit.model.parts import DeltaRule, Experts, Layer, Rope
from edgekit.model.rope import frequencies
from edgekit.model.spec import ModelSpec
from edgekit.quant.delta_rule import gated_delta_rule

if TYPE_CHECKING:
    import torch

    from edgekit.quant.shards import ReadRows

    KeysValues = tuple[torch.Tensor, torch.Tensor]
    Angles = tuple[torch.Tensor, torch.Tensor]
    Tensors = Mapping[str, torch.Tensor]  # name within the layer, e.g. "self_attn.q_proj.weight"
    Observe = Callable[[str, torch.Tensor], None]  # a linear's name within the layer, and its input or output
    Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # inputs [..., in] and weights [out, in]


HEAD_ROWS = 8192


class SideInputs:
    """The per-layer inputs of one batch of texts, and the keys and values that later layers read again."""

    def __init__(self, inputs: torch.Tensor | None = None, where: torch.Tensor | None = None) -> None:
        self._inputs, self._where = inputs, where  # [different tokens, layers × size]; [batch, length]
        self.kept: dict[int, KeysValues] = {}  # by layer: [batch, heads, length, head_dim]

    def input_of(self, index: int, size: int) -> torch.Tensor:
        """Return the input [batch, length, size] of layer `index`."""
        assert self._inputs is not None and self._where is not None, "the model has per-layer inputs"
        return self._inputs[:, index * size : (index + 1) * size][self._where]

    def keep(self, spec: ModelSpec, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the keys and values of layer `index` if a later layer reads them."""
        if any(spec.kv_owner(later) == index for later in range(index + 1, len(spec.layers))):
            self.kept[index] = keys, values


def ignore(name: str, inputs: torch.Tensor) -> None:
    """Observe nothing."""


def product(inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the outputs [..., out] of a linear in float32."""
    return inputs @ weights.T


def embed(spec: ModelSpec, rows: torch.Tensor) -> torch.Tensor:
    """Return hidden states from looked-up embedding rows [batch, length, hidden]."""
    return rows if spec.embedding_scale == 1.0 else rows * spec.embedding_scale


class Hooks(NamedTuple):
    """Functions that a layer calls: with each linear's input before its product, with its output, and so on."""

    inputs: Observe = ignore
    outputs: Observe = ignore
    cache: Observe = ignore  # with `keys` and `values` as a cache would hold them
    multiply: Multiply = product  # computes the products of linears


NO_HOOKS = Hooks()


def layer_forward(
    spec: ModelSpec,
    index: int,
    tensors: Tensors,
    hidden: torch.Tensor,
    hooks: Hooks = NO_HOOKS,
    side_inputs: SideInputs | None = None,
    context_tokens: int | None = None,
) -> torch.Tensor:
    """Return the hidden states [batch, length, hidden] after layer `index`. Every sequence starts at position 0.

    `side_inputs` passes from layer to layer what some models read in addition to the hidden states.
    `context_tokens` is the planned context, on which some ropes depend; None: the sequence itself.
    """
    ops = TorchOps(spec, tensors, index, hooks, side_inputs or SideInputs(), context_tokens or hidden.shape[1])
    after, delta = decoder.layer(spec, index, ops, hidden)
    return after if delta is None else after + delta


def head(spec: ModelSpec, norm: torch.Tensor, matrix: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return logits from the last layer's hidden states; `matrix` may be some rows of the head."""
    tensors = {f"{spec.names.last_norm}.weight": norm, f"{decoder.HEAD}.weight": matrix}
    return decoder.head(spec, TorchOps(spec, tensors), hidden)


def final_norm(spec: ModelSpec, norm: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Normalise and scale the last layer's hidden states for the head."""
    ops = TorchOps(spec, {"norm.weight": norm})
    return ops.scale(ops.norm(hidden, "norm"), spec.logit_scale)


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

    `get_tensor` returns a tensor of the model by its name, in float32. With `get_rows`, embedding and head are read by
    rows too: they are the largest tensors of most models. `observe` is called with each linear's module, by its name
    in the model, and its input; `observe_cache` with `layers.N.keys` and `layers.N.values`, after the same prefix.
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
            hooks = Hooks(of_layer(spec, index, observe), cache=of_layer(spec, index, observe_cache))
            hidden = layer_forward(spec, index, tensors, hidden, hooks, side_inputs, context_tokens)
        matrix, norm = table if spec.tied else f"{spec.head}.weight", get_tensor(last_norm(spec))
        if get_rows is None:
            scores = head(spec, norm, get_tensor(matrix), hidden)
        else:
            scores = hidden.new_empty((*hidden.shape[:-1], spec.vocab_size))
            for start in range(0, spec.vocab_size, HEAD_ROWS):
                block = slice(start, min(start + HEAD_ROWS, spec.vocab_size))
                scores[..., block] = head(spec, norm, get_rows(matrix, block), hidden)
        return scores if ids.ndim == 2 else scores[0]


def layer_inputs(spec: ModelSpec, ids: torch.Tensor, embedded: torch.Tensor, read: ReadRows) -> SideInputs:
    """Return the per-layer inputs of the tokens `ids` [batch, length], whose scaled embeddings are `embedded`.

    They depend on the token alone, so they are computed once for each different token.
    """
    import torch

    if spec.per_layer_input is None:
        return SideInputs()
    tokens, where = torch.unique(ids, return_inverse=True)
    positions = torch.arange(ids.numel(), device=ids.device)
    first = torch.empty_like(tokens).scatter_(0, where.flatten(), positions)
    table = f"{spec.prefix}embed_tokens_per_layer.weight"
    rows = torch.cat([read(table, slice(token, token + 1)) for token in tokens.tolist()])
    names = ("per_layer_model_projection.weight", "per_layer_projection_norm.weight")
    ops = TorchOps(spec, {name: read(f"{spec.prefix}{name}") for name in names})
    return SideInputs(decoder.layer_inputs(spec, ops, embedded.flatten(0, 1)[first], rows), where)


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


class TorchOps(decoder.Ops["torch.Tensor"]):
    """Operations on tensors [batch, length, width] in float32, over the tensors of one layer or of the head."""

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Tensors,
        index: int = 0,
        hooks: Hooks = NO_HOOKS,
        side_inputs: SideInputs | None = None,
        context_tokens: int = 0,
    ) -> None:
        self._spec, self._tensors, self._index, self._layer = spec, tensors, index, spec.layers[index]
        self._hooks, self._side_inputs, self._context = hooks, side_inputs or SideInputs(), context_tokens

    def linear(self, x: torch.Tensor, module: str) -> torch.Tensor:
        self._hooks.inputs(module, x)
        outputs = self._hooks.multiply(x, self._tensors[f"{module}.weight"])
        bias = self._tensors.get(f"{module}.bias")
        outputs = outputs if bias is None else outputs + bias
        self._hooks.outputs(module, outputs)
        return outputs

    def products(self, x: torch.Tensor, parts: Sequence[Projection], *, may_join: bool = False) -> list[torch.Tensor]:
        outputs = {module: self.linear(x, module) for module in dict.fromkeys(part.module for part in parts)}
        return [outputs[part.module] if part.rows is None else outputs[part.module][..., part.rows] for part in parts]

    def norm(self, x: torch.Tensor, name: str | None, heads: tuple[int, int] | None = None) -> torch.Tensor:
        by_norm = x if heads is None else x.reshape(*x.shape[:-1], *heads)
        if self._spec.centred_norms:
            by_norm = by_norm - by_norm.mean(-1, keepdim=True)
        result = normed(by_norm, self._spec.norm_epsilon)
        if name is not None:
            weight = self._tensors[f"{name}.weight"]
            result = result * (1.0 + weight if self._spec.norm_offset else weight)
        return result.reshape(x.shape)

    def activate(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        from torch.nn import functional

        match kind:
            case "silu":
                return functional.silu(x)
            case "gelu_tanh":
                return functional.gelu(x, approximate="tanh")
            case "gelu":
                return functional.gelu(x)
            case "relu2":
                return functional.relu(x).square()
        assert kind == "sigmoid", kind
        return x.sigmoid()

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return (x / cap).tanh() * cap

    def split(self, x: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
        return x.chunk(count, -1)

    def split_gate(self, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads, gates = queries.reshape(*queries.shape[:-1], self._spec.heads, -1).chunk(2, -1)
        return heads.flatten(-2), gates.flatten(-2)

    def attend(self, parts: Sequence[torch.Tensor], late_norms: Sequence[str]) -> torch.Tensor:
        spec, layer, (batch, length, _) = self._spec, self._layer, parts[0].shape
        by_head = [part.reshape(batch, length, -1, layer.head_dim).transpose(1, 2) for part in parts]
        if layer.rope is not None:
            angles = _angles(spec.ropes[layer.rope], length, self._context, parts[0].device)
            by_head[:2] = [_turn(spec.ropes[layer.rope], part, *angles) for part in by_head[:2]]
        for name in late_norms:
            by_head[0] = by_head[0] * self._tensors[f"{name}.weight"]
        if layer.stores_kv:
            self._side_inputs.keep(spec, self._index, by_head[1], by_head[2])
            self._hooks.cache("keys", by_head[1])
            self._hooks.cache("values", by_head[2])
        else:
            by_head += self._side_inputs.kept[spec.kv_owner(self._index)]
        q, k, v = by_head
        groups = spec.heads // layer.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        sinks = self._tensors["self_attn.sinks"] if spec.attention_sinks else None
        return _attend(spec, layer, q, k, v, sinks).transpose(1, 2).reshape(batch, length, -1)

    def convolve(self, x: torch.Tensor, module: str, taps: int) -> torch.Tensor:
        from torch.nn import functional

        weight, bias = self._tensors[f"{module}.weight"], self._tensors.get(f"{module}.bias")
        padded = functional.pad(x.transpose(1, 2), (taps - 1, 0))
        return functional.conv1d(padded, weight, bias, groups=len(weight)).transpose(1, 2)

    def delta_rule(
        self, rule: DeltaRule, mixed: torch.Tensor, decay: torch.Tensor, strength: torch.Tensor
    ) -> torch.Tensor:
        read = gated_delta_rule(rule, self._tensors, mixed, decay, strength)
        return (normed(read, self._spec.norm_epsilon) * self._tensors["linear_attn.norm.weight"]).flatten(2)

    def own_input(self) -> torch.Tensor:
        assert self._spec.per_layer_input is not None
        return self._side_inputs.input_of(self._index, self._spec.per_layer_input.size)

    def factor(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * self._tensors[name]

    def experts(self, x: torch.Tensor, experts: Experts) -> torch.Tensor:
        """Return each token's mix of its active experts. An expert without tokens is neither observed nor computed."""
        rows = x.flatten(0, -2)
        scores = rows @ self._tensors[f"{experts.router}.weight"].T
        if experts.linear_bias:
            scores = scores + self._tensors[f"{experts.router}.bias"]
        of_all = scores.softmax(-1) if experts.scoring == "softmax" else scores.sigmoid()
        ranked = of_all + self._tensors[f"{experts.block}.expert_bias"] if experts.biased else of_all
        chosen = ranked.topk(experts.active, -1).indices
        shares = of_all.gather(-1, chosen)
        if experts.normalise:  # LFM2's code adds 1e-6 to the sum, which changes less than rounding
            shares = shares / shares.sum(-1, keepdim=True)
        mixed = rows * 0.0
        for expert in sorted(set(chosen.flatten().tolist())):
            token, rank = (chosen == expert).nonzero(as_tuple=True)
            gate, up, down = experts.modules(expert)
            mine = rows[token]
            fed = self.linear(self._gated(experts, self.linear(mine, gate), self.linear(mine, up)), down)
            mixed = mixed.index_add(0, token, fed * shares[token, rank, None])
        return mixed.view_as(x)

    def _gated(self, experts: Experts, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if experts.swiglu is None:
            return self.activate(gate, self._spec.activation) * up
        limit = experts.swiglu.limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * (gate * experts.swiglu.alpha).sigmoid() * (up + 1.0)


def normed(values: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return the values, each row divided by its root mean square."""
    import torch

    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)


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


def _angles(rope: Rope, length: int, context_tokens: int, device: torch.device) -> Angles:
    """Return cosine and sine [length, rotary / 2]. The processor computes them: not every GPU has float64."""
    import torch

    inverse, factor = frequencies(rope, context_tokens)
    positions = torch.arange(length, dtype=torch.float64)
    angles = positions[:, None] * torch.tensor(inverse, dtype=torch.float64)[None, :]
    cosine, sine = ((each * factor).float().to(device) for each in (angles.cos(), angles.sin()))
    return cosine, sine


def _turn(rope: Rope, values: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2 × len(cosine) values of each head, in pairs."""
    import torch

    width, axis = 2 * cosine.shape[-1], -1 if rope.interleaved else -2
    pairs = values[..., :width].reshape(*values.shape[:-1], *((-1, 2) if rope.interleaved else (2, -1)))
    first, second = pairs.unbind(axis)
    turned = torch.stack((first * cosine - second * sine, second * cosine + first * sine), axis)
    return torch.cat((turned.flatten(-2), values[..., width:]), -1)
