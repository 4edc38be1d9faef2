"""Open the draft methods that the option `draft` names: `PATH`, `ngram`, `early-exit`, `head`, `auto` or `off`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edgekit.artifact.artifact import Artifact, open_artifact
from edgekit.artifact.sealed_head import open_head
from edgekit.common.parsing import read_text
from edgekit.common.units import MIB, show_bytes
from edgekit.contracts.engine import Engine
from edgekit.contracts.installed import holds_artifact
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.plan import Plan
from edgekit.errors import DoesNotFit, InvalidInput, Unsupported, quote_short
from edgekit.model.same_vocabulary import check_same_vocabulary
from edgekit.planner.head_memory import BLOCK_TOKENS, head_private_bytes
from edgekit.planner.memory import without_tokenizer
from edgekit.runtime.memory.admission import RunConfig, estimate_of
from edgekit.runtime.speculation.assistant_decoder import AssistantDecoder
from edgekit.runtime.speculation.assistant_drafter import AssistantDrafting, AssistantProbe
from edgekit.runtime.speculation.controller import SpeculationController
from edgekit.runtime.speculation.costs import CostProbe, Costs, known_costs, known_share
from edgekit.runtime.speculation.draft_model import DraftModel, draft_kv_config
from edgekit.runtime.speculation.early_exit import EarlyExit
from edgekit.runtime.speculation.head_decoder import HeadDecoder
from edgekit.runtime.speculation.head_drafter import HeadDrafting, HeadProbe
from edgekit.runtime.speculation.ngram import CORPUS_BYTES, INDEX_BYTES, Corpus, Ngrams, kept_tokens
from edgekit.runtime.speculation.speculation import Speculation

if TYPE_CHECKING:
    from edgekit.runtime.generation.tokenizer import Codec
    from edgekit.runtime.speculation.draft_method import DraftMethod

OFF = "off"
_MAX_CORPUS_BYTES = 64 * MIB


class DraftOption(NamedTuple):
    """The option `draft`: a method, and the text after its colon or the path of a draft model."""

    method: str
    argument: str


def parse_draft(option: str | Path) -> DraftOption:
    """Parse the option. A text that names no method is the path of a draft model; `./ngram` is a path, too."""
    name, _, argument = option.partition(":") if isinstance(option, str) else ("", "", "")
    if name in ("ngram", "early-exit", "auto") or option in ("head", OFF):
        return DraftOption(name, argument)
    return DraftOption("model", str(option))


def check_draft(option: str | Path) -> None:
    """Refuse an option that names neither a method nor an existing path, before anything is loaded."""
    method, argument = parse_draft(option)
    if (method == "model" or (method == "auto" and argument)) and not Path(argument).exists():
        raise InvalidInput(
            f"draft: there is no artifact at {Path(argument)}; give the folder of a smaller model with the same "
            "vocabulary, or ngram, early-exit, head, auto or off"
        )


def open_speculation(
    option: str | Path,
    engine: Engine,
    artifact: Artifact,
    codec: Codec,
    *,
    policy: KVEvictionPolicy,
    kv_config: KVCacheConfig,
    exact: bool = False,
) -> Speculation | None:
    """Open the draft methods of the option; None for `off`.

    `ngram:FILE` also searches a text, `early-exit:LAYER` chooses the exit, and `auto:PATH` adds a draft model to the
    other methods.
    """
    method, argument = parse_draft(option)
    if method == OFF:
        return None
    abilities = engine.abilities
    if abilities.max_rewind == 0:
        raise Unsupported("draft: this engine cannot take tokens back, so nothing can be verified; leave out the draft")
    with ExitStack() as opened:
        costs = known_costs(engine, kv_config, artifact.sha256, exact=exact)
        methods: list[DraftMethod] = []
        if method in ("ngram", "auto"):
            corpus = _corpus(Path(argument), codec) if argument and method == "ngram" else None
            methods.append(Ngrams(corpus, kept_tokens(kv_config.capacity_tokens)))
        if method == "early-exit" or (method == "auto" and abilities.exits):
            layer = _exit(argument if method == "early-exit" else "", abilities.exits, len(artifact.plan.model.layers))
            with closing(CostProbe(engine, kv_config)) as probe:
                share = known_share(f"exit-{layer}-cost", artifact.sha256, probe, probe.at_exit(layer))
            methods.append(EarlyExit(engine, layer, share * costs.one))
        if method == "head" or (method == "auto" and artifact.plan.drafter is not None):
            head = _open_head(artifact, engine, costs, kv_config)
            opened.callback(head.close)
            methods.append(head)
        if method == "model" or (method == "auto" and argument):
            draft = open_draft(Path(argument), artifact, engine, costs, policy=policy, kv_config=kv_config)
            opened.callback(draft.close)
            methods.append(draft)
        opened.pop_all()
        return Speculation(methods, SpeculationController(costs, replays=abilities.checkpoint_tokens is not None))


def _open_head(artifact: Artifact, engine: Engine, costs: Costs, kv_config: KVCacheConfig) -> DraftMethod:
    """Open the head that is sealed with the model."""
    plan = artifact.plan
    if plan.drafter is None:
        raise Unsupported("draft head: this artifact has no drafting head; export it with `--drafter HEAD_FOLDER`")
    if engine.abilities.feature_layers != plan.drafter.hidden_layers:
        raise Unsupported(f"draft head: {plan.target} gives no hidden states for it; open without the draft")
    if not set(plan.drafter.kv_layers) <= set(engine.abilities.kv_layers):
        raise Unsupported(f"draft head: {plan.target} hands out no keys and values for it; open without the draft")
    if not plan.drafter.own_embedding and not engine.abilities.kv_layers:
        raise Unsupported(f"draft head: {plan.target} hands out no embeddings for it; open without the draft")
    head = open_head(plan, artifact.folder)
    size = head_private_bytes(plan.drafter, kv_config.capacity_tokens, plan.sequences, plan.chunk_tokens, plan.memory)
    model = AssistantDecoder(head) if plan.drafter.kv_layers else HeadDecoder(head)
    try:
        with closing(CostProbe(engine, kv_config)) as target:
            if isinstance(model, AssistantDecoder):
                one = known_share("head-cost", artifact.sha256, target, AssistantProbe(model, target.state))
                return AssistantDrafting(model, one_s=one * costs.one, bytes=size)
            one = known_share("head-cost", artifact.sha256, target, HeadProbe(model, target.state))
            block = known_share(
                "head-block-cost", artifact.sha256, target, HeadProbe(model, target.state, BLOCK_TOKENS // 2)
            )
    except BaseException:
        model.close()
        raise
    return HeadDrafting(
        model,
        capacity=kv_config.capacity_tokens,
        one_s=one * costs.one,
        block_token_s=block * costs.one,
        bytes=size,
    )


def open_draft(
    path: Path,
    target: Artifact,
    target_engine: Engine,
    costs: Costs,
    *,
    policy: KVEvictionPolicy,
    kv_config: KVCacheConfig,
) -> DraftModel:
    """Open the artifact at `path` as a draft; refused where its vocabulary, context or memory does not fit."""
    artifact = open_artifact(path)
    plan = artifact.plan
    check_same_vocabulary(target.folder, artifact.folder)
    if kv_config.capacity_tokens > plan.storage.capacity_tokens:
        raise InvalidInput(
            f"draft {path}: its context has {plan.storage.capacity_tokens} tokens, the target's "
            f"{kv_config.capacity_tokens}; export the draft with `--context {kv_config.capacity_tokens}`, "
            "or open the target with less"
        )
    size = draft_bytes(artifact)
    needed = target.plan.estimate.private_bytes - target.plan.estimate.draft_bytes + size.private
    if needed > target.plan.budget_bytes:
        raise DoesNotFit(
            f"draft {path}: the model with it needs {show_bytes(needed)} and its plan allows "
            f"{show_bytes(target.plan.budget_bytes)}; use a smaller draft, or prompt lookup (ngram), which needs none"
        )
    engine = artifact.working_target().open(plan, artifact.folder)
    try:
        draft_config = draft_kv_config(engine, kv_config, policy, str(path))
        with (
            closing(CostProbe(target_engine, kv_config)) as target_probe,
            closing(CostProbe(engine, draft_config)) as draft_probe,
        ):
            share = known_share(f"draft-{artifact.sha256[:16]}-cost", target.sha256, target_probe, draft_probe)
        return DraftModel(
            engine,
            draft_config,
            known_costs(engine, draft_config, artifact.sha256).scaled(share * costs.one),
            vocabulary=target.plan.model.vocab_size,
            chunk_tokens=plan.chunk_tokens,
            bytes=size.total,
            path=path,
        )
    except BaseException:
        engine.close()
        raise


class DraftBytes(NamedTuple):
    """The predicted memory of a draft: weights, states and activations, without the runtime library."""

    private: int
    total: int


def draft_bytes(artifact: Artifact) -> DraftBytes:
    """Return the memory that a draft model adds to its target's."""
    plan = artifact.plan
    plan = plan.model_copy(update={"memory": without_tokenizer(plan.memory)})
    estimate = estimate_of(plan, RunConfig(kv_config=plan.storage, policy=plan.cache, sequences=plan.sequences))
    return DraftBytes(estimate.private_bytes - estimate.runtime_bytes, estimate.total_bytes - estimate.runtime_bytes)


def drafts(option: str | Path | None) -> bool:
    """Return True if the option asks for drafting."""
    return option is not None and parse_draft(option).method != OFF


def drafts_with_head(option: str | Path | None, plan: Plan) -> bool:
    """Return True if the option asks for the head that is sealed with the model."""
    return option is not None and plan.drafter is not None and parse_draft(option).method in ("head", "auto")


def drafting_bytes(option: str | Path | None, tokens: int, sequences: int, plan: Plan) -> int:
    """Predict the private memory of drafting: a draft model, a head, and the indexes of texts of `tokens` tokens."""
    method, argument = parse_draft(OFF if option is None else option)
    size = 0
    if method in ("ngram", "auto"):
        size += sequences * 2 * kept_tokens(tokens) * INDEX_BYTES
    if plan.drafter is not None and drafts_with_head(option, plan):
        size += head_private_bytes(plan.drafter, tokens, sequences, plan.chunk_tokens, plan.memory)
    path = Path(argument)
    if argument and method in ("model", "auto") and holds_artifact(path):
        size += draft_bytes(open_artifact(path)).private
    elif method == "ngram" and argument and path.is_file():
        size += path.stat().st_size * CORPUS_BYTES
    return size


def _corpus(path: Path, codec: Codec) -> Corpus:
    text = read_text(path, _MAX_CORPUS_BYTES)
    tokens: list[int] = []
    for part in _parts(text):
        tokens += codec.encode(part, add_special_tokens=False)
    return Corpus(tokens)


def _parts(text: str, characters: int = 1 << 16) -> Iterator[str]:
    """Yield the text in parts, if possible whole lines, since the tokenizer is slow on very long texts."""
    start = 0
    while start < len(text):
        stop = text.rfind("\n", start, start + characters) + 1
        stop = stop if stop > start and start + characters < len(text) else start + characters
        yield text[start:stop]
        start = stop


def _exit(argument: str, exits: tuple[int, ...], layers: int) -> int:
    """Return the exit of the option; without one, the exit nearest to a third of the layers."""
    if not exits:
        raise Unsupported("draft early-exit: this artifact has no exits; export it with `--exit LAYER`")
    if not argument:
        return min(exits, key=lambda layer: (abs(3 * layer - layers), layer))
    if not argument.isdecimal() or int(argument) not in exits:
        raise InvalidInput(
            f"draft early-exit: no exit after layer {quote_short(argument)}; this artifact has "
            f"{', '.join(map(str, exits))}"
        )
    return int(argument)
