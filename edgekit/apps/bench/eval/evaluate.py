"""Evaluates an artifact: its logits against the float model's on the same tokens, and tasks.

The result is a fact about the artifact on every machine, which plans use instead of a prior.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from edgekit import Artifact, ModelSource, Runtime, open as open_runtime, open_artifact, open_source
from edgekit.apps.bench.eval.evaluation import Check, Evaluation
from edgekit.apps.bench.eval.local_tasks import Task, ToolTask, score
from edgekit.apps.bench.eval.reference import (
    Logits,
    Windows,
    engine_logits,
    source_key,
    source_logits,
    stored,
    windows_of,
)
from edgekit.apps.bench.eval.text_interface import TextInterface, compare
from edgekit.apps.bench.eval.tool_schemas import check_schema
from edgekit.common.divergence import Divergence, Pair, divergence_of
from edgekit.common.parsing import parse_json, read_bytes
from edgekit.common.progress import Progress
from edgekit.contracts.quality_measurements import QualityFact, write_quality_fact
from edgekit.contracts.recipe import bits_per_weight
from edgekit.errors import InvalidInput, quote_short

WINDOW_TOKENS = 512
TEXT_TOKENS = 4096
BUNDLED_TEXT = "the bundled held-out text (Python files)"
_MAX_TEXT_BYTES = 256 << 20


class Reading(NamedTuple):
    """A text for an evaluation, with its name."""

    name: str
    words: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.words.encode()).hexdigest()


class Reference(NamedTuple):
    """The float model that an artifact is compared with."""

    name: str
    surface: TextInterface
    source: ModelSource
    logits: Callable[[Windows], list[Logits]]


def evaluate(
    path: str | Path,
    *,
    reference: str | Path | None = None,
    text: Path | None = None,
    tasks: list[Task] | None = None,
    tokens: int = TEXT_TOKENS,
    window_tokens: int = WINDOW_TOKENS,
    progress: Progress,
) -> Evaluation:
    """Compare an artifact with its model (or with the model `reference`), and run tasks.

    A comparison with the artifact's own model is stored for plans.
    """
    artifact = open_artifact(path)
    reading = read_text(text)
    _check_tools(tasks or ())
    with open_runtime(path) as runtime:
        length = min(window_tokens, runtime.kv_config.capacity_tokens)
        against = _reference(artifact, reference, min(artifact.plan.context, length), progress)
        own = TextInterface.of(artifact.folder, artifact.plan.model.eos_ids, "the artifact")
        try:
            checks = tuple(compare(own, against.surface))
            _refuse_other_vocabulary(artifact, against)
            begin = against.surface.opening()
            ids = against.surface.codec.encode(reading.words[: tokens * 16], add_special_tokens=False)
            windows = windows_of(ids, length, tokens, begin)
            expected = against.logits(windows)
            divergence = divergence_of(_pairs(runtime, windows, expected, own.opening(), begin, progress))
        finally:
            own.close()
            against.surface.close()
        scores = score(runtime, tasks) if tasks else ()
    result = _evaluation(artifact, against.name, reading, length, divergence, checks)
    return result.model_copy(update={"tasks": scores, "fact": _kept(artifact, against, result)})


def _check_tools(tasks: Sequence[Task]) -> None:
    """Refuse tool schemas that cannot be checked, before hours of answering."""
    for task in tasks:
        for tool in task.tools if isinstance(task, ToolTask) else ():
            described = tool.get("function", tool)
            if isinstance(described, Mapping):
                check_schema(described.get("parameters", {}), f"tool {quote_short(described.get('name'))}")


def _pairs(
    runtime: Runtime,
    windows: Windows,
    expected: list[Logits],
    own_begin: list[int],
    begin: list[int],
    progress: Progress,
) -> Iterator[Pair]:
    """Yield each window's logits; without leading tokens if the artifact begins texts with different ones."""
    offset = len(begin)
    read = windows
    if own_begin != begin:
        read = Windows(tuple(tuple(own_begin) + window[offset:] for window in windows.tokens), windows.sha256)
    every = zip(windows.tokens, expected, engine_logits(runtime.engine, runtime.kv_config, read), strict=True)
    for done, (window, wanted, rows) in enumerate(every):
        progress(done, len(windows.tokens), "reading")
        if own_begin == begin:
            yield Pair(window, wanted, rows)
        else:
            yield Pair(window[offset:], wanted[offset:], rows[len(own_begin) :])
    progress(1, 1, "reading")


def _reference(artifact: Artifact, named: str | Path | None, context: int, progress: Progress) -> Reference:
    given = named if named is not None else artifact.made_of
    try:
        source = open_source(given, need_weights=True, offline=named is None)
    except InvalidInput as error:
        raise InvalidInput(f"the reference {given}: {error}; name the float model with --reference") from error
    key = source_key(source, context)

    def logits(windows: Windows) -> list[Logits]:
        return stored(key, windows, source.spec.vocab_size, lambda: source_logits(source, windows, context, progress))

    surface = TextInterface.of(source.folder, source.spec.eos_ids, "the model")
    stored_as = f"{source.quantised_as} as float" if source.quantised_as else "float"
    return Reference(f"{source.name}, {stored_as}", surface, source, logits)


def _refuse_other_vocabulary(artifact: Artifact, against: Reference) -> None:
    own, other = artifact.plan.model.vocab_size, against.source.spec.vocab_size
    if own != other:
        raise InvalidInput(
            f"the artifact has {own} tokens and the reference {other}: they are different models;"
            " name the artifact's model with --reference"
        )


def _evaluation(
    artifact: Artifact, reference: str, reading: Reading, length: int, found: Divergence, checks: tuple[Check, ...]
) -> Evaluation:
    plan = artifact.plan
    return Evaluation(
        artifact_sha256=artifact.sha256,
        weights_sha256=artifact.manifest.weights_sha256,
        model=plan.model.name,
        target=plan.target,
        backend=plan.backend,
        recipe=plan.recipe.name,
        reference=reference,
        text=reading.name,
        text_sha256=reading.sha256,
        window_tokens=length,
        divergence=found,
        checks=checks,
        file_bytes=sum(fact.bytes for fact in artifact.manifest.files.values()),
        bits_per_weight=round(bits_per_weight(plan.model, plan.recipe), 3),
        notes=plan.source_notes,
    )


def _kept(artifact: Artifact, against: Reference, found: Evaluation) -> str | None:
    """Store a sound comparison with the artifact's own model for plans; return the fact's name, or None."""
    plan, source = artifact.plan, against.source
    if source.config_sha256 != plan.model_sha256 or not found.is_sound or found.divergence is None:
        return None
    fact = QualityFact(
        model=source.name,
        config_sha256=source.config_sha256,
        recipe=plan.recipe,
        target=plan.target,
        backend=plan.backend,
        weights_sha256=artifact.manifest.weights_sha256,
        artifact_sha256=artifact.sha256,
        kl=found.divergence.kl_mean,
        same_top=found.divergence.same_top,
        tokens=found.divergence.tokens,
        text=found.text,
    )
    return fact.name if write_quality_fact(fact) else None


def read_text(path: Path | None) -> Reading:
    """Read a text file, or the `text` fields of a jsonl; without a path, the bundled text."""
    from importlib.resources import files

    if path is None:
        data, name = (files("edgekit") / "_demo" / "held_out.jsonl").read_bytes(), BUNDLED_TEXT
        return Reading(name, _joined(data, name))
    data = read_bytes(path, _MAX_TEXT_BYTES)
    if path.suffix == ".jsonl":
        return Reading(path.name, _joined(data, str(path)))
    try:
        return Reading(path.name, data.decode())
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: is not text in UTF-8") from error


def _joined(data: bytes, where: str) -> str:
    texts = []
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            words = parse_json(line, f"{where}:{number}").get("text")
            if not isinstance(words, str):
                raise InvalidInput(f"{where}:{number}: text must be a string; write {json.dumps({'text': '…'})} a line")
            texts.append(words)
    return "\n\n".join(texts)
