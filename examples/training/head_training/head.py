"""An EAGLE-3 head in torch, as it is trained: every place of a text drafts several tokens on the head's own outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu


@dataclass(frozen=True)
class HeadShape:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    draft_vocabulary: int
    layers: tuple[int, ...]  # of the target, after which its hidden states are read
    epsilon: float
    theta: float
    positions: int


class Norm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weight, self.epsilon)


def _linear(outputs: int, inputs: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=inputs**-0.5)
    return made


class Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        width = shape.heads * shape.head_dim
        self.q_proj = _linear(width, 2 * shape.hidden)
        self.k_proj = _linear(shape.kv_heads * shape.head_dim, 2 * shape.hidden)
        self.v_proj = _linear(shape.kv_heads * shape.head_dim, 2 * shape.hidden)
        self.o_proj = _linear(shape.hidden, width)
        self.shape = shape

    def forward(self, x: Tensor, step: int, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend to the text up to each place (`past[0]`), and to what was drafted after that place (the others)."""
        batch, length, _ = x.shape
        shape = self.shape
        query, key, value = (
            module(x).view(batch, length, -1, shape.head_dim).transpose(1, 2)
            for module in (self.q_proj, self.k_proj, self.v_proj)
        )
        angles = (torch.arange(length, device=x.device) + step)[:, None] * shape.theta ** (
            -torch.arange(0, shape.head_dim, 2, device=x.device) / shape.head_dim
        )
        cosines, sines = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        query, key = (part * cosines + _half_turned(part) * sines for part in (query, key))
        groups = shape.heads // shape.kv_heads
        past.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
        keys, values = past[0]
        scale = shape.head_dim**-0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = [(query @ keys.transpose(-1, -2) * scale).masked_fill(later, -torch.inf)]
        scores += [(query * drafted).sum(-1, keepdim=True) * scale for drafted, _ in past[1:]]
        shares = torch.cat(scores, -1).softmax(-1)
        mixed = shares[..., :length] @ values
        for place, (_, drafted) in enumerate(past[1:]):
            mixed = mixed + shares[..., length + place, None] * drafted
        attended: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return attended


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class Mlp(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = _linear(shape.inner, shape.hidden), _linear(shape.inner, shape.hidden)
        self.down_proj = _linear(shape.hidden, shape.inner)

    def forward(self, x: Tensor) -> Tensor:
        fed: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return fed


class Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.hidden_norm, self.input_layernorm = (Norm(shape.hidden, shape.epsilon) for _ in range(2))
        self.post_attention_layernorm = Norm(shape.hidden, shape.epsilon)
        self.self_attn, self.mlp = Attention(shape), Mlp(shape)

    def forward(self, embedded: Tensor, hidden: Tensor, step: int, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(both, step, past)
        fed: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + fed


class Head(nn.Module):
    """The names of its parameters are those of the published layout."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = _linear(shape.hidden, len(shape.layers) * shape.hidden)
        self.midlayer = Layer(shape)
        self.norm = Norm(shape.hidden, shape.epsilon)
        self.lm_head = _linear(shape.draft_vocabulary, shape.hidden)

    def forward(self, embedded: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
        """Return the draft logits of each step: of step s at place i for the token at i + 2 + s.

        `embedded` are the embeddings of the tokens [batch, length, width] and `hidden` the target's hidden states.
        """
        length, past = embedded.shape[1], list[tuple[Tensor, Tensor]]()
        state, logits = self.fc(hidden), []
        for step in range(steps):
            shifted = torch.zeros_like(embedded)
            shifted[:, : length - 1 - step] = embedded[:, 1 + step :]
            state = self.midlayer(shifted, state, step, past)
            logits.append(self.lm_head(self.norm(state)))
        return logits
