"""Predicts memory and speed of every layout of a model on a group of GPUs, with the requirements that it misses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from edgekit import ModelSpec
from edgekit.apps.handover.gpus import GpuGroup
from edgekit.apps.handover.ranks import Load, ServerSubject, kv_bits, misfits, rank_memory, rank_model
from edgekit.apps.handover.request import ServerRequest
from edgekit.apps.handover.server_plan import ParallelLayout, RankMemory, ServerName, ServerSpeed
from edgekit.apps.handover.speed import predict_speed, prefill_seconds
from edgekit.common.units import show_bytes
from edgekit.contracts.plan import Violation
from edgekit.contracts.token_costs import kv_bytes

MACHINE_GPUS = 8  # GPUs with fast links between them; tensor parallelism stays within one machine


class ServerFacts(NamedTuple):
    """The facts about a server that the planner needs."""

    memory_share: float  # share of each GPU's memory that the server may use
    uneven_experts: bool  # True: GPUs may hold different numbers of experts
    source: str


_VLLM = ServerFacts(0.92, True, "vLLM 0.32.0: gpu_memory_utilization 0.92, determine_expert_map")
SERVERS: dict[ServerName, ServerFacts] = {
    "vllm": _VLLM,
    "sglang": ServerFacts(0.85, False, "SGLang 0.5.23: mem_fraction_static, set below 0.9 for CUDA graphs"),
    "ray": _VLLM,
    "kserve": _VLLM,
}


class LayoutCandidate(NamedTuple):
    """A layout on a group of GPUs, with its predicted memory and speed."""

    group: GpuGroup
    layout: ParallelLayout
    load: Load
    memory: RankMemory | None  # None: the layout does not divide the model
    speed: ServerSpeed | None
    requests_per_s: float  # throughput of a split into prefill and decode; 0 without one
    violations: tuple[Violation, ...]


def layouts_of(subject: ServerSubject, count: int, request: ServerRequest) -> Iterator[ParallelLayout]:
    """Yield every division of `count` GPUs into tensor, pipeline, data and expert parallelism."""
    for tensor in _divisors(count):
        for pipeline in _divisors(count // tensor):
            data = count // tensor // pipeline
            for experts in _expert_choices(subject.model, tensor * data, request):
                base = ParallelLayout(tensor=tensor, pipeline=pipeline, data=data, experts=experts)
                if not request.disaggregate:
                    yield base
                for prefill in range(1, data) if request.disaggregate else ():
                    yield base.model_copy(update={"prefill": prefill})


def _expert_choices(model: ModelSpec, group: int, request: ServerRequest) -> tuple[bool, ...]:
    if model.experts is None or group == 1:
        return (False,)
    return (True,) if request.expert_parallel else (False, True)


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def budget_bytes(group: GpuGroup, server: ServerName) -> int:
    """Return the bytes of one GPU that the server may fill."""
    return int(group.gpu.memory.value * SERVERS[server].memory_share)


def price_layout(
    subject: ServerSubject, group: GpuGroup, layout: ParallelLayout, load: Load, request: ServerRequest
) -> LayoutCandidate:
    """Predict memory and speed of a layout under a load, and collect the requirements it misses."""
    model, recipe = subject.model, subject.recipe
    facts = SERVERS[request.to]
    violations = [*_machine(layout), *_formats(group, load)]
    divides = list(misfits(model, recipe, layout, uneven_experts=facts.uneven_experts))
    if subject.draft is not None:
        misfit = misfits(subject.draft, recipe, layout, uneven_experts=facts.uneven_experts)
        divides += [Violation(each.what, f"draft: {each.found}", each.allowed) for each in misfit]
    if divides:
        return LayoutCandidate(group, layout, load, None, None, 0.0, (*violations, *divides))
    each = -(-load.sequences // layout.decoders)
    memory = rank_memory(subject, layout, load._replace(sequences=each), adapters=len(request.adapters))
    speed = predict_speed(model, recipe, layout, memory, group.gpu, load)
    violations += _limits(subject, group, load, memory, speed, each, request)
    return LayoutCandidate(
        group, layout, load, memory, speed, _sustained(model, group, layout, load, speed), tuple(violations)
    )


def _machine(layout: ParallelLayout) -> Iterator[Violation]:
    if layout.tensor > MACHINE_GPUS:
        yield Violation("links", f"tensor parallel over {layout.tensor} GPUs", f"the {MACHINE_GPUS} of one machine")


def _formats(group: GpuGroup, load: Load) -> Iterator[Violation]:
    """Refuse a cache in FP8 on a GPU without it."""
    if group.gpu.fp8_tflops is None and load.kv_format == "fp8":
        found = f"a KV cache in FP8 on {group.gpu.name}, which is {group.gpu.architecture}"
        yield Violation("fp8", found, "a GPU with FP8")


def _limits(
    subject: ServerSubject,
    group: GpuGroup,
    load: Load,
    memory: RankMemory,
    speed: ServerSpeed,
    each: int,
    request: ServerRequest,
) -> Iterator[Violation]:
    if load.context > subject.model.max_positions:
        yield Violation("context", f"{load.context:,} tokens", f"{subject.model.max_positions:,} tokens")
    budget = budget_bytes(group, request.to)
    fixed = memory.total_bytes - memory.kv_bytes
    if fixed > budget:
        yield Violation("memory", f"{show_bytes(fixed)} a GPU before any KV", show_bytes(budget))
    elif memory.total_bytes > budget:
        found = f"{show_bytes(memory.kv_bytes)} a GPU for {each} × {load.context:,} tokens"
        yield Violation("KV", found, f"{show_bytes(budget - fixed)} left")
    least, most = request.min_tokens_per_second, request.max_first_token
    if least is not None and speed.tokens_per_s_each < least:
        yield Violation("speed", f"{speed.tokens_per_s_each:g} tok/s each", f"{least:g} tok/s")
    if most is not None and speed.first_token_s > most:
        yield Violation("first token", f"{speed.first_token_s:g} s", f"{most:g} s")


def _sustained(model: ModelSpec, group: GpuGroup, layout: ParallelLayout, load: Load, speed: ServerSpeed) -> float:
    """Return requests per second, each half a context of prompt and half of answer; the slower side decides."""
    if not layout.prefill:
        return 0.0
    tokens = max(1, load.context // 2)
    reading = layout.prefill / prefill_seconds(model, layout, group.gpu, tokens)
    return min(reading, speed.tokens_per_s_all / tokens)


def kv_tokens(subject: ServerSubject, candidate: LayoutCandidate, request: ServerRequest) -> int:
    """Return the number of tokens whose KV fits on the fullest rank of one copy."""
    assert candidate.memory is not None
    left = budget_bytes(candidate.group, request.to) - (candidate.memory.total_bytes - candidate.memory.kv_bytes)
    each = -(-candidate.load.sequences // candidate.layout.decoders)
    held = candidate.load.context * each
    return max(0, int(left / max(1, candidate.memory.kv_bytes) * held))


def transferred_bytes(subject: ServerSubject, candidate: LayoutCandidate) -> int | None:
    """Return the bytes of KV sent from prefill to decode, over all ranks, for a prompt of half the context."""
    layout = candidate.layout
    if not layout.prefill:
        return None
    rank = rank_model(subject.model, layout)
    a_rank = kv_bytes(rank, candidate.load.context // 2, kv_bits(candidate.load.kv_format), scale_bits=0)
    return a_rank * layout.tensor * layout.pipeline
