"""Checks the parity of artifacts of one model: text interface, tokens, weights and logits.

Later checks use the results of earlier ones to name the likely cause of a difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit import Artifact, open as open_runtime, open_artifact
from edgekit.apps.bench.eval.evaluate import read_text
from edgekit.apps.bench.eval.evaluation import Check
from edgekit.apps.bench.eval.reference import Logits, Windows, engine_logits, windows_of
from edgekit.apps.bench.eval.text_interface import TextInterface, compare
from edgekit.common.base import Frozen
from edgekit.common.divergence import Divergence, Pair, divergence_of
from edgekit.common.progress import Progress
from edgekit.errors import EdgekitError, InvalidInput, Unsupported

PARITY_TOKENS, PARITY_WINDOW = 512, 128
# Kernels round activations differently: int8 products change logits by about this much, wrong weights by far more.
MOST_KL = 0.02
_FIRST_TOKEN_KL = 2e-3


class Divergent(Frozen):
    """The first token at which greedy texts differ, and the margin of the best token there."""

    token: int  # of the text, counted from 0
    margin: float  # between the first model's two best logits


class Parity(Frozen):
    """The comparison of two artifacts."""

    one: str
    other: str
    one_sha256: str
    other_sha256: str
    findings: tuple[Check, ...]
    divergence: Divergence | None = None
    first_divergence: Divergent | None = None

    @property
    def is_same(self) -> bool:
        return all(finding.same is not False for finding in self.findings)


class _Side(NamedTuple):
    artifact: Artifact
    interface: TextInterface


def parity(
    paths: Sequence[str | Path],
    *,
    text: Path | None = None,
    tokens: int = PARITY_TOKENS,
    progress: Progress,
) -> list[Parity]:
    """Compare every artifact with the first."""
    if len(paths) < 2:
        raise InvalidInput("parity needs two artifacts or more")
    sides = [_side(path) for path in paths]
    try:
        return [_compare(sides[0], other, text, tokens, progress) for other in sides[1:]]
    finally:
        for side in sides:
            side.interface.close()


def _side(path: str | Path) -> _Side:
    artifact = open_artifact(path)
    return _Side(artifact, TextInterface.of(artifact.folder, artifact.plan.model.eos_ids, Path(path).name))


def _compare(one: _Side, other: _Side, text: Path | None, tokens: int, progress: Progress) -> Parity:
    findings = [_model(one.artifact, other.artifact), *compare(one.interface, other.interface)]
    progress(0, 1, "weights")
    findings.append(_weights(one.artifact, other.artifact, progress))
    divergence, parted = None, None
    if one.artifact.plan.model.vocab_size == other.artifact.plan.model.vocab_size:
        try:
            divergence, parted = _answers(one, other, text, tokens, progress)
            findings += _judge(divergence, parted, findings)
        except EdgekitError as error:
            findings.append(Check(what="answers", same=None, detail=f"could not be run here: {error}"))
    return Parity(
        one=one.interface.name,
        other=other.interface.name,
        one_sha256=one.artifact.sha256,
        other_sha256=other.artifact.sha256,
        findings=tuple(findings),
        divergence=divergence,
        first_divergence=parted,
    )


def _model(one: Artifact, other: Artifact) -> Check:
    """Compare the specifications field by field: ropes, windows, shapes, scales."""
    a, b = one.plan.model, other.plan.model
    names = [name for name in type(a).model_fields if name != "name" and getattr(a, name) != getattr(b, name)]
    if not names:
        return Check(what="model", same=True)
    name = names[0]
    detail = f"{name} is {_short(getattr(a, name))} in one and {_short(getattr(b, name))} in the other"
    more = f"; also {', '.join(names[1:])}" if names[1:] else ""
    return Check(what="model", same=False, detail=detail + more)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:119]}…"


def _weights(one: Artifact, other: Artifact, progress: Progress) -> Check:
    """Compare every tensor, unpacked from both artifacts' own files, bit for bit."""
    try:
        # For a norm that multiplies by 1 + w, some targets store w and some 1 + w.
        added = np.float32(1.0) if one.plan.model.norm_offset else np.float32(0.0)
        norms = {tensor.name for tensor in one.plan.model.tensors() if tensor.role == "norm"}
        count = 0
        for name, a, b in _unpacked_together(one, other):
            count += 1
            progress(count, count + 1, f"weights: {name}")
            if b is None or a is None:
                return Check(what="weights", same=False, detail=f"{name} is in one artifact only")
            if a.shape != b.shape:
                return Check(
                    what="weights", same=False, detail=f"{name} is {a.shape} in one and {b.shape} in the other"
                )
            different = np.argwhere(a + added != b + added if name in norms else a != b)
            if len(different):
                place = tuple(int(index) for index in different[0])
                return Check(
                    what="weights",
                    same=False,
                    detail=f"{name}{list(place)} is {a[place]:.6g} in one and {b[place]:.6g} in the other; "
                    f"{len(different):,} of {a.size:,} values differ",
                )
    except Unsupported as error:
        return Check(what="weights", same=None, detail=str(error))
    finally:
        progress(1, 1, "weights")
    return Check(what="weights", same=True, detail=f"{count} tensors are equal bit for bit")


def _unpacked_together(
    one: Artifact, other: Artifact
) -> Iterator[tuple[str, NDArray[np.float32] | None, NDArray[np.float32] | None]]:
    """Yield the tensors of two artifacts in the model's order, with only a few in memory."""
    names = list(dict.fromkeys(tensor.name for side in (one, other) for tensor in side.plan.model.tensors()))
    first, second = _Unpacked(one), _Unpacked(other)
    for name in names:
        a, b = first.take(name), second.take(name)
        if a is not None or b is not None:
            yield name, a, b


class _Unpacked:
    """The weights of an artifact, keyed by name and read in file order; what comes early is kept until requested."""

    def __init__(self, artifact: Artifact) -> None:
        self._coming = artifact.target().weights(artifact.plan, artifact.folder)
        self._early: dict[str, NDArray[np.float32]] = {}

    def take(self, name: str) -> NDArray[np.float32] | None:
        while name not in self._early:
            following = next(self._coming, None)
            if following is None:
                return None
            self._early[following[0]] = following[1]
        return self._early.pop(name)


def _answers(
    one: _Side, other: _Side, text: Path | None, tokens: int, progress: Progress
) -> tuple[Divergence, Divergent | None]:
    """Compare the logits of two artifacts on the same tokens."""
    ids = one.interface.codec.encode(read_text(text).words[: tokens * 16], add_special_tokens=False)
    capacity = min(side.artifact.plan.storage.capacity_tokens for side in (one, other))
    windows = windows_of(ids, min(PARITY_WINDOW, capacity), tokens, one.interface.opening())
    progress(0, 2, f"answers: {one.interface.name}")
    first = _logits(one.artifact.folder, windows)
    progress(1, 2, f"answers: {other.interface.name}")
    second = _logits(other.artifact.folder, windows)
    progress(2, 2, "answers: compared")
    pairs = [Pair(*each) for each in zip(windows.tokens, first, second, strict=True)]
    return divergence_of(pairs), _first_divergence(pairs)


def _logits(folder: Path, windows: Windows) -> list[Logits]:
    with open_runtime(folder) as runtime:
        return list(engine_logits(runtime.engine, runtime.kv_config, windows))


def _first_divergence(pairs: Sequence[Pair]) -> Divergent | None:
    index = 0
    for pair in pairs:
        parted = np.flatnonzero(pair.reference.argmax(axis=-1) != pair.found.argmax(axis=-1))
        if len(parted):
            row = np.sort(pair.reference[parted[0]])
            return Divergent(token=index + int(parted[0]), margin=float(row[-1] - row[-2]))
        index += len(pair.tokens)
    return None


def _judge(divergence: Divergence, parted: Divergent | None, before: Sequence[Check]) -> Iterator[Check]:
    """Judge the logits; if nothing else differs, name the likely fault."""
    where = f"; texts first part at token {parted.token}, where the margin is {parted.margin:.3g}" if parted else ""
    top = f"{divergence.same_top:.1%} of top tokens equal{where}"
    kl = f"KL {divergence.kl_mean:.3g} over {divergence.tokens} tokens, {top}"
    if divergence.kl_mean <= MOST_KL:
        yield Check(what="answers", same=True, detail=kl)
        return
    same_weights = any(each.what == "weights" and each.same for each in before)
    # The first token attends only to itself, so neither rope nor a window can change its logits.
    if divergence.first_kl_mean <= _FIRST_TOKEN_KL:
        yield Check(
            what="positions",
            same=False,
            detail=f"the first token of a text agrees (KL {divergence.first_kl_mean:.2g}) and later ones do not: "
            "the rope or an attention window is wrong" + (", for every weight is equal" if same_weights else ""),
        )
    elif same_weights:
        kl += "; every weight is equal, so the graph is wrong: a norm, a scale or an activation"
    yield Check(what="answers", same=False, detail=f"{kl}; at most {MOST_KL:g} is explained by rounding")
