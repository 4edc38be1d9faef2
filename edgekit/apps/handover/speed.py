"""Predicts the speed of a layout by the roofline: bytes over bandwidth, operations over compute, sums over links."""

from __future__ import annotations

from edgekit import ModelSpec, Recipe
from edgekit.apps.handover.gpus import GpuProfile
from edgekit.apps.handover.ranks import Load, kv_bits, rank_model
from edgekit.apps.handover.server_plan import ParallelLayout, RankMemory, ServerSpeed
from edgekit.common.units import rounded
from edgekit.contracts.plan import PROMPT_TOKENS
from edgekit.contracts.token_costs import active_parameters, kv_bytes, operations_per_token, touched_share

# A prior, not measured here: servers reach about these shares of a data sheet's figures.
_BANDWIDTH_SHARE, _COMPUTE_SHARE, _LINK_SHARE = 0.7, 0.5, 0.7
_SUM_S, _SENT_S = 10e-6, 20e-6  # latency of one all-reduce, and of sending activations to the next stage
_SUMS_A_LAYER = 2  # after attention and after the feed-forward


def predict_speed(
    model: ModelSpec,
    recipe: Recipe,
    layout: ParallelLayout,
    memory: RankMemory,
    gpu: GpuProfile,
    load: Load,
) -> ServerSpeed:
    """Predict the speed with all sequences of `load` at work, their caches half full."""
    context, sequences = load.context, load.sequences
    each = -(-sequences // layout.decoders)  # sequences of one copy, divided among its stages
    batch = max(1, -(-each // layout.pipeline))
    seen = batch * (layout.expert_group // layout.tensor if layout.experts else 1)
    weights = memory.weights_bytes * touched_share(model, recipe, seen)
    state = kv_bytes(rank_model(model, layout), context // 2, kv_bits(load.kv_format), scale_bits=0)
    bandwidth = gpu.peak_bandwidth_gb_s.value * 1e9 * _BANDWIDTH_SHARE
    reading = (weights + batch * state) / bandwidth
    computing = _computing(2 * active_parameters(model) * batch, layout, gpu)
    stage = max(reading, computing) + _summing(model, layout, gpu, batch)
    step = layout.pipeline * (stage + (_SENT_S if layout.pipeline > 1 else 0))
    prompt = max(1, min(PROMPT_TOKENS, context // 2))
    first = prefill_seconds(model, layout, gpu, prompt) + step
    shares = f"{_BANDWIDTH_SHARE:g} of {gpu.peak_bandwidth_gb_s.value:g} GB/s"
    shares += (
        f", {_COMPUTE_SHARE:g} of {gpu.fp16_tflops.value:g} TFLOPS, {_LINK_SHARE:g} of {gpu.link_gb_s.value:g} GB/s"
    )
    return ServerSpeed(
        tokens_per_s_each=rounded(1 / step),
        tokens_per_s_all=rounded(sequences / step),
        first_token_s=rounded(first),
        basis=(
            f"a prior, not measured: {shares}; a step of {batch}"
            f" sequences reads {weights / 1e9:.3g} GB of weights and {batch * state / 1e9:.3g} GB of KV on each GPU;"
            f" first token after a prompt of {prompt}, without a queue"
        ),
    )


def prefill_seconds(model: ModelSpec, layout: ParallelLayout, gpu: GpuProfile, tokens: int) -> float:
    """Return the time that one copy needs to read a prompt."""
    operations = operations_per_token(model) * tokens
    return layout.pipeline * (_computing(operations, layout, gpu) + _summing(model, layout, gpu, tokens))


def _computing(operations: int, layout: ParallelLayout, gpu: GpuProfile) -> float:
    """Return the seconds of one stage's share of `operations` on the tensor cores in 16 bits."""
    return operations / (layout.tensor * layout.pipeline) / (gpu.fp16_tflops.value * 1e12 * _COMPUTE_SHARE)


def _summing(model: ModelSpec, layout: ParallelLayout, gpu: GpuProfile, tokens: int) -> float:
    """Return the seconds of one stage's all-reduces of the residual."""
    if layout.tensor == 1:
        return 0.0
    layers = -(-len(model.layers) // layout.pipeline)
    sent = 2 * (layout.tensor - 1) / layout.tensor * tokens * model.hidden_size * 2
    return _SUMS_A_LAYER * layers * (_SUM_S + sent / (gpu.link_gb_s.value * 1e9 * _LINK_SHARE))
