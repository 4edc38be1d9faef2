"""Artifacts as arms of a benchmark: what each stores, what a token of it reads, and how it is opened."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from edgekit.adapters import read_adapter
from edgekit.artifact import Artifact, open_artifact
from edgekit.cache import hold
from edgekit.measure.arms import Entrant, program_of
from edgekit.measure.measurement import Arm, Formats, Predicted
from edgekit.memory import kv_bytes
from edgekit.model import ModelSpec, Tensor
from edgekit.plan import Plan
from edgekit.recipe import Recipe, bits_per_weight
from edgekit.speed import touched_weight_bytes
from edgekit.units import parse_bytes


class Opening(NamedTuple):
    """How an artifact is opened; what is None or 0 is as planned."""

    context: int | None = None
    window: int | None = None
    sinks: int = 0
    exact: bool = False
    draft: str | None = None
    memory: str | None = None
    kv_bits: int | None = None
    on_pressure: str | None = None
    sequences: int | None = None  # requests that run at once
    prefixes: str | None = None  # how much of computed prompts is kept from request to request of one trial
    adapter: tuple[str, Path] | None = None  # a LoRA that every request uses: its name and folder


def entrant_of(path: str | Path, opening: Opening, name: str | None = None) -> Entrant:
    """The arm that runs an artifact."""
    artifact = open_artifact(path)
    plan = artifact.plan
    if opening.adapter is not None:
        read_adapter(opening.adapter[1], plan.model, most_rank=plan.adapter_rank)  # refused before anything runs
    hold(plan.cache, plan.storage, opening.context, opening.window, opening.sinks)  # refused before anything runs
    held = opening.window or opening.context or plan.storage.capacity_tokens
    window = opening.window or (None if opening.context else plan.cache.window)
    described = Arm(
        name=readable(name) if name else f"{plan.target} {plan.backend} {plan.recipe.name}",
        engine=f"edgekit {plan.target} {plan.backend}",
        engine_version="",
        model=plan.model.name,
        recipe=plan.recipe.name,
        formats=formats_of(plan.model, plan.recipe, _file_bytes(artifact)),
        artifact_sha256=artifact.sha256,
        weights_sha256=artifact.manifest.weights_sha256,
        device=plan.device,
        threads=plan.threads,
        context=held,
        kv_bits=plan.storage.kv_bits,
        window=window,
        sinks=opening.sinks if opening.window else plan.cache.sinks,
        exact=opening.exact,
        draft=readable(Path(opening.draft).name) if opening.draft is not None else None,
        adapter=opening.adapter[0] if opening.adapter else None,
        sequences=opening.sequences or 1,
        prefix_bytes=parse_bytes(opening.prefixes, "--prefixes") if opening.prefixes is not None else 0,
    )
    asked: dict[str, Any] = {
        key: value for key, value in opening._asdict().items() if value not in (None, 0) and key != "adapter"
    }
    if opening.draft and Path(opening.draft).is_dir():
        asked["draft"] = str(Path(opening.draft).resolve())
    told: dict[str, Any] = {"path": str(Path(path).resolve()), "opening": asked}
    if opening.adapter is not None:
        told["adapter"] = [opening.adapter[0], str(opening.adapter[1].resolve())]
    return Entrant(
        arm=described,
        command=program_of("edgekit.measure.arm_program"),
        opening=told,
        weight_bytes=touched_weight_bytes(plan.model, plan.recipe, plan.memory),
        predicted=_predicted(plan),
        takes_many=True,
    )


def readable(text: str) -> str:
    """`text` with the bytes of a file name that are no text written out."""
    return text.encode(errors="backslashreplace").decode()


def bytes_per_token(entrant: Entrant, model: ModelSpec, depth: int) -> int:
    """What a step reads: the weights that it multiplies with, and the keys and values that every request holds."""
    held = min(depth, entrant.arm.window or depth)
    return entrant.weight_bytes + entrant.arm.sequences * kv_bytes(model, held, entrant.arm.kv_bits)


def formats_of(model: ModelSpec, recipe: Recipe, file_bytes: int, same_integers: bool | None = True) -> Formats:
    """The formats of a recipe in words."""
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
        same_integers=same_integers,
    )


def _in_words(recipe: Recipe, tensors: Iterable[Tensor]) -> str:
    found: dict[str, int] = {}
    for tensor in tensors:
        stored = recipe.format_of(tensor)
        if stored.is_float:
            words = str(stored)
        elif stored.is_native:
            words = f"{stored.kind}, groups of {stored.group}"
        elif stored.kind == "s4":
            words = f"4-bit symmetric, groups of {stored.group}, bf16 scales"
        else:
            words = "8-bit symmetric, one bf16 scale a row"
        found[words] = found.get(words, 0) + 1
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{count} × {words}" for words, count in sorted(found.items(), key=lambda item: -item[1]))


def _file_bytes(artifact: Artifact) -> int:
    return sum(fact.bytes for fact in artifact.manifest.files.values())


def _predicted(plan: Plan) -> Predicted:
    return Predicted(
        total_bytes=plan.estimate.total_bytes,
        private_bytes=plan.estimate.private_bytes,
        decode_tokens_per_s=plan.speed.decode_tokens_per_s,
        prefill_tokens_per_s=plan.speed.prefill_tokens_per_s,
        first_token_s=plan.speed.first_token_s,
        basis=plan.speed.basis[:2000],
    )
