"""Chooses the layout of a server, and explains why every other one lost, with the smallest change that would help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from edgekit.apps.handover.gpus import MOST_GPUS, GpuGroup
from edgekit.apps.handover.layouts import (
    SERVERS,
    LayoutCandidate,
    budget_bytes,
    kv_tokens,
    layouts_of,
    price_layout,
    transferred_bytes,
)
from edgekit.apps.handover.ranks import Load, ServerSubject, group_that_divides
from edgekit.apps.handover.request import ServerRequest
from edgekit.apps.handover.server_plan import RejectedLayout, ServerPlan
from edgekit.common.units import show_bytes
from edgekit.contracts.plan import DEFAULT_CONTEXT, Failure, Violation
from edgekit.contracts.recipe import named_recipe
from edgekit.errors import DoesNotFit, InvalidInput, quote_short

_CONTEXT_STEP = 256
LAYOUT_HEAD = ("gpus", "layout", "a GPU", "tok/s each", "why not → the smallest change that helps")


def resolve_server(subject: ServerSubject, groups: Sequence[GpuGroup], request: ServerRequest) -> ServerPlan:
    """Return the plan of the first group of GPUs that carries the load, in its fastest layout.

    Raises `DoesNotFit` with all layouts.
    """
    _check(subject, groups, request)
    load = Load(
        request.context or min(subject.model.max_positions, DEFAULT_CONTEXT), request.sequences, request.kv_format
    )
    priced = [
        price_layout(subject, group, layout, load, request)
        for group in groups
        for layout in layouts_of(subject, group.size, request)
    ]
    passing = sorted((each for each in priced if not each.violations), key=lambda each: _order(each, groups))
    taken = passing[0] if passing else None
    rejected = tuple(_rejected(subject, each, taken, request) for each in priced if each is not taken)
    if taken is None:
        where = ", ".join(map(str, groups))
        near = nearest(rejected)
        message = f"{quote_short(subject.source)} cannot be served on {where} as asked"
        raise DoesNotFit(message + (f"; nearest: {near}" if near else ""), rejected={where: rejected})
    return _plan(subject, taken, rejected, request)


def _check(subject: ServerSubject, groups: Sequence[GpuGroup], request: ServerRequest) -> None:
    if request.expert_parallel and subject.model.experts is None:
        raise InvalidInput(f"--expert-parallel: {subject.source} has no experts; leave it out")
    if request.disaggregate and all(group.size < 2 for group in groups):
        raise InvalidInput("--disaggregate: prefill and decode need a GPU each; give --gpu with two or more")


def _order(candidate: LayoutCandidate, groups: Sequence[GpuGroup]) -> tuple[object, ...]:
    assert candidate.speed is not None
    layout = candidate.layout
    return (
        groups.index(candidate.group),
        -candidate.requests_per_s,
        -candidate.speed.tokens_per_s_each,
        layout.tensor,
        layout.pipeline,
        layout.experts,
    )


def _plan(
    subject: ServerSubject, taken: LayoutCandidate, rejected: tuple[RejectedLayout, ...], request: ServerRequest
) -> ServerPlan:
    assert taken.memory is not None and taken.speed is not None
    group, facts = taken.group, SERVERS[request.to]
    memory = group.gpu.memory
    return ServerPlan(
        server=request.to,
        model=subject.model,
        model_source=subject.source,
        model_sha256=subject.config_sha256,
        recipe=subject.recipe,
        kv_format=taken.load.kv_format,
        gpu=group.gpu.name,
        layout=taken.layout,
        context=taken.load.context,
        sequences=taken.load.sequences,
        memory=taken.memory,
        budget_bytes=budget_bytes(group, request.to),
        budget_why=f"{facts.memory_share:g} of {show_bytes(memory.value)} ({memory.source}); {facts.source}",
        memory_share=facts.memory_share,
        kv_tokens=kv_tokens(subject, taken, request),
        speed=taken.speed,
        transfer_bytes=transferred_bytes(subject, taken),
        adapters=tuple(str(path) for path in request.adapters),
        adapter_rank=subject.adapter_rank,
        draft=request.draft,
        drafter=request.drafter,
        rejected=rejected,
        notes=(*subject.notes, *_notes(taken)),
    )


def _notes(taken: LayoutCandidate) -> Iterator[str]:
    if taken.layout.prefill:
        yield "a split into prefill and decode steadies the time between tokens; it does not raise throughput"
    if taken.layout.gpus > taken.layout.tensor * taken.layout.pipeline and not taken.layout.prefill:
        yield f"{taken.layout.data} copies share the requests: each one alone sees the speed of one copy"


def nearest(rejected: Sequence[RejectedLayout]) -> str | None:
    """Describe the layout with the fewest failures and its first fix, preferring layouts that divide the model."""
    failed = [each for each in rejected if each.failures]
    if not failed:
        return None
    near = min(failed, key=lambda each: (each.memory is None, len(each.failures), _size(each)))
    failure = near.failures[0]
    return f"{near.gpu} {near.layout}: {failure.what} {failure.found}, allowed {failure.allowed} ({failure.cure})"


def _size(rejected: RejectedLayout) -> int:
    return rejected.memory.total_bytes if rejected.memory else 0


def _rejected(
    subject: ServerSubject, candidate: LayoutCandidate, taken: LayoutCandidate | None, request: ServerRequest
) -> RejectedLayout:
    fixes = tuple(
        Failure(what=each.what, found=each.found, allowed=each.allowed, cure=_fix(subject, candidate, each, request))
        for each in candidate.violations
    )
    return RejectedLayout(
        gpu=candidate.group.gpu.name,
        layout=candidate.layout,
        failures=fixes,
        reason=f"misses {' and '.join(each.what for each in fixes)}" if fixes else _lost(candidate, taken),
        memory=candidate.memory,
        speed=candidate.speed,
    )


def _lost(candidate: LayoutCandidate, taken: LayoutCandidate | None) -> str:
    assert taken is not None and taken.speed is not None and candidate.speed is not None
    if candidate.group != taken.group:
        return f"fits; {taken.group} stands before it"
    if taken.layout.prefill:
        return f"fits; sustains {candidate.requests_per_s:.3g} requests/s, the one taken {taken.requests_per_s:.3g}"
    slower, faster = candidate.speed.tokens_per_s_each, taken.speed.tokens_per_s_each
    return f"fits; {slower:g} tok/s each, the one taken {faster:g}"


def _fix(subject: ServerSubject, candidate: LayoutCandidate, violation: Violation, request: ServerRequest) -> str:
    what = violation.what
    if what in ("heads", "KV heads", "width", "experts", "links"):
        return _other_degree(subject, candidate, what, request)
    if what == "group":
        group = group_that_divides(subject.model, subject.recipe, candidate.layout)
        other = f"--recipe s4-g{group}, or " if group else "--recipe s8, which has no groups, or "
        return other + _other_degree(subject, candidate, what, request)
    if what == "layers":
        return f"at most {len(subject.model.layers)} stages"
    if what == "context":
        return f"--context {subject.model.max_positions}"
    if what == "fp8":
        return "a GPU from Ada on (L4, L40S, H100, …), or --kv-format auto"
    return _for_load(subject, candidate, what, request)


def _other_degree(subject: ServerSubject, candidate: LayoutCandidate, what: str, request: ServerRequest) -> str:
    """Name the largest smaller degree of tensor parallelism that divides the model."""
    layout = candidate.layout
    for tensor in range(layout.tensor - 1, 0, -1):
        other = layout.model_copy(update={"tensor": tensor, "experts": layout.experts and tensor * layout.data > 1})
        priced = price_layout(subject, candidate.group, other, candidate.load, request)
        if priced.memory is not None and all(each.what != what for each in priced.violations):
            return f"tensor parallel {layout.tensor} → {tensor}"
    return "no tensor parallelism divides it: no expert parallelism" if layout.experts else "another model"


def _for_load(subject: ServerSubject, candidate: LayoutCandidate, what: str, request: ServerRequest) -> str:
    """Suggest the smallest changes of load, KV format or GPUs that meet this requirement."""
    load, layout = candidate.load, candidate.layout

    def passes(other: Load) -> bool:
        priced = price_layout(subject, candidate.group, layout, other, request)
        return all(each.what != what for each in priced.violations)

    ways = []
    fewer = _most(load.sequences - 1, lambda count: passes(load._replace(sequences=count)))
    if fewer:
        ways.append(f"--sequences {load.sequences} → {fewer}")
    if what == "KV":
        steps = _most((load.context - 1) // _CONTEXT_STEP, lambda n: passes(load._replace(context=n * _CONTEXT_STEP)))
        if steps:
            ways.append(f"--context {load.context} → {steps * _CONTEXT_STEP}")
        if load.kv_format == "auto" and passes(load._replace(kv_format="fp8")):
            ways.append("--kv-format fp8")
    if what == "memory" and not subject.recipe.has_few_bits:
        ways.append(_smaller_weights(subject, candidate, request))
    more = _more_gpus(subject, candidate, request)
    return "; ".join([way for way in (*ways[:2], more) if way]) or "another GPU, or ask for less"


def _smaller_weights(subject: ServerSubject, candidate: LayoutCandidate, request: ServerRequest) -> str:
    smaller = subject._replace(recipe=named_recipe("s4-g128"))
    priced = price_layout(smaller, candidate.group, candidate.layout, candidate.load, request)
    return "" if any(each.what == "memory" for each in priced.violations) else "--recipe s4-g128"


def _more_gpus(subject: ServerSubject, candidate: LayoutCandidate, request: ServerRequest) -> str:
    """Double the GPUs until some layout meets the whole request; return it as a `--gpu` option, empty if none does."""
    count = candidate.group.size * 2
    while count <= min(MOST_GPUS, candidate.group.size * 16):
        group = candidate.group._replace(size=count)
        priced = (
            price_layout(subject, group, layout, candidate.load, request)
            for layout in layouts_of(subject, count, request)
        )
        passing = sorted((each for each in priced if not each.violations), key=lambda each: _order(each, [group]))
        if passing:
            return f"--gpu {group} ({passing[0].layout})"
        count *= 2
    return ""


def _most(limit: int, passes: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `limit` that passes, by bisection; 0 if none does."""
    low, high = 0, max(0, limit)
    while low < high:
        middle = (low + high + 1) // 2
        if passes(middle):
            low = middle
        else:
            high = middle - 1
    return low


def layout_rows(rejected: RejectedLayout) -> list[tuple[str, ...]]:
    """Return the row of a layout with its first failure, then a row for each further one."""
    why = [
        f"{failure.what}: {failure.found}, allowed {failure.allowed} → {failure.cure}" for failure in rejected.failures
    ]
    first = (
        f"{rejected.gpu}x{rejected.layout.gpus}",
        str(rejected.layout),
        show_bytes(rejected.memory.total_bytes) if rejected.memory else "",
        f"{rejected.speed.tokens_per_s_each:g}" if rejected.speed else "",
        (why or [rejected.reason])[0],
    )
    return [first, *(("", "", "", "", line) for line in why[1:])]
