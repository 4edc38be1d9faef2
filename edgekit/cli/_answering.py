"""What `run` and `chat` share: options of an answer, how ctrl-C stops one, and the statistics beneath it."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click

from edgekit.errors import InvalidInput
from edgekit.files import check_output
from edgekit.reading import read_bytes
from edgekit.runtime.footprint import footprint
from edgekit.runtime.memory_report import MemoryReport, show
from edgekit.runtime.metrics import Timings
from edgekit.runtime.options import understood
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.stream import Stream
from edgekit.units import show_bytes

Command = TypeVar("Command", bound=Callable[..., Any])

_MAX_GRAMMAR_BYTES = 1 << 20
_FILE = click.Path(path_type=Path, dir_okay=False)

_OPENING = (
    click.option("--context", type=int, help="Keep at most this many tokens; at most what was planned."),
    click.option("--window", type=int, help="Keep only the newest tokens, sinks included, and go on without an end."),
    click.option("--sinks", type=int, default=0, show_default=True, help="First tokens that a window never drops."),
    click.option("--memory", help="Most private memory of this process, e.g. 1.5GiB."),
    click.option("--kv-bits", type=int, help="Bits of a key or value, where the engine can; as planned without it."),
    click.option(
        "--on-pressure",
        type=click.Choice(["degrade", "refuse"]),
        default="degrade",
        show_default=True,
        help="Where memory is short: prefixes, cache bits, window and context give way, or nothing does.",
    ),
    click.option("--exact", is_flag=True, help="Never let chunking or drafting change the text, not even at ties."),
    click.option(
        "--draft",
        metavar="PATH|ngram|early-exit|auto|off",
        default="off",
        show_default=True,
        help="Who proposes tokens that the model verifies: the same text, sooner where that pays.",
    ),
)
_PREFIXES = click.option(
    "--prefixes",
    type=_FILE,
    help="A file in which computed prompts are kept from one start to the next; made where it is missing.",
)
_ADAPTERS = click.option(
    "--adapter",
    "adapters",
    metavar="NAME=PATH",
    multiple=True,
    help="A LoRA adapter (a PEFT folder) to load; may be repeated. Answers take the first; lines of a batch, any.",
)
_ANSWERING = (
    click.option("--max-tokens", type=int, help="Most tokens of an answer; without it, what the context has room for."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token."),
    click.option("--top-k", type=int, help="Choose among the N likeliest tokens."),
    click.option("--top-p", type=float, help="Choose among the fewest tokens that hold this much probability."),
    click.option("--min-p", type=float, help="Choose among tokens at least this share as likely as the likeliest."),
    click.option("--typical-p", type=float, help="Choose among the most typical tokens that hold this much."),
    click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="Above 1: repeat less."),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True, help="Taken once from tokens used."),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True, help="Taken at each use."),
    click.option("--seed", type=int, help="The same seed gives the same text."),
    click.option("--stop", multiple=True, help="End before this text; may be given several times."),
    click.option("--ignore-eos", is_flag=True, help="Go on where the model would end."),
    click.option("--system", help="A system message before the conversation."),
    click.option("--schema", type=_FILE, help="A file with a JSON schema that the answer must follow."),
    click.option("--regex", help="A regular expression that the answer must match."),
    click.option("--grammar", type=_FILE, help="A file with a grammar (Lark or GBNF) that the answer must follow."),
)


def answering_options(command: Command) -> Command:
    """Every option of opening an artifact and of one answer, under the names of the API."""
    for option in reversed((*_OPENING, _PREFIXES, _ADAPTERS, *_ANSWERING)):
        command = option(command)
    return command


def opening_of(options: dict[str, Any]) -> dict[str, Any]:
    """What `edgekit.open` is told."""
    return {
        name: options[name]
        for name in ("context", "window", "sinks", "memory", "kv_bits", "on_pressure", "exact", "draft")
    }


def answer_of(options: dict[str, Any]) -> dict[str, Any]:
    """What `generate`, `chat` and `stream` are told; what was not given is left to them."""
    plain = (
        "max_tokens temperature top_k top_p min_p typical_p repetition_penalty presence_penalty frequency_penalty "
        "seed stop ignore_eos regex"
    )
    found = {name: options[name] for name in plain.split() if options[name] is not None}
    if options["adapters"]:
        found["adapter"] = adapter_of(options["adapters"][0])[0]
    for name in ("schema", "grammar"):
        if options[name] is not None:
            found[name] = _text(options[name], f"--{name}")
    understood(found)  # a value out of bounds is refused now, before a model is opened
    return found


def _text(path: Path, what: str) -> str:
    try:
        return read_bytes(path, _MAX_GRAMMAR_BYTES).decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{what} {path}: is not text in UTF-8") from error


@contextmanager
def interruptible(stream: Stream) -> Iterator[list[int]]:
    """ctrl-C ends the answer, with what is there; a second one ends the program. Yields what was caught."""
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


def load_adapters(runtime: Runtime, given: Sequence[str]) -> None:
    """Every adapter that the command line names."""
    for each in given:
        runtime.load_adapter(*adapter_of(each))


def adapter_of(given: str) -> tuple[str, Path]:
    """The name and the folder of `NAME=PATH`."""
    name, equals, path = given.partition("=")
    if not (name and equals and path):
        raise InvalidInput(f"--adapter {given!r}: must be NAME=PATH, PATH being a folder as PEFT saves it")
    return name, Path(path)


@contextmanager
def kept_prefixes(runtime: Runtime, path: Path | None) -> Iterator[None]:
    """Prefixes come from the file before the block, and go there after it."""
    check_output(path)
    if path is not None and path.exists():
        runtime.load_prefixes(path)
    yield
    if path is not None:
        runtime.save_prefixes(path)


def show_metrics(runtime: Runtime, seconds: float) -> str:
    """What many answers took together, as lines that a person reads."""
    found, speculation = runtime.metrics(), runtime.speculation()
    rate = found.tokens / seconds if seconds > 0 else 0.0
    ended = ", ".join(f"{count} {reason}" for reason, count in sorted(found.finished.items()))
    return "\n".join(
        (
            f"requests  {found.requests} in {seconds:.3g} s: {ended}",
            f"tokens    {found.prompt_tokens} read, {found.cached_tokens} of them known before; "
            f"{found.tokens} written, {rate:.3g} tokens/s together",
            f"time      waiting {found.queue_s:.3g} s, reading {found.prefill_s:.3g} s, writing "
            f"{found.decode_s:.3g} s, summed over requests; of the loop itself {found.host_s:.3g} s",
            f"prefixes  {found.prefix_hits} of {found.prefix_queries} prompts began as one before; "
            f"{show_bytes(found.prefix_bytes)} kept",
            *(show(runtime.memory()) if runtime.artifact else ()),
            *(_show_speculation(found.model_dump(), speculation.model_dump()) if speculation else ()),
        )
    )


def show_notes(runtime: Runtime) -> None:
    """What is not here as it was planned or asked for."""
    for note in runtime.notes:
        click.echo(f"note: {note}", err=True)


def write(text: str) -> None:
    """To stdout at once; what the terminal cannot show is replaced, never an error."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def statistics(runtime: Runtime, timings: Timings, opened_s: float | None = None) -> dict[str, Any]:
    """What an answer took, in seconds, tokens per second and bytes; predicted beside measured."""
    found = footprint()
    plan = runtime.artifact.plan if runtime.artifact else None
    speculation = runtime.speculation()
    # What was planned for a draft gives way to what the one that is open takes.
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
        "memory": runtime.memory().model_dump(mode="json") if runtime.artifact else None,
        **found.model_dump(),
    }


def show_statistics(found: dict[str, Any]) -> str:
    """The same as lines that a person reads."""

    def figure(name: str, unit: str) -> str:
        value = found[name]
        return "not known" if value is None else f"{value:{',.0f' if value >= 1000 else '.3g'}} {unit}"

    def size(name: str) -> str:
        return "not known" if found[name] is None else show_bytes(found[name])

    predicted = "predicted" if found["predicted_for"] is None else f"predicted for {found['predicted_for']}:"
    known = f", {found['cached_tokens']} of them known before" if found["cached_tokens"] else ""
    lines = [
        f"time      first token {figure('first_token_s', 's')}, all {figure('total_s', 's')}"
        + (f", opening {figure('open_s', 's')}" if found["open_s"] is not None else ""),
        f"prefill   {found['prompt_tokens']} tokens{known}, {figure('prefill_tokens_per_s', 'tokens/s')}",
        f"decode    {found['tokens']} tokens, {figure('decode_tokens_per_s', 'tokens/s')} "
        f"({predicted} {figure('predicted_decode_tokens_per_s', 'tokens/s')})",
        f"memory    {predicted} {size('predicted_total_bytes')}, of it private {size('predicted_private_bytes')}; "
        f"measured RSS {size('rss_bytes')}, PSS {size('pss_bytes')}, RssAnon {size('anonymous_bytes')}, "
        f"peak RSS {size('peak_rss_bytes')}",
    ]
    if found["memory"]:
        lines += show(MemoryReport.model_validate_json(json.dumps(found["memory"])))
    if found["speculation"]:
        lines += _show_speculation(found, found["speculation"])
    return "\n".join(lines)


def _show_speculation(found: dict[str, Any], told: dict[str, Any]) -> list[str]:
    """Whether drafting is on and why, what it gains, and how often proposals are right, by place."""

    def times(name: str) -> str:
        return "not known" if told[name] is None else f"{told[name]:.2f}"

    steps = "" if told["tokens_per_step"] is None else f", {told['tokens_per_step']:.2f} tokens a step"
    memory = f", {show_bytes(told['draft_bytes'])} predicted for the draft" if told["draft_bytes"] else ""
    lines = [
        f"drafting  {'on' if told['is_on'] else 'off'}: {told['reason']}",
        f"          {found['accepted']} of {found['proposed']} proposed tokens accepted{steps}; speed-up estimated "
        f"{times('estimated_speed_up')}, measured {times('measured_speed_up')}{memory}",
    ]
    lines += [
        f"          {kind['name']}: accepted by place {' '.join(f'{rate:.2f}' for rate in kind['acceptance'])}"
        for kind in told["proposals"]
        if kind["acceptance"]
    ]
    return lines
