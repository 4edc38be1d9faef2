"""The drafting head that is sealed with a model: EAGLE-3, MTP parts, and assistants that read the model's cache."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from edgekit.contracts.memory import MemoryLoad, total
from edgekit.drafters import CostProbe, DraftSource, known_share
from edgekit.errors import InvalidInput, Unsupported
from edgekit.methods.drafters.assistant_decoder import AssistantDecoder
from edgekit.methods.drafters.assistant_drafter import AssistantDrafting, AssistantProbe
from edgekit.methods.drafters.head_decoder import HeadDecoder
from edgekit.methods.drafters.head_drafter import HeadDrafting, HeadProbe

if TYPE_CHECKING:
    from edgekit.contracts.plan import Plan
    from edgekit.drafters import DraftMethod, DraftTarget


class HeadSource(DraftSource):
    """The head that is sealed with the model."""

    def check(self, argument: str) -> None:
        if argument:
            raise InvalidInput(f"draft head:{argument}: a head has no argument; give head")

    def suits(self, plan: Plan) -> bool:
        return plan.drafter is not None

    def reads_hidden(self, plan: Plan) -> bool:
        return plan.drafter is not None

    def private_bytes(self, argument: str, plan: Plan, tokens: int, sequences: int) -> int:
        if plan.drafter is None:
            return 0
        return plan.drafter.private_bytes(tokens, sequences, plan.chunk_tokens)

    def open(self, argument: str, target: DraftTarget) -> DraftMethod:
        plan, capabilities = target.artifact.plan, target.engine.capabilities
        if plan.drafter is None:
            raise Unsupported("draft head: this artifact has no drafting head; export it with `--drafter HEAD_FOLDER`")
        if capabilities.feature_layers != plan.drafter.hidden_layers:
            raise Unsupported(f"draft head: {plan.target} gives no hidden states for it; open without the draft")
        if not set(plan.drafter.kv_layers) <= set(capabilities.kv_layers):
            raise Unsupported(f"draft head: {plan.target} hands out no keys and values for it; open without the draft")
        if not plan.drafter.own_embedding and not capabilities.kv_layers:
            raise Unsupported(f"draft head: {plan.target} hands out no embeddings for it; open without the draft")
        return _opened(target)


def _opened(target: DraftTarget) -> DraftMethod:
    engine, artifact, kv_config, costs = target.engine, target.artifact, target.kv_config, target.costs
    plan = artifact.plan
    assert plan.drafter is not None
    head = artifact.open_head()
    tokens, sequences, chunk = kv_config.capacity_tokens, plan.sequences, plan.chunk_tokens
    load = MemoryLoad(plan.model, plan.recipe, plan.backend, plan.memory, tokens, sequences, kv_config.kv_bits, chunk)
    told = artifact.target().memory(load._replace(head=plan.drafter))
    size = plan.drafter.private_bytes(tokens, sequences, chunk) + total(told, "draft_bytes")
    model = AssistantDecoder(head) if plan.drafter.kv_layers else HeadDecoder(head)
    try:
        with closing(CostProbe(engine, kv_config)) as probe:
            if isinstance(model, AssistantDecoder):
                one = known_share("head-cost", artifact.sha256, probe, AssistantProbe(model, probe.state))
                return AssistantDrafting(model, one_s=one * costs.one, bytes=size)
            one = known_share("head-cost", artifact.sha256, probe, HeadProbe(model, probe.state))
            block = known_share(
                "head-block-cost", artifact.sha256, probe, HeadProbe(model, probe.state, model.spec.block_tokens // 2)
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
