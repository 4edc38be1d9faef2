"""The gated delta rule of Qwen3.5 in float32, many tokens at a time.

Each head has a memory that maps keys to values. For each token the memory decays, its value for the token's key moves
towards the token's value, and the token's query reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from edgekit.model.parts import DeltaRule

if TYPE_CHECKING:
    import torch

CHUNK = 64  # tokens of one triangular system
UNIT_EPSILON = 1e-6  # added to the squared length of a query or key before normalising


def gated_delta_rule(
    rule: DeltaRule,
    tensors: Mapping[str, torch.Tensor],
    mixed: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
) -> torch.Tensor:
    """Return the values [batch, length, head, value] that queries read; `mixed` are queries, keys and values."""
    import torch
    from torch.nn import functional

    sizes = (rule.key_dim, rule.key_dim, rule.value_dim)
    parts = torch.split(mixed, [rule.keys, rule.keys, rule.values], -1)
    q, k, v = (part.reshape(*part.shape[:2], -1, size).transpose(1, 2) for part, size in zip(parts, sizes, strict=True))
    groups = rule.value_heads // rule.key_heads
    q, k = (_unit(part).repeat_interleave(groups, 1) for part in (q, k))
    rate = functional.softplus(decay + tensors["linear_attn.dt_bias"])
    logs = (-tensors["linear_attn.A_log"].exp() * rate).transpose(1, 2)
    return delta_rule(q * rule.key_dim**-0.5, k, v, logs, strength.sigmoid().transpose(1, 2)).transpose(1, 2)


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, logs: torch.Tensor, strength: torch.Tensor
) -> torch.Tensor:
    """Return the values [batch, head, token, value] that the queries read. The memory starts empty.

    `logs` are the logarithms of the decays, `strength` the shares by which values are moved: both [batch, head, token].
    """
    import torch

    memory = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    read = []
    for start in range(0, q.shape[2], CHUNK):
        here = slice(start, start + CHUNK)
        qs, ks, vs, share = q[:, :, here], k[:, :, here], v[:, :, here], strength[:, :, here]
        total = logs[:, :, here].cumsum(-1)  # decay since the start of the chunk
        between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        # The value that a token adds depends on those that earlier tokens of the chunk added: a triangular system.
        known = (ks * total.exp()[..., None]) @ memory
        system = (ks @ ks.mT * between * share[..., None]).tril(-1)
        added = torch.linalg.solve_triangular(system, (vs - known) * share[..., None], upper=False, unitriangular=True)
        read.append((qs * total.exp()[..., None]) @ memory + (qs @ ks.mT * between) @ added)
        left = (total[..., -1:] - total).exp()[..., None]
        memory = memory * total[..., -1].exp()[..., None, None] + (ks * left).mT @ added
    return torch.cat(read, 2)


def _unit(values: torch.Tensor) -> torch.Tensor:
    import torch

    return values * torch.rsqrt(values.square().sum(-1, keepdim=True) + UNIT_EPSILON)
