"""Rotary frequencies of all kinds of rope for a planned context. Pure arithmetic.

They equal the frequencies of transformers for the same config.
"""

from __future__ import annotations

import math

from edgekit.model.parts import Rope


def frequencies(rope: Rope, context_tokens: int) -> tuple[list[float], float]:
    """Return `rope.dim // 2` inverse frequencies and the attention factor, which scales cosine and sine.

    Two kinds depend on the planned context: beyond the trained positions, `longrope` uses its long factors and
    `dynamic` increases theta.
    """
    match rope.kind:
        case "default":
            return _plain(rope, rope.theta), 1.0
        case "linear":
            return [frequency / rope.factor for frequency in _plain(rope, rope.theta)], 1.0
        case "proportional":
            return _proportional(rope), 1.0
        case "dynamic":
            return _dynamic(rope, context_tokens), 1.0
        case "llama3":
            return [_llama3(rope, frequency) for frequency in _plain(rope, rope.theta)], 1.0
        case "yarn":
            return _yarn(rope), _yarn_attention(rope)
        case "longrope":
            return _longrope(rope, context_tokens), _longrope_attention(rope)


def rotated_pairs(rope: Rope) -> tuple[list[int], list[int]]:
    """Return the first and the second channels of a head's rotated pairs."""
    if rope.interleaved:
        return list(range(0, rope.dim, 2)), list(range(1, rope.dim, 2))
    return list(range(rope.dim // 2)), list(range(rope.dim // 2, rope.dim // 2 * 2))


def _plain(rope: Rope, theta: float) -> list[float]:
    return [theta ** (-index / rope.dim) for index in range(0, rope.dim, 2)]


def _proportional(rope: Rope) -> list[float]:
    """Return a full head's frequencies for the rotated proportion, and zeros for the rest."""
    turning = int(rope.proportion * rope.dim // 2)
    return [
        frequency / rope.factor if index < turning else 0.0 for index, frequency in enumerate(_plain(rope, rope.theta))
    ]


def _dynamic(rope: Rope, context_tokens: int) -> list[float]:
    """Raise theta so that the slowest frequency covers the whole context as it covered the trained one."""
    assert rope.original_positions is not None
    stretch = max(context_tokens, rope.original_positions) / rope.original_positions
    theta = rope.theta * (rope.factor * stretch - (rope.factor - 1)) ** (rope.dim / (rope.dim - 2))
    return _plain(rope, theta)


def _llama3(rope: Rope, frequency: float) -> float:
    """Keep a high frequency, divide a low one by the factor, interpolate in between."""
    assert rope.original_positions and rope.low_freq_factor is not None and rope.high_freq_factor is not None
    turns = rope.original_positions * frequency / (2 * math.pi)  # over the trained context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = min(1.0, max(0.0, blend))
    return (1 - blend) * frequency / rope.factor + blend * frequency


def _yarn(rope: Rope) -> list[float]:
    """Keep high frequencies, divide low ones by the factor, with a linear ramp in between."""
    low, high = (_yarn_index(rope, turns) for turns in (rope.beta_fast or 32.0, rope.beta_slow or 1.0))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    scaled = []
    for index, frequency in enumerate(_plain(rope, rope.theta)):
        stretched = min(1.0, max(0.0, (index - low) / (high - low)))
        scaled.append(frequency / rope.factor * stretched + frequency * (1 - stretched))
    return scaled


def _yarn_index(rope: Rope, turns: float) -> float:
    """Return the (fractional) index of the frequency with that many rotations over the trained context."""
    assert rope.original_positions is not None
    return rope.dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(rope: Rope, context_tokens: int) -> list[float]:
    assert rope.original_positions is not None
    factors = rope.long_factor if context_tokens > rope.original_positions else rope.short_factor
    return [frequency / factor for frequency, factor in zip(_plain(rope, rope.theta), factors, strict=True)]


def _longrope_attention(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    assert rope.original_positions is not None
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_positions))
