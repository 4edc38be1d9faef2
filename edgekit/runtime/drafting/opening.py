"""From what was asked for (`PATH`, `ngram`, `early-exit`, `auto`, `off`) to the speculation of a runtime.

What cannot draft for this target is refused here, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edgekit import plugins
from edgekit.artifact import MANIFEST, Artifact, open_artifact
from edgekit.cache import CachePolicy, Storage
from edgekit.errors import DoesNotFit, InvalidInput, TargetMissing, Unsupported, clip
from edgekit.interfaces import Engine
from edgekit.reading import read_bytes
from edgekit.runtime.drafting.costs import Costs, Probe, known_costs, known_share
from edgekit.runtime.drafting.early_exit import EarlyExit
from edgekit.runtime.drafting.model import DraftModel, check_draft
from edgekit.runtime.drafting.ngram import CORPUS_BYTES, INDEX_BYTES, Corpus, Ngrams, kept_tokens
from edgekit.runtime.drafting.pace import Pace
from edgekit.runtime.drafting.speculation import Speculation
from edgekit.runtime.drafting.vocabulary import check_same_vocabulary
from edgekit.units import MIB, show_bytes

if TYPE_CHECKING:
    from edgekit.runtime.drafting.adapting import Kind
    from edgekit.runtime.text import Codec

OFF = "off"
_MAX_CORPUS_BYTES = 64 * MIB


class Asked(NamedTuple):
    """A way to draft, and what was said after its colon; of a model, where it lies."""

    way: str
    rest: str


def understood(asked: str | Path) -> Asked:
    """A path is a model. A text is one where it names none of the other ways: `ngram` may be meant by `./ngram`."""
    name, _, rest = asked.partition(":") if isinstance(asked, str) else ("", "", "")
    if name in ("ngram", "early-exit", "auto") or asked == OFF:
        return Asked(name, rest)
    return Asked("model", str(asked))


def check_asked(asked: str | Path) -> None:
    """Refuse what names neither a way to draft nor a folder, before anything is loaded."""
    way, rest = understood(asked)
    if (way == "model" or (way == "auto" and rest)) and not Path(rest).exists():
        raise InvalidInput(
            f"draft: there is no artifact at {Path(rest)}; give the folder of a smaller model with the same "
            "vocabulary, or ngram, early-exit, auto or off"
        )


def open_speculation(
    asked: str | Path,
    engine: Engine,
    artifact: Artifact,
    codec: Codec,
    *,
    policy: CachePolicy,
    storage: Storage,
    exact: bool = False,
) -> Speculation | None:
    """The speculation that was asked for; None for `off`.

    `ngram:FILE` also looks into a text, `early-exit:LAYER` chooses the exit, `auto:PATH` adds a draft model to the
    others. A folder that bears one of these names is meant by `./ngram`.
    """
    way, rest = understood(asked)
    if way == OFF:
        return None
    able = engine.abilities
    if able.max_rewind == 0:
        raise Unsupported("draft: this engine cannot take tokens back, so nothing can be verified; leave out the draft")
    with ExitStack() as opened:
        costs = known_costs(engine, storage, artifact.sha256, exact=exact)
        kinds: list[Kind] = []
        if way in ("ngram", "auto"):
            corpus = _corpus(Path(rest), codec) if rest and way == "ngram" else None
            kinds.append(Ngrams(corpus, kept_tokens(storage.capacity_tokens)))
        if way == "early-exit" or (way == "auto" and able.exits):
            layer = _exit(rest if way == "early-exit" else "", able.exits, len(artifact.plan.model.layers))
            with closing(Probe(engine, storage)) as probe:
                share = known_share(f"exit-{layer}-cost", artifact.sha256, probe, probe.at_exit(layer))
            kinds.append(EarlyExit(engine, layer, share * costs.one))
        if way == "model" or (way == "auto" and rest):
            draft = open_draft(Path(rest), artifact, engine, costs, policy=policy, storage=storage)
            opened.callback(draft.close)
            kinds.append(draft)
        opened.pop_all()
        return Speculation(kinds, Pace(costs))


def open_draft(
    path: Path, target: Artifact, target_engine: Engine, costs: Costs, *, policy: CachePolicy, storage: Storage
) -> DraftModel:
    """The artifact at `path` as the target's draft; refused where its tokens, its room or its memory do not match."""
    artifact = open_artifact(path)
    plan = artifact.plan
    check_same_vocabulary(target.folder, artifact.folder)
    if storage.capacity_tokens > plan.storage.capacity_tokens:
        raise InvalidInput(
            f"draft {path}: holds {plan.storage.capacity_tokens} tokens and the target {storage.capacity_tokens}; "
            f"export the draft with `--context {storage.capacity_tokens}`, or open the target with less"
        )
    needed = draft_bytes(artifact)
    charged = target.plan.estimate.private_bytes - target.plan.estimate.draft_bytes + needed.private
    if charged > target.plan.budget_bytes:
        raise DoesNotFit(
            f"draft {path}: the model with it needs {show_bytes(charged)} and its plan allows "
            f"{show_bytes(target.plan.budget_bytes)}; use a smaller draft, or prompt lookup (ngram), which needs none"
        )
    maker = plugins.load_target(plan.target)
    missing = maker.missing()
    if missing is not None:
        raise TargetMissing(f"draft {path}: {plan.target}: {missing}")
    engine = maker.open(plan, artifact.folder)
    try:
        held = check_draft(engine, storage, policy, str(path))
        with closing(Probe(target_engine, storage)) as one, closing(Probe(engine, held)) as other:
            share = known_share(f"draft-{artifact.sha256[:16]}-cost", target.sha256, one, other)
        return DraftModel(
            engine,
            held,
            known_costs(engine, held, artifact.sha256).scaled(share * costs.one),
            vocabulary=target.plan.model.vocab_size,
            chunk_tokens=plan.chunk_tokens,
            bytes=needed.total,
            path=path,
        )
    except BaseException:
        engine.close()
        raise


class DraftBytes(NamedTuple):
    """Predicted memory of a draft: its weights, states and activations; the runtime library is there already."""

    private: int
    total: int


def draft_bytes(artifact: Artifact) -> DraftBytes:
    """What a draft adds to its target's memory."""
    estimate = artifact.plan.estimate
    return DraftBytes(estimate.private_bytes - estimate.runtime_bytes, estimate.total_bytes - estimate.runtime_bytes)


def drafts(asked: str | Path | None) -> bool:
    """Whether anything is to be proposed and verified."""
    return asked is not None and understood(asked).way != OFF


def drafting_bytes(asked: str | Path | None, tokens: int, sequences: int) -> int:
    """Private memory beside the target's own: a draft model, texts that are looked into."""
    way, rest = understood(OFF if asked is None else asked)
    found = 0
    if way in ("ngram", "auto"):
        found += sequences * 2 * kept_tokens(tokens) * INDEX_BYTES
    path = Path(rest)
    if rest and way in ("model", "auto") and (path / MANIFEST).exists():
        found += draft_bytes(open_artifact(path)).private
    elif way == "ngram" and rest and path.is_file():
        found += path.stat().st_size * CORPUS_BYTES
    return found


def _corpus(path: Path, codec: Codec) -> Corpus:
    try:
        text = read_bytes(path, _MAX_CORPUS_BYTES).decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"draft: {path} is not text in UTF-8") from error
    tokens: list[int] = []
    for part in _parts(text):
        tokens += codec.encode(part, add_special_tokens=False)
    return Corpus(tokens)


def _parts(text: str, characters: int = 1 << 16) -> Iterator[str]:
    """The text in pieces that end at line ends where there are any, so that long ones need no long tokenising."""
    start = 0
    while start < len(text):
        stop = text.rfind("\n", start, start + characters) + 1
        stop = stop if stop > start and start + characters < len(text) else start + characters
        yield text[start:stop]
        start = stop


def _exit(asked: str, exits: tuple[int, ...], layers: int) -> int:
    """The exit that was asked for, or the one nearest to a third of the layers."""
    if not exits:
        raise Unsupported("draft early-exit: this artifact has no exits; export it with `--exit LAYER`")
    if not asked:
        return min(exits, key=lambda layer: (abs(3 * layer - layers), layer))
    if not asked.isdecimal() or int(asked) not in exits:
        raise InvalidInput(
            f"draft early-exit: no exit after layer {clip(asked)}; this artifact has {', '.join(map(str, exits))}"
        )
    return int(asked)
