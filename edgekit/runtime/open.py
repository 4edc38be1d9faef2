"""`edgekit.open`: open a sealed artifact with the target that its plan names, within the memory that is free."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edgekit.artifact.artifact import Artifact
from edgekit.artifact.gguf_file import open_file
from edgekit.common.cores import check_threads, usable_cores
from edgekit.common.footprint import mapped_data_bytes, private_bytes_now, return_unused
from edgekit.common.free_memory import free_memory
from edgekit.common.log import log
from edgekit.common.units import show_bytes
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy, apply_limits
from edgekit.contracts.memory import total
from edgekit.errors import DoesNotFit, InvalidInput, Unsupported, quote_short
from edgekit.planner.gpu_layers import most_layers
from edgekit.planner.memory import load_of
from edgekit.plugins import SIGNATURES, load_own
from edgekit.runtime.generation.chat_template import read_template
from edgekit.runtime.generation.tokenizer import read_codec, read_eos
from edgekit.runtime.guard import CrashGuard
from edgekit.runtime.memory.admission import (
    FEWEST_TOKENS,
    AdmittedConfig,
    MemoryLimit,
    RunConfig,
    admit,
    class_lines,
    estimate_of,
)
from edgekit.runtime.memory.budget import MemoryBudget
from edgekit.runtime.memory.report import MemoryBaseline
from edgekit.runtime.open_options import OpenOptions, by_keyword
from edgekit.runtime.request import check_cache
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.speculation.open import check_draft, drafting_bytes, drafts, drafts_with_head, open_speculation

if TYPE_CHECKING:
    from edgekit.contracts.engine import Engine
    from edgekit.contracts.plan import Estimate, Plan
    from edgekit.contracts.target import Target

_TEXTS_TOGETHER = 64  # texts in one batch of an encoder, which has no cache to share


@by_keyword(OpenOptions)
def open_runtime(path: str | Path, options: OpenOptions) -> Runtime:
    """Open a sealed artifact; close the runtime, or use it in a `with` block.

    Args:
        path: the artifact's folder.
        options: `OpenOptions`, as one object or by keyword. The free memory of the machine is a limit in any case.
            Where the prediction does not fit, `on_pressure="degrade"` opens less (`Runtime.notes` says so) and
            `"refuse"` raises DoesNotFit, as both do where nothing fits. Without `exact`, texts may differ where the two
            best tokens are nearly tied. Without `prefixes`, the prefix cache takes what the plan's budget leaves free,
            at most the size of the caches of all requests.
    """
    guard = CrashGuard(options.guard, path) if options.guard is not None else None
    if guard is not None:
        path, options = guard.narrowed(options)
        guard.begin()
    if options.draft is not None and options.drafting is not None:
        raise InvalidInput("draft and drafting exclude each other; give one")
    if options.draft is not None:
        check_draft(options.draft)
    artifact = open_file(path, options.context)
    if options.require_signature is not None:
        load_own(SIGNATURES)(artifact, options.require_signature)
    plan, policy, kv_config = _configured(artifact.plan, options)
    if options.target not in (None, plan.target):
        raise InvalidInput(f"target {options.target}: {path} is an artifact for {plan.target}; leave it out")
    target = artifact.working_target()
    plan = _on_gpu(_within_cores(plan), target, options.gpu_layers)
    with ExitStack() as undo:  # what a failure closes
        codec, template = read_codec(artifact.folder), read_template(artifact.folder)
        undo.callback(template.close)
        return_unused()  # parsing a large tokenizer leaves more unused heap than the tokenizer takes
        if options.warm_template and template.exists:
            template.warm()
        limit = _memory_limit(plan, options.memory)
        before, mapped_before = private_bytes_now(), mapped_data_bytes()
        planned, plan = plan, target.adapt(plan)
        _check_smallest(plan, kv_config, limit, target)
        check_threads(plan.threads)
        engine = target.open(
            planned.model_copy(update={"cache": policy}), artifact.weights or artifact.folder, exact=options.exact
        )
        undo.callback(engine.close)
        plan = _with_capabilities(plan, engine)
        admitted = _admitted(plan, target, engine, policy, kv_config, limit, options)
        policy, kv_config = admitted.config.policy, admitted.config.kv_config
        engine.start(kv_config).close()  # allocate the engine's buffers for such states now, not at the first request
        return_unused()
        drafting, loaded, with_draft = options.drafting, private_bytes_now(), None
        if options.draft is not None:
            drafting = open_speculation(
                options.draft, engine, artifact, codec, policy=policy, kv_config=kv_config, exact=options.exact
            )
            with_draft = private_bytes_now()
        if drafting is not None:
            undo.callback(drafting.close)
        _log_opening(artifact, admitted, limit, engine)
        runtime = Runtime(
            engine,
            codec,
            kv_config=kv_config,
            policy=policy,
            sequences=plan.sequences,
            chunk_tokens=plan.chunk_tokens,
            eos=read_eos(artifact.folder, plan.model.eos_ids),
            template=template,
            drafting=drafting,
            artifact=artifact,
            budget=MemoryBudget(admitted.shared_bytes),
            prefix_bytes=admitted.config.prefix_bytes,
            baseline=MemoryBaseline(admitted, before, loaded, mapped_before, with_draft),
            guard=guard,
        )
        if guard is not None:
            guard.opened()
        undo.pop_all()
    return runtime


def _with_capabilities(plan: Plan, engine: Engine) -> Plan:
    """Return the plan with the weights that its engine copied, and limit the engine's cache widths to the plan's."""
    capabilities = engine.capabilities = engine.capabilities.model_copy(
        update={"kv_bits": plan.offered_kv_bits(engine.capabilities.kv_bits)}
    )
    facts = plan.memory.model_copy(update={"copied_share": capabilities.copied_share})
    return plan.model_copy(update={"memory": facts})


def _admitted(
    plan: Plan,
    target: Target,
    engine: Engine,
    policy: KVEvictionPolicy,
    kv_config: KVCacheConfig,
    limit: MemoryLimit,
    options: OpenOptions,
) -> AdmittedConfig:
    """Return the configuration that fits and that the engine can run. Raises `Unsupported` or `DoesNotFit`."""
    capabilities = engine.capabilities
    if options.exact and capabilities.exact == "never":
        raise Unsupported(f"exact: {plan.target} cannot give exact answers with this artifact; open it without `exact`")
    check_cache(policy, capabilities, kv_config.kv_bits)
    running = max(1, min(plan.sequences, capabilities.max_states))
    saved = engine.state_bytes(kv_config) if capabilities.can_save else None
    requested = _run_config(plan, policy, kv_config, options, running, saved)
    try:
        return admit(
            partial(estimate_of, plan, memory=target.memory, state_bytes=engine.state_bytes),
            requested,
            limit,
            kv_bits=policy.widths(capabilities.kv_bits),
            can_evict=capabilities.can_evict,
            on_pressure=options.on_pressure,
        )
    except DoesNotFit as error:
        why = engine.notes if capabilities.copied_share else ()
        raise DoesNotFit("; ".join([str(error), *why]), error.table) from None


def _run_config(
    plan: Plan,
    policy: KVEvictionPolicy,
    kv_config: KVCacheConfig,
    options: OpenOptions,
    sequences: int,
    state_bytes: int | None,
) -> RunConfig:
    """Return the configuration that the options ask for. `state_bytes`: of one sequence; None: it cannot be saved."""
    return RunConfig(
        kv_config=kv_config,
        policy=policy,
        sequences=sequences,
        prefix_bytes=_prefix_bytes(options.prefixes, plan, state_bytes) if state_bytes is not None else 0,
        draft_bytes=drafting_bytes(options.draft, kv_config.capacity_tokens, sequences, plan),
        drafts=drafts(options.draft),
        head=drafts_with_head(options.draft, plan),
        exact=options.exact,
    )


def _log_opening(artifact: Artifact, admitted: AdmittedConfig, limit: MemoryLimit, engine: Engine) -> None:
    target = artifact.plan.target
    log.info(
        "opened %s with %s: %s, predicted %s of %s allowed (%s)",
        artifact.folder.name,
        target,
        admitted.config.summary,
        show_bytes(admitted.estimate.private_bytes),
        show_bytes(limit.bytes),
        limit.source,
    )
    for step in admitted.ladder:
        log.warning("memory was short: %s, which saved %s", step.change, show_bytes(step.saved_bytes))
    for note in engine.notes:
        log.info("%s: %s", target, note)


class PredictedOpening(NamedTuple):
    """The configuration that an opening asks for, and its predicted memory."""

    artifact: Artifact
    config: RunConfig
    estimate: Estimate


@by_keyword(OpenOptions)
def predict_opening(path: str | Path, options: OpenOptions) -> PredictedOpening:
    """Predict the memory that `open_runtime` needs with the same options, without loading anything."""
    artifact = open_file(path, options.context)
    plan, policy, kv_config = _configured(artifact.plan, options)
    if options.gpu_layers is not None:
        plan = plan.model_copy(update={"gpu_layers": options.gpu_layers})
    target = artifact.target()
    plan, tokens, memory = target.adapt(plan), kv_config.capacity_tokens, target.memory
    load = load_of(plan)._replace(held_tokens=tokens, kv_bits=kv_config.kv_bits, sequences=1)
    state = total(memory(load), "kv_bytes")
    config = _run_config(plan, policy, kv_config, options, plan.sequences, state)
    return PredictedOpening(artifact, config, estimate_of(plan, config, memory))


def _configured(plan: Plan, options: OpenOptions) -> tuple[Plan, KVEvictionPolicy, KVCacheConfig]:
    """Apply the options of an opening to its plan."""
    if options.sequences is not None:
        plan = plan.model_copy(update={"sequences": options.sequences})
    elif plan.model.encoder:
        plan = plan.model_copy(update={"sequences": _TEXTS_TOGETHER})
    policy, kv_config = apply_limits(
        plan.cache, plan.storage, options.context, options.window, options.sinks, options.keep
    )
    if options.kv_bits is not None:
        if not plan.offered_kv_bits([options.kv_bits]):
            raise Unsupported(f"kv_bits: {plan.kv_note(options.kv_bits)}")
        kv_config = kv_config.model_copy(update={"kv_bits": options.kv_bits})
    return plan, policy, kv_config


def _within_cores(plan: Plan) -> Plan:
    """Return the plan with at most the threads that this machine runs at once: a plan counts its device's cores."""
    cores = usable_cores()
    if plan.threads <= cores.number:
        return plan
    log.info("computing with %d threads where %d were planned: %s", cores.number, plan.threads, cores.source)
    return plan.model_copy(update={"threads": cores.number})


def _memory_limit(plan: Plan, memory: int | str | None) -> MemoryLimit:
    """Return the lower of `memory` and the memory that the OS has free; without both, the plan's budget."""
    limits = []
    if memory is not None:
        limits.append(MemoryLimit(int(memory), "memory, as given"))
    free = free_memory()
    if free is not None:
        source = f"free on this machine, {free.source}, and what this process has"
        limits.append(MemoryLimit(free.bytes + private_bytes_now(), source))
    return min(limits, default=MemoryLimit(plan.budget_bytes, "the plan's budget"))


def _check_smallest(plan: Plan, kv_config: KVCacheConfig, limit: MemoryLimit, target: Target) -> None:
    """Raise `DoesNotFit` before anything is loaded if not even the smallest cache would fit."""
    tokens = min(FEWEST_TOKENS, kv_config.capacity_tokens)
    smallest = RunConfig(
        kv_config=kv_config.model_copy(update={"capacity_tokens": tokens}), policy=KVEvictionPolicy(), sequences=1
    )
    estimate = estimate_of(plan, smallest, target.memory)
    needed = show_bytes(estimate.private_bytes)
    if estimate.private_bytes > limit.bytes:
        raise DoesNotFit(
            f"{needed} of private memory are needed with {tokens} tokens of context, and "
            f"{show_bytes(limit.bytes)} are allowed ({limit.source}); give more memory, or a smaller model or recipe",
            table="\n".join([*class_lines(estimate), f"the smallest ({smallest.summary}): {needed}"]),
        )


def _prefix_bytes(prefixes: int | str | None, plan: Plan, state_bytes: int) -> int:
    """Return the size of the prefix cache; the default is documented at `open_runtime`."""
    if prefixes is None:
        return max(0, min(plan.budget_bytes - plan.estimate.total_bytes, plan.sequences * state_bytes))
    return int(prefixes)


def _on_gpu(plan: Plan, target: Target, gpu_layers: int | None) -> Plan:
    """Return the plan with the requested layers on the GPU; refuse a number that this machine cannot run."""
    if gpu_layers is None:
        return plan
    if gpu_layers > most_layers(plan.model):
        most = f"0 to {most_layers(plan.model)}, all layers and the head"
        raise InvalidInput(f"gpu_layers: must be {most}, found {quote_short(gpu_layers)}")
    if plan.gpu_layers is None:
        raise Unsupported(f"gpu_layers: {plan.target} does not divide layers with this artifact; open it without")
    asked = plan.model_copy(update={"gpu_layers": gpu_layers})
    if target.adapt(asked).gpu_layers != gpu_layers:
        raise Unsupported(
            f"gpu_layers: {plan.target}'s library knows no GPU on this machine (edgekit doctor lists its devices); "
            "give 0, or a library built for one"
        )
    return asked
