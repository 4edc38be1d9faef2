"""The gated delta rule (Qwen3.5) in MLX, one token after the other, so that results do not depend on chunks.

It is computed in float32, in which states carry the memory and the last inputs of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from edgekit.model.parts import DeltaRule
from edgekit.quant.delta_rule import UNIT_EPSILON
from edgekit_mlx.convolution import Carry


def delta_rule(
    rule: DeltaRule,
    vector: Callable[[str], mx.array],
    mixed: mx.array,
    decay: mx.array,
    strength: mx.array,
    runs: Sequence[Carry],
) -> tuple[mx.array, list[mx.array]]:
    """Return the values [tokens, heads, 1, value] that queries read, and the memory that each state carries on.

    `mixed` are queries, keys and values; `vector` returns a vector of the layer by its name.
    """
    keys_and_queries, values = mx.split(mixed, [2 * rule.keys], axis=-1)
    # Queries come first. Each head's query and key is normalised to length 1: the sum of squares is the mean × size.
    units = keys_and_queries.reshape(len(mixed), 2, rule.key_heads, rule.key_dim)
    units = mx.fast.rms_norm(units, None, UNIT_EPSILON / rule.key_dim) * rule.key_dim**-0.5
    units = mx.repeat(units, rule.value_heads // rule.key_heads, axis=2)
    rate = mx.logaddexp(decay + vector("dt_bias"), mx.array(0.0))
    by_head = (len(mixed), rule.value_heads, 1, -1)
    inputs = (
        (units[:, 0] * rule.key_dim**-0.5).reshape(by_head),
        units[:, 1].reshape(by_head),
        values.reshape(by_head),
        mx.exp(-mx.exp(vector("A_log")) * rate).reshape(by_head),
        mx.sigmoid(strength).reshape(by_head),
    )
    read: list[mx.array] = []
    after: list[mx.array] = []
    first = 0
    for run in runs:
        kept = memory = run.array
        for token in range(run.tokens):
            found, memory = _step(memory, *(each[first + token] for each in inputs))
            read.append(found)
            kept = memory if token + 1 == run.kept else kept
        after.append(kept)
        first += run.tokens
    return mx.stack(read), after


def _step(
    memory: mx.array, query: mx.array, key: mx.array, value: mx.array, decay: mx.array, strength: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the output of one token's query, and the memory [head, key, value] after it.

    The memory depends on the reading, because MLX would otherwise compute and hold the memories of all tokens first.
    """
    memory = memory * decay
    added = (value - key @ memory) * strength
    memory = memory + key.swapaxes(-1, -2) * added
    found = query @ memory
    return found, mx.depends([memory], [found])[0]
