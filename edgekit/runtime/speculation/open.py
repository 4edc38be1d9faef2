"""Open the draft methods that the option `draft` names: the path of a model, the name of a source, `auto` or `off`."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edgekit.artifact.artifact import Artifact, open_artifact
from edgekit.common.units import show_bytes
from edgekit.contracts.engine import Engine
from edgekit.contracts.installed import holds_artifact
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.plan import Plan
from edgekit.errors import DoesNotFit, InvalidInput, Unsupported
from edgekit.model.same_vocabulary import check_same_vocabulary
from edgekit.planner.memory import without_tokenizer
from edgekit.plugins import DRAFTERS, added_names, load_added
from edgekit.runtime.memory.admission import RunConfig, estimate_of
from edgekit.runtime.speculation.controller import SpeculationController
from edgekit.runtime.speculation.costs import CostProbe, Costs, known_costs, known_share
from edgekit.runtime.speculation.draft_method import DraftMethod, DraftSource, DraftTarget
from edgekit.runtime.speculation.draft_model import DraftModel, draft_kv_config
from edgekit.runtime.speculation.ngram import INDEX_BYTES, Ngrams, kept_tokens
from edgekit.runtime.speculation.speculation import Speculation

if TYPE_CHECKING:
    from edgekit.runtime.generation.tokenizer import Codec

OFF, AUTO, NGRAM, MODEL = "off", "auto", "ngram", "model"


class DraftOption(NamedTuple):
    """The option `draft`: the name of a source, and the text after its colon or the path of a draft model."""

    method: str
    argument: str


def parse_draft(option: str | Path) -> DraftOption:
    """Parse the option. A text that names no source is the path of a draft model; `./ngram` is a path, too."""
    name, _, argument = option.partition(":") if isinstance(option, str) else ("", "", "")
    if name in (AUTO, NGRAM, *added_names(DRAFTERS)) or option == OFF:
        return DraftOption(name, argument)
    return DraftOption(MODEL, str(option))


def draft_sources() -> dict[str, DraftSource]:
    """Return every source by its name."""
    added = {name: source() for name, source in load_added(DRAFTERS).items()}
    return {NGRAM: NgramSource(), **added, MODEL: DraftModelSource()}


def _sources_of(option: str | Path | None, plan: Plan) -> list[tuple[DraftSource, str]]:
    """Return the sources that the option asks for, each with its argument."""
    method, argument = parse_draft(OFF if option is None else option)
    if method == OFF:
        return []
    sources = draft_sources()
    if method != AUTO:
        return [(sources[method], argument)]
    found = [(source, "") for source in sources.values() if source.suits(plan)]
    return [*found, (sources[MODEL], argument)] if argument else found


def check_draft(option: str | Path) -> None:
    """Refuse an option that names neither a source nor an existing path, before anything is loaded."""
    method, argument = parse_draft(option)
    if method == AUTO:
        method = MODEL if argument else OFF
    if method != OFF:
        draft_sources()[method].check(argument)


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
    """Open the draft methods of the option; None for `off`. `auto:PATH` adds a draft model to the other methods."""
    sources = _sources_of(option, artifact.plan)
    if not sources:
        return None
    capabilities = engine.capabilities
    if capabilities.max_rewind == 0:
        raise Unsupported("draft: this engine cannot take tokens back, so nothing can be verified; leave out the draft")
    with ExitStack() as opened:
        costs = known_costs(engine, kv_config, artifact.sha256, exact=exact)
        target = DraftTarget(engine, artifact, codec, costs, policy, kv_config)
        methods: list[DraftMethod] = []
        for source, argument in sources:
            methods.append(source.open(argument, target))
            opened.callback(methods[-1].close)
        opened.pop_all()
        return Speculation(methods, SpeculationController(costs, replays=capabilities.checkpoint_tokens is not None))


class NgramSource(DraftSource):
    """Prompt lookup."""

    def check(self, argument: str) -> None:
        if argument:
            raise InvalidInput(f"draft ngram:{argument}: prompt lookup has no argument; give ngram")

    def suits(self, plan: Plan) -> bool:
        return True

    def private_bytes(self, argument: str, plan: Plan, tokens: int, sequences: int) -> int:
        return sequences * 2 * kept_tokens(tokens) * INDEX_BYTES

    def open(self, argument: str, target: DraftTarget) -> DraftMethod:
        return Ngrams(kept_tokens(target.kv_config.capacity_tokens))


class DraftModelSource(DraftSource):
    """A smaller artifact with the same vocabulary; the argument is its path."""

    def check(self, argument: str) -> None:
        if not Path(argument).exists():
            raise InvalidInput(
                f"draft: there is no artifact at {Path(argument)}; give the folder of a smaller model with the same "
                f"vocabulary, or {', '.join(name for name in draft_sources() if name != MODEL)}, auto or off"
            )

    def private_bytes(self, argument: str, plan: Plan, tokens: int, sequences: int) -> int:
        path = Path(argument)
        return draft_bytes(open_artifact(path)).private if holds_artifact(path) else 0

    def open(self, argument: str, target: DraftTarget) -> DraftMethod:
        engine, costs = target.engine, target.costs
        return open_draft(
            Path(argument), target.artifact, engine, costs, policy=target.policy, kv_config=target.kv_config
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
    config = RunConfig(kv_config=plan.storage, policy=plan.cache, sequences=plan.sequences)
    estimate = estimate_of(plan, config, artifact.target().memory)
    return DraftBytes(estimate.private_bytes - estimate.runtime_bytes, estimate.total_bytes - estimate.runtime_bytes)


def drafts(option: str | Path | None) -> bool:
    """Return True if the option asks for drafting."""
    return option is not None and parse_draft(option).method != OFF


def drafts_with_head(option: str | Path | None, plan: Plan) -> bool:
    """Return True if the option asks for a source that reads the target's hidden states."""
    return any(source.reads_hidden(plan) for source, _ in _sources_of(option, plan))


def drafting_bytes(option: str | Path | None, tokens: int, sequences: int, plan: Plan) -> int:
    """Predict the private memory of drafting for `sequences` texts of `tokens` tokens."""
    return sum(
        source.private_bytes(argument, plan, tokens, sequences) for source, argument in _sources_of(option, plan)
    )
