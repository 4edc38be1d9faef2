"""Artifacts as subjects of a benchmark: formats, bytes read per token, and options for opening them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from edgekit import ModelSpec, OpenOptions, Plan, Recipe, Tensor, open_artifact
from edgekit.apps.bench.measurement import Formats, Predicted, SubjectInfo
from edgekit.apps.bench.prompts import encoder_of
from edgekit.apps.bench.subject import Subject
from edgekit.apps.bench.workload import Workload
from edgekit.common.cores import usable_cores
from edgekit.contracts.kv_policy import apply_limits
from edgekit.contracts.recipe import bits_per_weight
from edgekit.contracts.token_costs import kv_bytes, touched_weight_bytes

_SCALES = {None: "bf16", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def subject_of_artifact(path: str | Path, opening: OpenOptions, name: str | None = None) -> Subject:
    """Return the subject that runs an artifact."""
    artifact = open_artifact(path)
    plan = artifact.plan
    cache, _ = apply_limits(  # refused before anything runs
        plan.cache, plan.storage, opening.context, opening.window, opening.sinks, opening.keep
    )
    capacity = opening.window or opening.context or plan.storage.capacity_tokens
    window = opening.window or (None if opening.context else plan.cache.window)
    info = SubjectInfo(
        name=readable(name) if name else f"{plan.target} {plan.backend} {plan.recipe.name}",
        engine=f"edgekit {plan.target} {plan.backend}",
        engine_version="",
        model=plan.model.name,
        recipe=plan.recipe.name,
        formats=formats_of(plan.model, plan.recipe, sum(fact.bytes for fact in artifact.manifest.files.values())),
        artifact_sha256=artifact.sha256,
        weights_sha256=artifact.manifest.weights_sha256,
        device=plan.device,
        threads=min(plan.threads, usable_cores().number),
        context=capacity,
        kv_bits=plan.storage.kv_bits,
        window=window,
        sinks=opening.sinks if opening.window else plan.cache.sinks,
        keep=cache.keep if cache.is_scored else None,
        exact=opening.exact,
        draft=readable(Path(opening.draft).name) if opening.draft not in (None, "off") else None,
        sequences=opening.sequences or 1,
        prefix_bytes=int(opening.prefixes or 0),
    )
    options = opening.model_dump(mode="json", exclude_defaults=True)
    if opening.draft and Path(opening.draft).is_dir():
        options["draft"] = str(Path(opening.draft).resolve())
    message: dict[str, Any] = {"path": str(Path(path).resolve()), "opening": options, "notes": list(plan.source_notes)}
    return Subject(
        info=info,
        command=(sys.executable, "-m", "edgekit.apps.bench.subject_program"),
        opening=message,
        weight_bytes=touched_weight_bytes(plan.model, plan.recipe, plan.memory),
        model=plan.model,
        encode=encoder_of(artifact),
        predicted=_predicted(plan),
    )


def readable(text: str) -> str:
    """Return `text` with the undecodable bytes of a file name written as escapes."""
    return text.encode(errors="backslashreplace").decode()


def bytes_per_token(subject: Subject, depth: int) -> int:
    """Return the bytes that a decode step reads: the weights, and the keys and values of every request."""
    capacity = min(depth, subject.info.window or depth)
    return subject.weight_bytes + subject.info.sequences * kv_bytes(subject.model, capacity, subject.info.kv_bits)


def formats_of(model: ModelSpec, recipe: Recipe, file_bytes: int) -> Formats:
    """Describe the number formats of a recipe."""
    tensors = list(model.tensors())
    linears = [tensor for tensor in tensors if tensor.role in ("linear", "expert")]
    embeddings = [tensor for tensor in tensors if tensor.role == "embedding"]
    heads = [tensor for tensor in tensors if tensor.role == "head"]
    return Formats(
        linears=_in_words(recipe, linears),
        embedding=_in_words(recipe, embeddings),
        head=_in_words(recipe, heads) if heads else f"{_in_words(recipe, embeddings)}, tied",
        bits_per_weight=round(bits_per_weight(model, recipe), 3),
        file_bytes=file_bytes,
        same_integers=True,
    )


def predicted_s(plan: Plan, workload: Workload, loads: int) -> float:
    """Predict the seconds of a workload from the plan's speed, with repeats and the warm-ups of every process."""
    speed = plan.speed
    read = written = 0
    for case in workload.cases:
        for request in case.requests:
            read += sum(part.tokens or len(part.text or "") // 3 for part in request.prompt)
            written += request.output_tokens
    once = written / max(speed.decode_tokens_per_s, 1e-3) + read / max(speed.prefill_tokens_per_s or 1.0, 1e-3)
    return once * (workload.warmups * min(loads, workload.repeats) + workload.repeats)


def _in_words(recipe: Recipe, tensors: Iterable[Tensor]) -> str:
    counts: dict[str, int] = {}
    for tensor in tensors:
        stored = recipe.format_of(tensor)
        if stored.is_float:
            words = str(stored)
        elif stored.is_native:
            words = f"{stored.kind}, groups of {stored.group}" if stored.group else f"blocks of {stored.kind}"
        else:
            bits, scales = stored.kind.removeprefix("s"), _SCALES[stored.scales]
            shared = f"groups of {stored.group}, {scales} scales" if stored.group else f"one {scales} scale a row"
            words = f"{bits}-bit {'with minima' if stored.minima else 'symmetric'}, {shared}"
        counts[words] = counts.get(words, 0) + 1
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"{count} × {words}" for words, count in sorted(counts.items(), key=lambda item: -item[1]))


def _predicted(plan: Plan) -> Predicted:
    return Predicted(
        total_bytes=plan.estimate.total_bytes,
        private_bytes=plan.estimate.private_bytes,
        decode_tokens_per_s=plan.speed.decode_tokens_per_s,
        prefill_tokens_per_s=plan.speed.prefill_tokens_per_s,
        first_token_s=plan.speed.first_token_s,
        basis=plan.speed.basis[:2000],
    )
