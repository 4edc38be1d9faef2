"""Plans that this target refuses, checked before anything is written."""

from __future__ import annotations

from functools import lru_cache

from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import Recipe
from edgekit.errors import Unsupported
from edgekit.model.spec import ModelSpec

MOST_TAPS = 8  # taps of a convolution, each of which takes three nodes
MOST_KEY_DIM = 1024  # key size of a delta rule, which writes that many numbers into the graph
_LEAST_BLOCK = 16  # values of an expert's row that share a scale
KV_BITS: dict[str, tuple[int, ...]] = {"cpu": (32, 16, 8), "cuda": (16,)}


def refuse_plan(plan: Plan) -> None:
    """Raise `Unsupported` if the plan cannot be exported."""
    reason = _reason(plan)
    if reason:
        raise Unsupported(reason)


@lru_cache(maxsize=256)
def refuse_experts(model: ModelSpec, recipe: Recipe, backend: str) -> str | None:
    """Return the reason why a model's experts cannot be exported; None if they can, or if it has none."""
    if model.experts is None:
        return None
    if backend != "cpu":
        return f"onnx on {backend}: the experts of {model.family} are supported on the CPU alone; plan for cpu"
    if model.activation != "silu":
        return f"onnx: experts with the activation {model.activation} are not supported; plan for another target"
    formats = {recipe.format_of(tensor) for tensor in model.tensors() if tensor.role == "expert"}
    kinds = sorted({"float" if each.is_float else each.kind for each in formats})
    if len(kinds) > 1:
        return f"onnx: experts in {' and '.join(kinds)} at once are not supported; give all of them one format"
    if kinds == ["float"] and model.experts.scoring != "softmax":
        return f"onnx: the experts of {model.family} in floats are not supported; choose an s4 or s8 recipe"
    sizes = (model.hidden_size, model.experts.intermediate_size)
    if kinds != ["float"] and any(size % _LEAST_BLOCK for size in sizes):
        return f"onnx: integers of experts need sizes that are multiples of {_LEAST_BLOCK}, not {sizes}; choose float32"
    return None


def _reason(plan: Plan) -> str | None:
    model = plan.model
    if model.exportable:
        return model.exportable
    if plan.backend not in KV_BITS:
        return f"onnx: no backend {plan.backend!r}; choose one of {', '.join(KV_BITS)}"
    if plan.storage.kv_bits not in KV_BITS[plan.backend]:
        allowed = " or ".join(map(str, KV_BITS[plan.backend]))
        return f"onnx on {plan.backend}: kv_bits {plan.storage.kv_bits} is not supported; use {allowed}"
    if model.encoder and plan.backend != "cpu":
        return f"onnx on {plan.backend}: {model.name} is an encoder, which runs on the CPU here; plan for cpu"
    if plan.recipe.is_native():
        return f"onnx: recipe {plan.recipe.name} is another vendor's own format; choose an s4, s8 or float recipe"
    if model.encoder and (plan.exits or plan.adapter_rank):
        return "onnx: an encoder has no exits and takes no adapters; plan without"
    if any(not 0 < layer < len(model.layers) for layer in plan.exits):
        return f"onnx: exits {list(plan.exits)} must lie between layer 1 and layer {len(model.layers) - 1}"
    if plan.drafter is not None and plan.backend != "cpu":
        return (
            f"onnx on {plan.backend}: hidden states for a drafting head are given on the CPU alone; leave out --drafter"
        )
    if model.activation not in ("silu", "gelu_tanh", "gelu"):
        return f"onnx: activation {model.activation} is not supported; plan for another target"
    rules = [layer.delta_rule for layer in model.layers if layer.delta_rule]
    taps = max([*(layer.conv_taps or 0 for layer in model.layers), *(rule.taps for rule in rules)])
    if taps and (plan.exits or plan.backend != "cpu"):
        what = f"exits {list(plan.exits)}" if plan.exits else f"the backend {plan.backend}"
        return f"onnx: {what} with the recurrent layers of {model.family} are not supported; use cpu without exits"
    if taps > MOST_TAPS:
        return f"onnx: convolutions over {taps} tokens are not supported; {MOST_TAPS} is the most"
    if any(rule.key_dim > MOST_KEY_DIM for rule in rules):
        return f"onnx: linear attention with keys of more than {MOST_KEY_DIM} values is not supported"
    if reason := refuse_experts(model, plan.recipe, plan.backend):
        return reason
    if model.layer_scalars and (plan.exits or plan.backend != "cpu"):
        what = f"the backend {plan.backend}" if plan.backend != "cpu" else "exits"
        return f"onnx: {what} with the layers of {model.family} are not supported; use cpu without exits"
    return None
