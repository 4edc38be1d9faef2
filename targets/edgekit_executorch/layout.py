"""The interface of an exported program: its file, its methods, and the facts that it states about itself.

Facts without `edgekit` in their name are those that ExecuTorch's own runners ask for.
"""

from __future__ import annotations

from typing import NamedTuple

from edgekit.contracts.plan import Plan

PROGRAM = "model.pte"
LAYOUT_VERSION = 2
FORWARD, APPEND, STEP, EXIT = "forward", "append", "step", "exit_"
INT8_BITS = 8  # width of quantised keys and values
MAX_ROWS = 16  # most logit rows of a call; their memory is planned for the largest call


def exit_after(layer: int) -> str:
    """Return the name of the method that exits after `layer`."""
    return f"{EXIT}{layer}"


def feature_layers(plan: Plan) -> tuple[int, ...]:
    """Return the layers whose hidden states follow the logits of `append`, each once."""
    return tuple(sorted(set(plan.drafter.hidden_layers))) if plan.drafter is not None else ()


def cache_names(kv_bits: int) -> tuple[str, ...]:
    """Return the program's names of the arrays in one layer's cache."""
    suffixes = ("", "_scales", "_zeros") if kv_bits == INT8_BITS else ("",)
    return tuple(f"{name}{suffix}" for name in ("keys", "values") for suffix in suffixes)


class Sizes(NamedTuple):
    """The bounds that a program is lowered for."""

    slots: int  # tokens of its cache
    positions: int  # rows of its rotary tables
    chunk: int  # tokens of one call, at most
    rows: int  # logits of one call, at most

    @staticmethod
    def of(plan: Plan) -> Sizes:
        slots = plan.storage.capacity_tokens
        chunk = max(2, min(plan.chunk_tokens, slots))
        return Sizes(slots, max(plan.context, slots), chunk, min(MAX_ROWS, chunk))


def description(plan: Plan) -> dict[str, int | bool | list[int]]:
    """Return the facts that a program states, each as a method without inputs."""
    sizes, model = Sizes.of(plan), plan.model
    windows = {layer.window for layer in model.layers if layer.window is not None and layer.window < sizes.slots}
    return {
        "edgekit_layout": LAYOUT_VERSION,
        "edgekit_positions": sizes.positions,
        "edgekit_rows": sizes.rows,
        "edgekit_kv_bits": plan.storage.kv_bits,
        "edgekit_window": max(windows, default=0),  # of windowed layers; 0: there are none
        **({"edgekit_features": list(feature_layers(plan))} if plan.drafter is not None else {}),
        "get_max_context_len": sizes.slots,
        "get_max_seq_len": sizes.chunk,
        "get_vocab_size": model.vocab_size,
        "get_n_layers": len(model.layers),
        "get_bos_id": -1 if model.bos_id is None else model.bos_id,
        "get_eos_ids": list(model.eos_ids),
        "use_kv_cache": True,
        "use_sdpa_with_kv_cache": True,
        "enable_dynamic_shape": True,
    }
