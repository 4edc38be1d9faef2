"""Whether artifacts of one model are one model: the same text, the same tokens, the same weights, the same answers.

Each later check is read in the light of those before it, so that a difference is named and not only found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit import plugins
from edgekit.artifact import Artifact, open_artifact
from edgekit.errors import EdgekitError, InvalidInput, Unsupported
from edgekit.frozen import Frozen
from edgekit.interfaces import Progress
from edgekit.measure.divergence import Divergence, Pair, divergence_of
from edgekit.measure.quality import read_text
from edgekit.measure.reference import Logits, Windows, engine_logits, windows_of
from edgekit.measure.surface import Surface, compare
from edgekit.runtime.opening import open_runtime

PARITY_TOKENS, PARITY_WINDOW = 512, 128
# Kernels round activations differently: int8 products move the answers by about this much, wrong weights by far more.
MOST_KL = 0.02
_FIRST_TOKEN_KL = 2e-3

What = Literal["model", "template", "tokens", "bos", "end of text", "weights", "positions", "answers"]


class Finding(Frozen):
    """One thing that must be the same."""

    what: What
    same: bool | None  # None: could not be compared
    detail: str


class Divergent(Frozen):
    """Where greedy texts part, and how near the two best tokens were there."""

    token: int  # of the text, counted from 0
    margin: float  # between the first model's two best logits


class Parity(Frozen):
    """Two artifacts, compared."""

    one: str
    other: str
    one_sha256: str
    other_sha256: str
    findings: tuple[Finding, ...]
    divergence: Divergence | None = None
    first_divergence: Divergent | None = None

    @property
    def is_same(self) -> bool:
        return all(finding.same is not False for finding in self.findings)


class _Side(NamedTuple):
    artifact: Artifact
    surface: Surface


def parity(
    paths: Sequence[str | Path],
    *,
    text: Path | None = None,
    tokens: int = PARITY_TOKENS,
    weights: bool = True,
    progress: Progress,
) -> list[Parity]:
    """Every artifact against the first."""
    if len(paths) < 2:
        raise InvalidInput("parity needs two artifacts or more")
    sides = [_side(path) for path in paths]
    try:
        return [_compared(sides[0], other, text, tokens, weights, progress) for other in sides[1:]]
    finally:
        for side in sides:
            side.surface.close()


def _side(path: str | Path) -> _Side:
    artifact = open_artifact(path)
    return _Side(artifact, Surface.of(artifact.folder, artifact.plan.model.eos_ids, Path(path).name))


def _compared(one: _Side, other: _Side, text: Path | None, tokens: int, weights: bool, progress: Progress) -> Parity:
    findings = [_model(one.artifact, other.artifact)]
    findings += [
        Finding(what=check.what, same=check.same, detail=check.detail) for check in compare(one.surface, other.surface)
    ]
    if weights:
        progress(0, 1, "weights")
        findings.append(_weights(one.artifact, other.artifact, progress))
    divergence, parted = None, None
    if one.artifact.plan.model.vocab_size == other.artifact.plan.model.vocab_size:
        try:
            divergence, parted = _answers(one, other, text, tokens, progress)
            findings += _judged(divergence, parted, findings)
        except EdgekitError as error:
            findings.append(Finding(what="answers", same=None, detail=f"could not be run here: {error}"))
    return Parity(
        one=one.surface.name,
        other=other.surface.name,
        one_sha256=one.artifact.sha256,
        other_sha256=other.artifact.sha256,
        findings=tuple(findings),
        divergence=divergence,
        first_divergence=parted,
    )


def _model(one: Artifact, other: Artifact) -> Finding:
    """The specifications, field by field: ropes, windows, shapes, scales."""
    a, b = one.plan.model, other.plan.model
    names = [name for name in type(a).model_fields if name != "name" and getattr(a, name) != getattr(b, name)]
    if not names:
        return Finding(what="model", same=True, detail="")
    name = names[0]
    detail = f"{name} is {_short(getattr(a, name))} in one and {_short(getattr(b, name))} in the other"
    more = f"; also {', '.join(names[1:])}" if names[1:] else ""
    return Finding(what="model", same=False, detail=detail + more)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:119]}…"


def _weights(one: Artifact, other: Artifact, progress: Progress) -> Finding:
    """Every tensor, unpacked from both artifacts' own files, bit for bit."""
    try:
        # Where a norm stores w and multiplies with 1 + w, some targets keep one and some the other.
        added = np.float32(1.0) if one.plan.model.norm_offset else np.float32(0.0)
        norms = {tensor.name for tensor in one.plan.model.tensors() if tensor.role == "norm"}
        count = 0
        for name, a, b in _unpacked_together(one, other):
            count += 1
            progress(count, count + 1, f"weights: {name}")
            if b is None or a is None:
                return Finding(what="weights", same=False, detail=f"{name} is in one artifact only")
            if a.shape != b.shape:
                return Finding(
                    what="weights", same=False, detail=f"{name} is {a.shape} in one and {b.shape} in the other"
                )
            different = np.argwhere(a + added != b + added if name in norms else a != b)
            if len(different):
                place = tuple(int(index) for index in different[0])
                return Finding(
                    what="weights",
                    same=False,
                    detail=f"{name}{list(place)} is {a[place]:.6g} in one and {b[place]:.6g} in the other; "
                    f"{len(different):,} of {a.size:,} values differ",
                )
    except Unsupported as error:
        return Finding(what="weights", same=None, detail=str(error))
    finally:
        progress(1, 1, "weights")
    return Finding(what="weights", same=True, detail=f"{count} tensors are equal bit for bit")


def _unpacked_together(
    one: Artifact, other: Artifact
) -> Iterator[tuple[str, NDArray[np.float32] | None, NDArray[np.float32] | None]]:
    """The tensors of both in the order of the model, a few of them in memory at a time."""
    names = list(dict.fromkeys(tensor.name for side in (one, other) for tensor in side.plan.model.tensors()))
    first, second = _Unpacked(one), _Unpacked(other)
    for name in names:
        a, b = first.take(name), second.take(name)
        if a is not None or b is not None:
            yield name, a, b


class _Unpacked:
    """The weights of an artifact by name, read forward; what came early is held until it is asked for."""

    def __init__(self, artifact: Artifact) -> None:
        target = plugins.load_target(artifact.plan.target)
        unpack = getattr(target, "weights", None)
        if unpack is None:
            raise Unsupported(f"the {target.name} target cannot unpack its weights, so they are not compared")
        self._coming: Iterator[tuple[str, NDArray[np.float32]]] = iter(unpack(artifact.plan, artifact.folder))
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
    """The same token ids read to both, teacher-forced."""
    ids = one.surface.codec.encode(read_text(text).words[: tokens * 16], add_special_tokens=False)
    room = min(side.artifact.plan.storage.capacity_tokens for side in (one, other))
    windows = windows_of(ids, min(PARITY_WINDOW, room), tokens, one.surface.opening())
    progress(0, 2, f"answers: {one.surface.name}")
    first = _rows(one.artifact.folder, windows)
    progress(1, 2, f"answers: {other.surface.name}")
    second = _rows(other.artifact.folder, windows)
    progress(2, 2, "answers: compared")
    pairs = [Pair(*each) for each in zip(windows.tokens, first, second, strict=True)]
    return divergence_of(pairs), _parting(pairs)


def _rows(folder: Path, windows: Windows) -> list[Logits]:
    with open_runtime(folder) as runtime:
        return list(engine_logits(runtime.engine, runtime.storage, windows))


def _parting(pairs: Sequence[Pair]) -> Divergent | None:
    place = 0
    for pair in pairs:
        parted = np.flatnonzero(pair.reference.argmax(axis=-1) != pair.found.argmax(axis=-1))
        if len(parted):
            row = np.sort(pair.reference[parted[0]])
            return Divergent(token=place + int(parted[0]), margin=float(row[-1] - row[-2]))
        place += len(pair.tokens)
    return None


def _judged(found: Divergence, parted: Divergent | None, before: Sequence[Finding]) -> Iterator[Finding]:
    """What the answers say, and where they point to when nothing else differs."""
    where = f"; texts first part at token {parted.token}, where the margin is {parted.margin:.3g}" if parted else ""
    kl = f"KL {found.kl_mean:.3g} over {found.tokens} tokens, {found.same_top:.1%} of top tokens equal{where}"
    if found.kl_mean <= MOST_KL:
        yield Finding(what="answers", same=True, detail=kl)
        return
    same_weights = any(each.what == "weights" and each.same for each in before)
    # A first token has no distance to any other: neither rope nor a window can move it.
    if found.first_kl_mean <= _FIRST_TOKEN_KL:
        yield Finding(
            what="positions",
            same=False,
            detail=f"the first token of a text agrees (KL {found.first_kl_mean:.2g}) and later ones do not: "
            "the rope or an attention window is wrong" + (", for every weight is equal" if same_weights else ""),
        )
    elif same_weights:
        kl += "; every weight is equal, so the graph is wrong: a norm, a scale or an activation"
    yield Finding(what="answers", same=False, detail=f"{kl}; at most {MOST_KL:g} is explained by rounding")
