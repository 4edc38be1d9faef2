"""`edgekit.open`: open a sealed artifact with the target that its plan names, within the memory that is free."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edgekit.artifact.artifact import Artifact, open_artifact
from edgekit.common.cores import usable_cores
from edgekit.common.footprint import mapped_data_bytes, private_bytes_now
from edgekit.common.free_memory import free_memory
from edgekit.common.log import log
from edgekit.common.malloc import return_unused
from edgekit.common.units import parse_bytes, show_bytes
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy, apply_limits
from edgekit.errors import DoesNotFit, InvalidInput, Unsupported, quote_short
from edgekit.planner.gpu_layers import most_layers
from edgekit.planner.memory import cache_bytes
from edgekit.plugins import SIGNATURES, load_own
from edgekit.runtime.generation.chat_template import read_template
from edgekit.runtime.generation.tokenizer import read_codec, read_eos
from edgekit.runtime.guard import CrashGuard, OpeningOptions
from edgekit.runtime.memory.admission import FEWEST_TOKENS, MemoryLimit, OnPressure, RunConfig, admit, estimate_of
from edgekit.runtime.memory.budget import MemoryBudget
from edgekit.runtime.memory.report import MemoryBaseline
from edgekit.runtime.request import check_window
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.speculation.drafters import DrafterFactory
from edgekit.runtime.speculation.open import check_draft, drafting_bytes, drafts, drafts_with_head, open_speculation

if TYPE_CHECKING:
    from edgekit.contracts.plan import Estimate, Plan
    from edgekit.contracts.target import Target

MOST_SEQUENCES = 256
_TEXTS_TOGETHER = 64  # texts in one batch of an encoder, which has no cache to share


def open_runtime(
    path: str | Path,
    *,
    context: int | None = None,
    window: int | None = None,
    sinks: int = 0,
    keep: str | None = None,
    exact: bool = False,
    draft: str | Path | None = None,
    drafting: DrafterFactory | None = None,
    sequences: int | None = None,
    prefixes: int | str | None = None,
    memory: int | str | None = None,
    kv_bits: int | None = None,
    gpu_layers: int | None = None,
    on_pressure: OnPressure = "degrade",
    warm_template: bool = False,
    require_signature: str | Path | None = None,
    guard: str | Path | None = None,
) -> Runtime:
    """Open a sealed artifact; close the runtime, or use it in a `with` block.

    Args:
        path: the artifact's folder.
        context: the most tokens that a request keeps. None: as planned.
        window: keep only the first `sinks` and the newest tokens, this many in all, so that a text can be endless.
        keep: what a window keeps in addition to the sinks. `newest` (None): the newest tokens; `scored`: the newest
            half, and the older ones whose values score highest; or the name of a scorer (`docs/memory.md`).
        exact: make the text independent of batching, chunking and drafting bit for bit, or refuse. Without it, texts
            may differ where the two best tokens are nearly tied.
        draft: propose tokens that the model verifies, which can make the same text faster: the path of a smaller
            artifact with the same vocabulary, `ngram`, `early-exit`, `head`, `auto` or `off`.
        drafting: a `DrafterFactory` of your own, instead of `draft`.
        sequences: requests that run together. None: as planned.
        prefixes: the size of the prefix cache, as bytes or a text such as `64MiB`. None: what the plan's budget leaves
            free, at most the size of the states.
        memory: the most private memory of this process, as bytes or a text such as `1.5GiB`. The machine's free memory
            is a limit in any case.
        kv_bits: bits of a key or value in the cache. None: as planned.
        gpu_layers: layers on the GPU, the model's head as one; 0: none. None: as planned, or none where the library of
            the target knows no GPU here (`Runtime.notes` says so); a number that it cannot run is refused.
        on_pressure: `degrade` gives up prefixes, then bits of the cache, then context until the prediction fits
            (`Runtime.notes` says so); `refuse` raises instead. Both raise DoesNotFit where nothing fits.
        warm_template: start the chat template's process while the model loads.
        require_signature: a public key or a certificate of an authority in PEM, or a folder of them; the artifact must
            be signed with one (`edgekit sign`), or `UntrustedSignature` is raised. Needs the extra `sign`.
        guard: a file of the app in which openings and first tokens are noted. After two starts in a row that died, the
            third opens a smaller setting (`Runtime.notes` says so): less context and no prefixes, in the end the former
            artifact of a pull. It stays until the artifact changes or the file is removed.
    """
    watched = CrashGuard(guard, path) if guard is not None else None
    if watched is not None:
        asked = OpeningOptions(path, context, window, sequences, prefixes)
        path, context, window, sequences, prefixes = watched.narrowed(asked)
        watched.begin()
    memory_bytes = _size(memory, "memory")
    if on_pressure not in ("degrade", "refuse"):
        raise InvalidInput(f"on_pressure: must be degrade or refuse, found {quote_short(on_pressure)}")
    if draft is not None and drafting is not None:
        raise InvalidInput("draft and drafting exclude each other; give one")
    if draft is not None:
        check_draft(draft)
    artifact = open_artifact(path)
    if require_signature is not None:
        load_own(SIGNATURES)(artifact, require_signature)
    plan, policy, kv_config = _configured(artifact.plan, context, window, sinks, keep, sequences, kv_bits)
    plan = _within_cores(plan)
    target = artifact.working_target()
    plan = _on_gpu(plan, target, gpu_layers)
    codec, template = read_codec(artifact.folder), read_template(artifact.folder)
    return_unused()  # parsing a large tokenizer leaves more unused heap than the tokenizer takes
    if warm_template and template.exists:
        template.warm()
    limit = _memory_limit(plan, memory_bytes)
    before, mapped_before = private_bytes_now(), mapped_data_bytes()
    try:
        planned, plan = plan, target.adapt(plan)
        _check_smallest(plan, kv_config, limit)
        engine = target.open(planned.model_copy(update={"cache": policy}), artifact.folder, exact=exact)
    except BaseException:
        template.close()
        raise
    try:
        if exact and engine.abilities.exact == "never":
            raise Unsupported(
                f"exact: {plan.target} cannot give exact answers with this artifact; open it without `exact`"
            )
        abilities = engine.abilities = engine.abilities.model_copy(
            update={"kv_bits": plan.offered_kv_bits(engine.abilities.kv_bits)}
        )
        plan = _with_copies(plan, abilities.copied_share)
        if kv_config.kv_bits not in abilities.kv_bits:
            known = ", ".join(map(str, abilities.kv_bits))
            fix = "; export with --kv-bits for another width" if len(abilities.kv_bits) == 1 else ""
            raise Unsupported(
                f"kv_bits: {plan.target} cannot store {kv_config.kv_bits} bits with this artifact; it can store "
                f"{known}{fix}"
            )
        check_window(policy, abilities, kv_config.kv_bits)
        running = max(1, min(plan.sequences, abilities.max_states))
        requested = RunConfig(
            kv_config=kv_config,
            policy=policy,
            sequences=running,
            prefix_bytes=_prefix_bytes(prefixes, plan, engine.state_bytes(kv_config)) if abilities.can_save else 0,
            draft_bytes=drafting_bytes(draft, kv_config.capacity_tokens, running, plan),
            drafts=drafts(draft),
            head=drafts_with_head(draft, plan),
            exact=exact,
        )
        try:
            admitted = admit(
                plan,
                requested,
                limit,
                kv_bits=policy.widths(abilities.kv_bits),
                can_evict=abilities.can_evict,
                on_pressure=on_pressure,
                state_bytes=engine.state_bytes,
            )
        except DoesNotFit as error:
            why = engine.notes if abilities.copied_share else ()
            raise DoesNotFit("; ".join([str(error), *why]), error.table) from None
        policy, kv_config = admitted.config.policy, admitted.config.kv_config
        engine.start(kv_config).close()  # allocate the engine's buffers for such states now, not at the first request
        return_unused()
        loaded, with_draft = private_bytes_now(), None
        if draft is not None:
            drafting = open_speculation(draft, engine, artifact, codec, policy=policy, kv_config=kv_config, exact=exact)
            with_draft = private_bytes_now()
        log.info(
            "opened %s with %s: %s, predicted %s of %s allowed (%s)",
            artifact.folder.name,
            plan.target,
            admitted.config.summary,
            show_bytes(admitted.estimate.private_bytes),
            show_bytes(limit.bytes),
            limit.source,
        )
        for step in admitted.ladder:
            log.warning("memory was short: %s, which saved %s", step.change, show_bytes(step.saved_bytes))
        for note in engine.notes:
            log.info("%s: %s", plan.target, note)
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
            guard=watched,
        )
        if watched is not None:
            watched.opened()
        return runtime
    except BaseException:
        if drafting is not None:
            drafting.close()
        engine.close()
        template.close()
        raise


class PredictedOpening(NamedTuple):
    """The configuration that an opening asks for, and its predicted memory."""

    artifact: Artifact
    config: RunConfig
    estimate: Estimate


def predict_opening(
    path: str | Path,
    *,
    context: int | None = None,
    window: int | None = None,
    sinks: int = 0,
    keep: str | None = None,
    draft: str | Path | None = None,
    sequences: int | None = None,
    prefixes: int | str | None = None,
    kv_bits: int | None = None,
    gpu_layers: int | None = None,
    **_: object,
) -> PredictedOpening:
    """Predict the memory that `open_runtime` needs with the same options, without loading anything."""
    artifact = open_artifact(path)
    plan, policy, kv_config = _configured(artifact.plan, context, window, sinks, keep, sequences, kv_bits)
    if gpu_layers is not None:
        plan = plan.model_copy(update={"gpu_layers": gpu_layers})
    state_bytes = cache_bytes(plan.model, kv_config.capacity_tokens, kv_config.kv_bits, plan.memory)
    config = RunConfig(
        kv_config=kv_config,
        policy=policy,
        sequences=plan.sequences,
        prefix_bytes=_prefix_bytes(prefixes, plan, state_bytes),
        draft_bytes=drafting_bytes(draft, kv_config.capacity_tokens, plan.sequences, plan),
        drafts=drafts(draft),
        head=drafts_with_head(draft, plan),
    )
    return PredictedOpening(artifact, config, estimate_of(plan, config))


def _configured(
    plan: Plan,
    context: int | None,
    window: int | None,
    sinks: int,
    keep: str | None,
    sequences: int | None,
    kv_bits: int | None,
) -> tuple[Plan, KVEvictionPolicy, KVCacheConfig]:
    """Apply the options of an opening to its plan."""
    if sequences is not None:
        if type(sequences) is not int or not 1 <= sequences <= MOST_SEQUENCES:
            raise InvalidInput(f"sequences: must be 1 to {MOST_SEQUENCES}, found {quote_short(sequences)}")
        plan = plan.model_copy(update={"sequences": sequences})
    elif plan.model.encoder:
        plan = plan.model_copy(update={"sequences": _TEXTS_TOGETHER})
    policy, kv_config = apply_limits(plan.cache, plan.storage, context, window, sinks, keep)
    if kv_bits is not None:
        if type(kv_bits) is not int or not 1 <= kv_bits <= 32:
            raise InvalidInput(f"kv_bits: must be a number of bits from 1 to 32, found {quote_short(kv_bits)}")
        if not plan.offered_kv_bits([kv_bits]):
            raise Unsupported(f"kv_bits: {plan.kv_note(kv_bits)}")
        kv_config = kv_config.model_copy(update={"kv_bits": kv_bits})
    return plan, policy, kv_config


def _within_cores(plan: Plan) -> Plan:
    """Return the plan with at most the threads that this machine runs at once: a plan counts its device's cores."""
    cores = usable_cores()
    if plan.threads <= cores.number:
        return plan
    log.info("computing with %d threads where %d were planned: %s", cores.number, plan.threads, cores.source)
    return plan.model_copy(update={"threads": cores.number})


def _size(value: int | str | None, name: str) -> int | None:
    """Return the bytes of a number, or of a text such as `1.5GiB`."""
    size = parse_bytes(value, name) if isinstance(value, str) else value
    if size is not None and (type(size) is not int or size < 1):
        raise InvalidInput(
            f"{name}: must be a positive number of bytes or a text such as 1.5GiB, found {quote_short(value)}"
        )
    return size


def _memory_limit(plan: Plan, memory_bytes: int | None) -> MemoryLimit:
    """Return the lower of `memory_bytes` and the memory that the OS has free; without both, the plan's budget."""
    limits = []
    if memory_bytes is not None:
        limits.append(MemoryLimit(memory_bytes, "memory, as given"))
    free = free_memory()
    if free is not None:
        source = f"free on this machine, {free.source}, and what this process has"
        limits.append(MemoryLimit(free.bytes + private_bytes_now(), source))
    return min(limits, default=MemoryLimit(plan.budget_bytes, "the plan's budget"))


def _check_smallest(plan: Plan, kv_config: KVCacheConfig, limit: MemoryLimit) -> None:
    """Raise `DoesNotFit` before anything is loaded if not even the smallest cache would fit."""
    tokens = min(FEWEST_TOKENS, kv_config.capacity_tokens)
    smallest = RunConfig(
        kv_config=kv_config.model_copy(update={"capacity_tokens": tokens}), policy=KVEvictionPolicy(), sequences=1
    )
    needed = estimate_of(plan, smallest).private_bytes
    if needed > limit.bytes:
        raise DoesNotFit(
            f"{show_bytes(needed)} of private memory are needed with {tokens} tokens of context, and "
            f"{show_bytes(limit.bytes)} are allowed ({limit.source}); give more memory, or a smaller model or recipe"
        )


def _with_copies(plan: Plan, share: float) -> Plan:
    """Return the plan with the weights that an engine copied, because it could not map them."""
    facts = plan.memory.model_copy(update={"private_share": plan.memory.private_share + share})
    return plan.model_copy(update={"memory": facts})


def _prefix_bytes(prefixes: int | str | None, plan: Plan, state_bytes: int) -> int:
    """Return the size of the prefix cache; the default is documented at `open_runtime`."""
    if isinstance(prefixes, str):
        return parse_bytes(prefixes, "prefixes")
    if prefixes is None:
        return max(0, min(plan.budget_bytes - plan.estimate.total_bytes, plan.sequences * state_bytes))
    if type(prefixes) is not int or prefixes < 0:
        raise InvalidInput(f"prefixes: must be a number of bytes, found {quote_short(prefixes)}")
    return prefixes


def _on_gpu(plan: Plan, target: Target, gpu_layers: int | None) -> Plan:
    """Return the plan with the requested layers on the GPU; refuse a number that this machine cannot run."""
    if gpu_layers is None:
        return plan
    if type(gpu_layers) is not int or not 0 <= gpu_layers <= most_layers(plan.model):
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
