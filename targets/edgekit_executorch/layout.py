"""What a program of ours looks like from outside: its file, its methods, the facts it states about itself.

The names without `edgekit` are those that ExecuTorch's own runners ask for. Pure data; knows no vendor library.
"""

from __future__ import annotations

from typing import NamedTuple

from edgekit.plan import Plan

PROGRAM = "model.pte"
LAYOUT_VERSION = 1
FORWARD, STEP, EXIT = "forward", "step", "exit_"
NARROW_BITS = 8  # of keys and values that have scales and zeros beside them
MAX_ROWS = 16  # logits of one call: their memory is planned for the largest, and vocabularies are wide


def exit_after(layer: int) -> str:
    """The method that leaves after that layer."""
    return f"{EXIT}{layer}"


def cache_names(kv_bits: int) -> tuple[str, ...]:
    """The arrays of one layer's cache, as the program names them."""
    beside = ("", "_scales", "_zeros") if kv_bits == NARROW_BITS else ("",)
    return tuple(f"{name}{what}" for name in ("keys", "values") for what in beside)


class Sizes(NamedTuple):
    """The bounds that a program is lowered for."""

    slots: int  # tokens that its cache holds
    positions: int  # rows of its rotary tables
    chunk: int  # tokens of one call, at most
    rows: int  # logits of one call, at most

    @staticmethod
    def of(plan: Plan) -> Sizes:
        slots = plan.storage.capacity_tokens
        chunk = max(2, min(plan.chunk_tokens, slots))
        return Sizes(slots, max(plan.context, slots), chunk, min(MAX_ROWS, chunk))


def description(plan: Plan) -> dict[str, int | bool | list[int]]:
    """What the program answers to whoever runs it, each under the name of a method without inputs."""
    sizes, model = Sizes.of(plan), plan.model
    windows = {layer.window for layer in model.layers if layer.window is not None and layer.window < sizes.slots}
    return {
        "edgekit_layout": LAYOUT_VERSION,
        "edgekit_positions": sizes.positions,
        "edgekit_rows": sizes.rows,
        "edgekit_kv_bits": plan.storage.kv_bits,
        "edgekit_window": max(windows, default=0),  # of layers that declare one; 0: none does
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
