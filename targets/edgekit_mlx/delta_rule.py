"""The gated delta rule (Qwen3.5) in MLX, one token after the other, so that results do not depend on chunks.

It is computed in float32, in which states carry the memory and the last inputs of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from edgekit.model.parts import DeltaRule
from edgekit.quant.delta_rule import UNIT_EPSILON
from edgekit_mlx.convolution import Carry, Other, Product, convolved

# For more tokens, a layer is computed before the next one is described: the description takes 9 KB a token.
_MOST_LAZY = 16


def gated_delta_rule(
    name: str,
    rule: DeltaRule,
    epsilon: float,
    product: Product,
    other: Other,
    normed: mx.array,
    runs: Sequence[Carry],
) -> tuple[mx.array, list[tuple[mx.array, ...]]]:
    """Return the layer's output for all tokens, and the arrays that each state carries on.

    `epsilon` belongs to the norm of each head's values.
    """
    mixed, gate, strength, decay = (
        product(f"{name}in_proj_{part}", normed).astype(mx.float32) for part in ("qkv", "z", "b", "a")
    )
    mixed, last = convolved(f"{name}conv1d", other, mixed, runs)
    keys_and_queries, values = mx.split(mixed * mx.sigmoid(mixed), [2 * rule.keys], axis=-1)
    # Queries come first. Each head's query and key is normalised to length 1: the sum of squares is the mean × size.
    units = keys_and_queries.reshape(len(normed), 2, rule.key_heads, rule.key_dim)
    units = mx.fast.rms_norm(units, None, UNIT_EPSILON / rule.key_dim) * rule.key_dim**-0.5
    units = mx.repeat(units, rule.value_heads // rule.key_heads, axis=2)
    dt_bias, log_decay, weight = (other(f"{name}{part}") for part in ("dt_bias", "A_log", "norm.weight"))
    rate = mx.logaddexp(decay + dt_bias, mx.array(0.0))
    by_head = (len(normed), rule.value_heads, 1, -1)
    inputs = (
        (units[:, 0] * rule.key_dim**-0.5).reshape(by_head),
        units[:, 1].reshape(by_head),
        values.reshape(by_head),
        mx.exp(-mx.exp(log_decay) * rate).reshape(by_head),
        mx.sigmoid(strength).reshape(by_head),
    )
    read: list[mx.array] = []
    after: list[tuple[mx.array, ...]] = []
    first = 0
    for run, convolution in zip(runs, last, strict=True):
        memory = run.arrays[1]
        kept = memory
        for token in range(run.tokens):
            found, memory = _step(memory, *(each[first + token] for each in inputs))
            read.append(found)
            kept = memory if token + 1 == run.kept else kept
        after.append((convolution, kept))
        first += run.tokens
    outputs = mx.fast.rms_norm(mx.stack(read), weight, epsilon).reshape(len(normed), -1)
    output = product(f"{name}out_proj", (outputs * (gate * mx.sigmoid(gate))).astype(normed.dtype))
    if len(normed) > _MOST_LAZY:
        mx.async_eval(output, after)  # type: ignore[no-untyped-call]
    return output, after


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
