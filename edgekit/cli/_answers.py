"""The parts that `run` and `chat` share: options of an answer, ctrl-C, and the statistics below an answer."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import click
from pydantic import Field

import edgekit
from edgekit.cli._options import SomeFields, adapter_of
from edgekit.cli._progress import announce
from edgekit.common.base import Frozen
from edgekit.common.files import check_output
from edgekit.common.footprint import footprint
from edgekit.common.options import Option
from edgekit.common.parsing import read_text
from edgekit.common.units import show_bytes
from edgekit.contracts.native_loop import LoopStream
from edgekit.contracts.plan import Plan
from edgekit.runtime.generation.sampling import Sampling
from edgekit.runtime.generation.stopping import Stopping
from edgekit.runtime.memory.report import MemoryReport, show
from edgekit.runtime.metrics import Timings
from edgekit.runtime.open_options import OpenOptions
from edgekit.runtime.options import GenerationParams
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.speculation.speculation import SpeculationReport
from edgekit.runtime.stream import Stream
from edgekit.runtime.text_assembler import Piece

_MAX_GRAMMAR_BYTES = 1 << 20
# What people set in a terminal; Python, the server and the line `/set` of a chat have every field.
SAMPLING = SomeFields(Sampling, ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"))
STOPPING = SomeFields(Stopping, ("max_tokens", "stop"))
_SLOW_S = 1.5
_LONGEST_PERIOD, _LEAST_REPEATED, _REPEATS = 120, 240, 6


class Answering(Frozen):
    """The options of an answer besides sampling and stopping."""

    system: str | None = Field(default=None, description="A system message before the conversation.")
    schema_: Annotated[Path | None, Option(name="schema")] = Field(
        default=None, description="A file with a JSON schema that the answer must follow."
    )
    regex: str | None = Field(default=None, description="A regular expression that the answer must match.")
    grammar: Path | None = Field(
        default=None, description="A file with a grammar (Lark or GBNF) that the answer must follow."
    )
    prefixes: Path | None = Field(
        default=None, description="A file that keeps computed prefixes for the next start; created if missing."
    )
    adapters: Annotated[tuple[str, ...], Option(name="adapter", metavar="NAME[=PATH]")] = Field(
        default=(),
        description="A LoRA adapter to load: a PEFT folder, or one sealed in the artifact. Answers use the first; a"
        " batch line may name any.",
    )


def generation_options(answering: Answering, sampling: Sampling, stopping: Stopping) -> dict[str, Any]:
    """Return the given options of `generate`, `chat` and `stream`, validated before a model is opened."""
    given = {**sampling.model_dump(exclude_unset=True), **stopping.model_dump(exclude_unset=True)}
    if answering.regex is not None:
        given["regex"] = answering.regex
    if answering.adapters:
        given["adapter"] = adapter_of(answering.adapters[0])[0]
    for name, path in (("schema", answering.schema_), ("grammar", answering.grammar)):
        if path is not None:
            given[name] = read_text(path, _MAX_GRAMMAR_BYTES)
    GenerationParams.parse(given)
    return given


@contextmanager
def interruptible(stream: Stream | LoopStream) -> Iterator[list[int]]:
    """Stop the answer on ctrl-C and keep its text; a second ctrl-C ends the program. Yields the caught signals."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        stream.cancel_soon()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)


def show_metrics(runtime: Runtime, seconds: float) -> str:
    """Format time, tokens and memory of all requests together."""
    metrics, speculation = runtime.metrics(), runtime.speculation()
    rate = metrics.tokens / seconds if seconds > 0 else 0.0
    ended = ", ".join(f"{count} {reason}" for reason, count in sorted(metrics.finished.items()))
    return "\n".join(
        (
            f"requests  {metrics.requests} in {seconds:.3g} s: {ended}",
            f"tokens    {metrics.prompt_tokens} read, {metrics.cached_tokens} of them from cache; "
            f"{metrics.tokens} written, {rate:.3g} tokens/s together",
            f"time      waiting {metrics.queue_s:.3g} s, reading {metrics.prefill_s:.3g} s, writing "
            f"{metrics.decode_s:.3g} s, summed over requests; of the scheduler itself {metrics.host_s:.3g} s",
            f"prefixes  {metrics.prefix_hits} of {metrics.prefix_queries} prompts began as one before; "
            f"{show_bytes(metrics.prefix_bytes)} kept",
            *(show(runtime.memory()) if runtime.artifact else ()),
            *(_show_speculation(metrics.model_dump(), speculation.model_dump()) if speculation else ()),
        )
    )


@contextmanager
def opened(artifact: Path, options: OpenOptions, answering: Answering) -> Iterator[Runtime]:
    """Open an artifact with its adapters and the prefixes of a file, which are saved after the block; print notes.

    A terminal is told where that takes seconds.
    """
    telling = threading.Timer(_SLOW_S, announce, [f"opening {artifact}"])
    if sys.stderr.isatty():
        telling.start()
    try:
        runtime = edgekit.open(artifact, options)
    finally:
        telling.cancel()
    with runtime:
        for note in runtime.notes:
            click.echo(f"note: {note}", err=True)
        check_output(answering.prefixes)
        if answering.prefixes is not None and answering.prefixes.exists():
            runtime.load_prefixes(answering.prefixes)
        for each in answering.adapters:
            runtime.load_adapter(*adapter_of(each))
        yield runtime
        if answering.prefixes is not None:
            runtime.save_prefixes(answering.prefixes)


def write(text: str) -> None:
    """Write to stdout and flush; characters that its encoding lacks are replaced."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def statistics(runtime: Runtime, timings: Timings, opened_s: float | None = None) -> dict[str, Any]:
    """Collect an answer's seconds, tokens per second and bytes, each predicted and measured."""
    if runtime.artifact is None:
        return figures_of(None, timings, opened_s, runtime.speculation())
    return figures_of(runtime.artifact.plan, timings, opened_s, runtime.speculation(), runtime.memory())


def figures_of(
    plan: Plan | None,
    timings: Timings,
    opened_s: float | None,
    speculation: SpeculationReport | None = None,
    memory: MemoryReport | None = None,
) -> dict[str, Any]:
    """Put the figures of one answer together; None: unknown."""
    measured = footprint()
    # The prediction counts the open draft, which may differ from the plan's.
    draft_bytes = (speculation.draft_bytes if speculation else 0) - (plan.estimate.draft_bytes if plan else 0)
    return {
        "open_s": opened_s,
        "prompt_tokens": timings.prompt_tokens,
        "cached_tokens": timings.cached_tokens,
        "tokens": timings.tokens,
        "first_token_s": timings.first_token_s,
        "prefill_tokens_per_s": timings.prefill_tokens_per_s,
        "decode_tokens_per_s": timings.decode_tokens_per_s,
        "total_s": timings.total_s,
        "proposed": timings.proposed,
        "accepted": timings.accepted,
        "predicted_for": plan.device if plan else None,
        "predicted_total_bytes": plan.estimate.total_bytes + draft_bytes if plan else None,
        "predicted_private_bytes": plan.estimate.private_bytes if plan else None,
        "predicted_decode_tokens_per_s": plan.speed.decode_tokens_per_s if plan else None,
        "speculation": speculation.model_dump() if speculation else None,
        "memory": memory.model_dump(mode="json") if memory else None,
        **measured.model_dump(),
    }


def show_statistics(figures: dict[str, Any]) -> str:
    """Format the statistics of one answer."""

    def figure(name: str, unit: str) -> str:
        value = figures[name]
        return "not known" if value is None else f"{value:{',.0f' if value >= 1000 else '.3g'}} {unit}"

    def size(name: str) -> str:
        return "not known" if figures[name] is None else show_bytes(figures[name])

    predicted = "predicted" if figures["predicted_for"] is None else f"predicted for {figures['predicted_for']}:"
    # The table has the private bytes of this opening, with prefixes and workers, instead of the planned ones.
    private = "" if figures["memory"] else f", of it private {size('predicted_private_bytes')}"
    known = f", {figures['cached_tokens']} of them from cache" if figures["cached_tokens"] else ""
    lines = [
        f"time      first token {figure('first_token_s', 's')}, all {figure('total_s', 's')}"
        + (f", opening {figure('open_s', 's')}" if figures["open_s"] is not None else ""),
        f"prefill   {figures['prompt_tokens']} tokens{known}, {figure('prefill_tokens_per_s', 'tokens/s')}",
        f"decode    {figures['tokens']} tokens, {figure('decode_tokens_per_s', 'tokens/s')} "
        f"({predicted} {figure('predicted_decode_tokens_per_s', 'tokens/s')})",
        f"memory    {predicted} {size('predicted_total_bytes')}{private}; "
        f"measured RSS {size('rss_bytes')}, PSS {size('pss_bytes')}, RssAnon {size('anonymous_bytes')}, "
        f"peak RSS {size('peak_rss_bytes')}",
    ]
    if figures["memory"]:
        lines += show(MemoryReport.model_validate_json(json.dumps(figures["memory"])))
    if figures["speculation"]:
        lines += _show_speculation(figures, figures["speculation"])
    return "\n".join(lines)


def _show_speculation(figures: dict[str, Any], drafting: dict[str, Any]) -> list[str]:
    """Format drafting: on or off with the reason, speed-up, and acceptance rate by position."""

    def times(name: str) -> str:
        return "not known" if drafting[name] is None else f"{drafting[name]:.2f}"

    steps = "" if drafting["tokens_per_step"] is None else f", {drafting['tokens_per_step']:.2f} tokens a step"
    memory = f", {show_bytes(drafting['draft_bytes'])} predicted for the draft" if drafting["draft_bytes"] else ""
    lines = [
        f"drafting  {'on' if drafting['is_on'] else 'off'}: {drafting['reason']}",
        f"          {figures['accepted']} of {figures['proposed']} proposed tokens accepted{steps}; speed-up estimated "
        f"{times('estimated_speed_up')}, measured {times('measured_speed_up')}{memory}",
    ]
    lines += [
        f"          {kind['name']}: accepted by position {' '.join(f'{rate:.2f}' for rate in kind['acceptance'])}"
        for kind in drafting["proposals"]
        if kind["acceptance"]
    ]
    return lines


def why_cut(tokens: int, limit: int | None) -> str:
    """Say which limit cut an answer of so many tokens."""
    is_full = limit is None or tokens < limit
    return "cut: the context is full (--context)" if is_full else f"cut: --max-tokens {limit} is reached"


class Repetition:
    """Stops an answer that repeats itself."""

    def __init__(self, stream: Stream) -> None:
        self.text, self.is_found = "", False
        self._stream = stream

    def adds(self, piece: Piece) -> bool:
        """Add a piece to the text, and return True; return False after a repetition."""
        if self.is_found:
            return False
        self.text += piece.text
        if piece.timings is None and is_repeating(self.text):
            self.is_found = True
            self._stream.cancel_soon()
        return True


def is_repeating(text: str) -> bool:
    """Return whether `text` ends with the same words 6 times or more, over at least 240 characters."""
    if len(text) < _LEAST_REPEATED:
        return False
    for period in range(1, _LONGEST_PERIOD + 1):
        times = max(_REPEATS, -(-_LEAST_REPEATED // period))
        if text.endswith(text[-period:] * times):
            return True
    return False
