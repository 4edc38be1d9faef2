"""The private memory that an export takes at its peak, and its comparison with this machine before work.

Each step holds Python, the libraries that it loads and what its largest tensors need, as measured on x86-64 Linux.
"""

from __future__ import annotations

from collections.abc import Iterator

from edgekit.artifact.self_check import CHECKED_TOKENS, TOKENS_A_CALL
from edgekit.common.free_memory import free_memory
from edgekit.common.units import MIB, show_bytes
from edgekit.contracts.memory import Term, sized, total
from edgekit.contracts.plan import Plan
from edgekit.contracts.target import Target
from edgekit.errors import DoesNotFit
from edgekit.planner.memory import load_of
from edgekit.quant.calibration import LENGTH, SEQUENCES
from edgekit.quant.effort import calibration_bytes, usual_method
from edgekit.quant.shards import largest_layer_bytes

_PYTHON_BYTES = 32 * MIB  # with numpy, pydantic and edgekit
_SLICES_BYTES = 32 * MIB  # rows that are unpacked, multiplied and compared at once, in the two threads of the check
_TOKENIZER_SHARE = 0.2  # of what reading a tokenizer takes; the rest is returned once its texts are encoded
_LAYERS = 2  # of the reference: the next one is read while the last one is still held
_LOGITS = 3  # of the widest cache, of a narrower one, and the reference's
_TORCH_BYTES = 125 * MIB  # of its import and first product: measured on x86-64 Linux
_PRIVATE = "private_weights_bytes", "kv_bytes", "activation_bytes"


def _steps(plan: Plan, target: Target, calibration_tokens: int) -> Iterator[Term]:
    model, load, costs, reading = plan.model, load_of(plan), target.export_costs, sum(plan.memory.tokenizer(plan.model))
    base = _PYTHON_BYTES + round(_TOKENIZER_SHARE * reading)
    if calibration_tokens:
        size = base + _TORCH_BYTES + calibration_bytes(model, plan.recipe, calibration_tokens)
        yield sized("export_bytes", size, f"to choose integers on {calibration_tokens:,} tokens")
    base += costs.tools
    values = model.parameters + (model.vocab_size * model.hidden_size if model.tied else 0)
    cache = total(target.memory(load), "kv_bytes")
    lowering = _TORCH_BYTES + round(costs.value * values + costs.cache * cache) if costs.value else 0
    yield sized("export_bytes", base + max(lowering, round(costs.tokenizer * reading)), "to write the files")
    base += _TORCH_BYTES + _LAYERS * largest_layer_bytes(model)
    largest = max(tensor.size for tensor in model.tensors()) * 4
    yield sized("export_bytes", base + largest + _SLICES_BYTES, "to read the largest tensor back")
    load = load._replace(held_tokens=min(CHECKED_TOKENS, load.held_tokens), chunk_tokens=TOKENS_A_CALL, sequences=1)
    running = total(target.memory(load), *_PRIVATE)
    running += total(load.weights(mapped=target.copied_share), "mapped_weights_bytes")  # an unsealed file is copied
    running += round(costs.vocabulary * reading) + _LOGITS * CHECKED_TOKENS * model.vocab_size * 4
    yield sized("export_bytes", base + running, "to run the artifact and the reference")


def export_peak(plan: Plan, target: Target, calibration_tokens: int) -> Term:
    """Return the largest step of an export, and what it does. `calibration_tokens`: 0 where nothing is calibrated."""
    return max(_steps(plan, target, calibration_tokens), key=lambda step: step.bytes)


def with_peak(plan: Plan, target: Target) -> Plan:
    """Return the plan with the peak of an export without options."""
    peak = export_peak(plan, target, SEQUENCES * LENGTH if usual_method(plan.model, plan.recipe) == "gptq" else 0)
    return plan.model_copy(update={"export_bytes": 0 if plan.model.exportable else peak.bytes})


def check_memory(plan: Plan, target: Target, calibration_tokens: int) -> None:
    """Raise `DoesNotFit` if the system would end the export, without a word."""
    peak, free = export_peak(plan, target, calibration_tokens), free_memory()
    if free is not None and free.bytes < peak.bytes:
        cure = "choose --effort quick, " if calibration_tokens else ""
        raise DoesNotFit(
            f"exporting {plan.model.name} for {plan.target} takes {peak.why} and {show_bytes(free.bytes)} are free"
            f" ({free.source}); {cure}free memory, or export it on a larger machine: the artifact runs here too"
        )
