"""`edgekit run --native`: one answer by the loop of the native library."""

from __future__ import annotations

import secrets
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

from edgekit.artifact.artifact import read_manifest
from edgekit.cli._answers import figures_of, interruptible, write
from edgekit.cli._one_answer import RunArguments, RunResult, prompt_of
from edgekit.cli._options import given_options
from edgekit.common.bounds import MAX_SEED
from edgekit.common.footprint import footprint
from edgekit.common.free_memory import free_memory
from edgekit.contracts.native_loop import LoopOpener, NativeMemory
from edgekit.contracts.plan import Plan
from edgekit.errors import Unsupported
from edgekit.planner.memory import load_of, predict
from edgekit.plugins import NATIVE_LOOP, load_own, load_target
from edgekit.runtime.generation.chat_template import read_template
from edgekit.runtime.memory.report import MemoryClass, MemoryReport
from edgekit.runtime.metrics import Timings

# Every option that the native loop has; any other is refused.
_KNOWN = frozenset(
    {
        "--native", "--target", "--chat", "--stats", "--json", "--exact", "--draft", "--system", "--temperature",
        "--top-k", "--top-p", "--min-p", "--repetition-penalty", "--seed", "--max-tokens", "--stop",
    }
)  # fmt: skip


def refuse_what_native_lacks(*keywords: str) -> None:
    """Refuse an option of these models that only the Python loop has."""
    given = given_options(*keywords)
    for name in given:
        if name not in _KNOWN:
            raise Unsupported(f"{name}: the native loop does not have it; leave out {name}, or --native")
    draft = given.get("--draft", "off")
    if draft not in ("off", "ngram"):
        raise Unsupported(f"--draft {draft}: the native loop drafts by prompt lookup only; give ngram or off")


def answer_natively(artifact: Path, prompt: str, given: RunArguments) -> RunResult:
    """Answer one prompt, written to stdout while it is generated."""
    began = perf_counter()
    drafts = given.opening.draft == "ngram"
    options = {name: value for name, value in given.generation.items() if value is not None}
    options.setdefault("seed", secrets.randbelow(MAX_SEED))
    plan, before = read_manifest(artifact).plan, footprint().private_bytes
    opening: LoopOpener = load_own(NATIVE_LOOP)
    with closing(opening(artifact, plan.target, exact=given.opening.exact, drafts=drafts)) as loop:
        started = perf_counter()
        with closing(loop.stream(prompt_of(prompt, given, read_template(artifact)), **options)) as stream:
            with interruptible(stream) as caught:
                for text in stream:
                    if not given.choice.json_:
                        write(text)
            answer = stream.answer()
        figures: dict[str, Any] = {}
        if given.choice.stats or given.choice.json_:
            timings = Timings(
                first_token_s=answer.prefill_s,
                total_s=perf_counter() - started,
                prompt_tokens=answer.prompt_tokens,
                cached_tokens=answer.cached_tokens,
                prefill_s=answer.prefill_s,
                tokens=len(answer.tokens),
                decode_s=answer.decode_s,
                proposed=answer.drafted_tokens,
                accepted=answer.accepted_tokens,
            )
            # The library runs one sequence.
            target = load_target(plan.target)
            share = 0.0 if loop.maps_weights else target.copied_share
            facts = plan.memory.model_copy(update={"copied_share": share})
            predicted = predict(load_of(plan)._replace(facts=facts, sequences=1), target.memory)
            plan = plan.model_copy(update={"estimate": predicted})
            figures = figures_of(plan, timings, started - began, memory=_report(plan, before, loop.memory()))
    return RunResult(answer.text, answer.finish_reason, options["seed"], len(answer.tokens), figures, bool(caught))


def _report(plan: Plan, before: int | None, memory: NativeMemory) -> MemoryReport:
    """Compare the loop's memory with the plan's. `before`: private bytes of this process before the opening."""
    predicted = plan.estimate
    runtime = None if before is None or memory.engine is None else before + memory.engine
    rows = (
        ("mapped weights", predicted.mapped_weights_bytes, memory.weights),
        ("runtime and private weights", predicted.runtime_bytes + predicted.private_weights_bytes, runtime),
        ("cache", predicted.kv_bytes, memory.cache_used),
        ("activations", predicted.activation_bytes, memory.activations),
    )
    return MemoryReport(
        classes=tuple(MemoryClass.of(*row) for row in rows),
        predicted=predicted,
        private_bytes=memory.process_private,
        allowed_bytes=None,
        allowed_why="no memory is admitted beforehand",
        formats_bytes=0,
        states_allocated_bytes=memory.cache,
        states_used_bytes=memory.cache_used,
        ladder=(),
        free=free_memory(),
        counters=footprint(),
    )
