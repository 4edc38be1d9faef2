"""`edgekit.open`: from a sealed artifact and what was asked for to a runtime that is ready.

It knows no engine by name: the artifact's plan says which target opens it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgekit import plugins
from edgekit.artifact import open_artifact
from edgekit.cache import CachePolicy, Storage, hold
from edgekit.errors import DoesNotFit, InvalidInput, TargetMissing, Unsupported, clip
from edgekit.heap import return_unused
from edgekit.runtime.admission import FEWEST_TOKENS, Allowed, OnPressure, Opening, admit, estimate_of
from edgekit.runtime.drafting import Source
from edgekit.runtime.drafting.opening import check_asked, drafting_bytes, drafts, open_speculation
from edgekit.runtime.footprint import footprint, free_memory, mapped_data_bytes
from edgekit.runtime.ledger import Ledger
from edgekit.runtime.memory_report import Contract
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.template import read_template
from edgekit.runtime.text import read_codec, read_eos
from edgekit.units import parse_bytes, show_bytes

if TYPE_CHECKING:
    from edgekit.plan import Plan

MOST_SEQUENCES = 256


def open_runtime(
    path: str | Path,
    *,
    context: int | None = None,
    window: int | None = None,
    sinks: int = 0,
    exact: bool = False,
    draft: str | Path | None = None,
    drafting: Source | None = None,
    sequences: int | None = None,
    prefixes: int | str | None = None,
    memory: int | str | None = None,
    kv_bits: int | None = None,
    on_pressure: OnPressure = "degrade",
    warm_template: bool = False,
) -> Runtime:
    """Open a sealed artifact for use; close the runtime, or use it in a `with` block.

    `context` keeps at most that many tokens; `window` instead keeps the first `sinks` and the newest tokens, without
    an end. Neither: as planned. `exact`: the text never depends on chunking or drafting, not even at rounding ties;
    refused where the engine cannot promise it. `warm_template` starts the chat template's process while the model
    loads, for callers who know that they will chat.

    `draft` proposes tokens that the model then verifies, so that the text stays the same and may come sooner: the path
    of a smaller artifact with the same vocabulary, `ngram`, `early-exit`, `auto` or `off`. One that does not match is
    refused; where drafting does not pay it stays quiet. `drafting` is a source of drafters of your own.

    `sequences` advance together; without it, as many as planned. `prefixes` (bytes, or as `64MiB`) is how much of what
    was computed for prompts may stay for those that begin alike; without it, what the plan's budget leaves free, up to
    what the states themselves take.

    `memory` (bytes, or as `1.5GiB`) bounds the private memory of this process; what the machine has free bounds it in
    any case. Where the prediction is above, `on_pressure` says what happens: `degrade` drops prefixes, then takes fewer
    bits for the cache, then a window, then a smaller context, and `Runtime.memory()` tells what was given up; `refuse`
    refuses at once. Both refuse with the numbers where nothing fits. `kv_bits` is how many a key or value has.
    """
    budget = _bytes(memory, "memory")
    if on_pressure not in ("degrade", "refuse"):
        raise InvalidInput(f"on_pressure: must be degrade or refuse, found {clip(on_pressure)}")
    if draft is not None and drafting is not None:
        raise InvalidInput("draft and drafting exclude each other; give one")
    if draft is not None:
        check_asked(draft)
    artifact = open_artifact(path)
    plan = artifact.plan
    if sequences is not None:
        if type(sequences) is not int or not 1 <= sequences <= MOST_SEQUENCES:
            raise InvalidInput(f"sequences: must be 1 to {MOST_SEQUENCES}, found {clip(sequences)}")
        plan = plan.model_copy(update={"sequences": sequences})
    policy, storage = hold(plan.cache, plan.storage, context, window, sinks)
    if kv_bits is not None:
        if type(kv_bits) is not int or not 1 <= kv_bits <= 32:
            raise InvalidInput(f"kv_bits: must be a number of bits from 1 to 32, found {clip(kv_bits)}")
        storage = storage.model_copy(update={"kv_bits": kv_bits})
    target = plugins.load_target(plan.target)
    missing = target.missing()
    if missing is not None:
        raise TargetMissing(f"{plan.target}: {missing}")
    codec, template = read_codec(artifact.folder), read_template(artifact.folder)
    if warm_template and template.exists:
        template.warm()
    allowed = _allowed(plan, budget)
    before, mapped_before = footprint(), mapped_data_bytes()
    try:
        _check_floor(plan, storage, allowed)
        engine = target.open(plan, artifact.folder, exact=exact)
    except BaseException:
        template.close()
        raise
    try:
        if exact and engine.abilities.exact == "never":
            raise Unsupported(f"exact: {plan.target} cannot promise exact answers here; open it without")
        if storage.kv_bits not in engine.abilities.kv_bits:
            known = ", ".join(map(str, engine.abilities.kv_bits))
            planned = "; the width is chosen by export's --kv-bits" if len(engine.abilities.kv_bits) == 1 else ""
            raise Unsupported(
                f"kv_bits: {plan.target} cannot hold {storage.kv_bits} bits here; it can hold {known}{planned}"
            )
        at_once = max(1, min(plan.sequences, engine.abilities.max_states))
        wanted = Opening(
            storage=storage,
            policy=policy,
            sequences=at_once,
            prefix_bytes=_prefix_bytes(prefixes, plan, engine.state_bytes(storage)) if engine.abilities.can_save else 0,
            draft_bytes=drafting_bytes(draft, storage.capacity_tokens, at_once),
            drafts=drafts(draft),
        )
        admitted = admit(
            plan,
            wanted,
            allowed,
            kv_bits=engine.abilities.kv_bits,
            can_evict=engine.abilities.can_evict,
            on_pressure=on_pressure,
            state_bytes=engine.state_bytes,
        )
        policy, storage = admitted.opening.policy, admitted.opening.storage
        engine.start(storage).close()  # what an engine makes ready for such states, it makes now
        return_unused()
        loaded = footprint()
        drafted = None
        if draft is not None:
            drafting = open_speculation(draft, engine, artifact, codec, policy=policy, storage=storage, exact=exact)
            drafted = footprint()
        return Runtime(
            engine,
            codec,
            storage=storage,
            policy=policy,
            sequences=plan.sequences,
            chunk_tokens=plan.chunk_tokens,
            eos=read_eos(artifact.folder, plan.model.eos_ids),
            template=template,
            drafting=drafting,
            artifact=artifact,
            ledger=Ledger(admitted.shared_bytes),
            prefix_bytes=admitted.opening.prefix_bytes,
            contract=Contract(admitted, before, loaded, mapped_before, drafted),
        )
    except BaseException:
        if drafting is not None:
            drafting.close()
        engine.close()
        template.close()
        raise


def _bytes(asked: int | str | None, name: str) -> int | None:
    """A size as it was given: a number, or a text such as `1.5GiB`."""
    found = parse_bytes(asked, name) if isinstance(asked, str) else asked
    if found is not None and (type(found) is not int or found < 1):
        raise InvalidInput(f"{name}: must be a positive number of bytes or a text such as 1.5GiB, found {clip(asked)}")
    return found


def _allowed(plan: Plan, budget_bytes: int | None) -> Allowed:
    """The least of what was given and what this process has and may still take; without either, the plan's budget."""
    found = []
    if budget_bytes is not None:
        found.append(Allowed(budget_bytes, "memory, as given"))
    free, own = free_memory(), footprint().private_bytes
    if free is not None:
        found.append(Allowed(free.bytes + (own or 0), f"free here, {free.source}, and what this process has"))
    return min(found, default=Allowed(plan.budget_bytes, "the plan's budget"))


def _check_floor(plan: Plan, storage: Storage, allowed: Allowed) -> None:
    """Refuse before anything is loaded where not even the smallest cache would fit."""
    tokens = min(FEWEST_TOKENS, storage.capacity_tokens)
    smallest = Opening(
        storage=storage.model_copy(update={"capacity_tokens": tokens}), policy=CachePolicy(), sequences=1
    )
    needed = estimate_of(plan, smallest).private_bytes
    if needed > allowed.bytes:
        raise DoesNotFit(
            f"{show_bytes(needed)} of private memory are needed with {tokens} tokens of context, and "
            f"{show_bytes(allowed.bytes)} are allowed ({allowed.why}); give more memory, or a smaller model or recipe"
        )


def _prefix_bytes(asked: int | str | None, plan: Plan, state_bytes: int) -> int:
    """How much prefixes may take."""
    if isinstance(asked, str):
        return parse_bytes(asked, "prefixes")
    if asked is None:
        return max(0, min(plan.budget_bytes - plan.estimate.total_bytes, plan.sequences * state_bytes))
    if type(asked) is not int or asked < 0:
        raise InvalidInput(f"prefixes: must be a number of bytes, found {clip(asked)}")
    return asked
