"""Makes a server plan from the names of a model and of GPUs. Writes nothing."""

from __future__ import annotations

from pathlib import Path

from edgekit import ModelSource, ModelSpec, Recipe, open_source, read_adapter, recipe_of
from edgekit.apps.handover.gpus import gpu_group
from edgekit.apps.handover.ranks import ServedHead, ServerSubject
from edgekit.apps.handover.request import ServerRequest
from edgekit.apps.handover.resolver import resolve_server
from edgekit.apps.handover.served_models import handover, refuse_model, refuse_split
from edgekit.apps.handover.server_plan import ServerPlan
from edgekit.contracts.neutral import is_neutral, read_manifest
from edgekit.contracts.recipe import RECIPES, has_float_embedding
from edgekit.errors import InvalidInput, Unsupported

_DEFAULT_GPU = "H100"


def plan_server(source: ModelSource, request: ServerRequest) -> ServerPlan:
    """Return the plan of a server. Raises `DoesNotFit` with every layout and its failed requirement."""
    model = read_manifest(source.folder).model if is_neutral(source.folder) else source.spec
    refuse_model(model, source.given)
    recipe = recipe_for(source, request.recipe)
    draft = None if request.draft is None else _draft(source, model, request.draft)
    if request.drafter is not None and request.draft is not None:
        raise InvalidInput(
            f"--drafter {request.drafter}: a server drafts with one of --draft and --drafter; leave out one"
        )
    if request.drafter is not None and request.to == "sglang":
        raise Unsupported(
            f"--drafter {request.drafter}: is written in the layout of speculators, which SGLang does not read; give "
            "it a head in the layout LlamaForCausalLMEagle3 by hand"
        )
    head = None if request.drafter is None else source.read_head(Path(request.drafter), model)
    if head is not None and head.kind == "assistant":
        raise Unsupported(
            f"--drafter {request.drafter}: no bundle with an assistant was ever served; leave out --drafter, and name "
            "the assistant's own folder in vLLM's --speculative-config by hand"
        )
    if head is not None and head.kind == "mtp":
        raise Unsupported(
            f"--drafter {request.drafter}: vLLM reads an MTP part from the model's own checkpoint, and a bundle leaves"
            " it out; leave out --drafter, or serve the checkpoint itself"
        )
    subject = ServerSubject(
        model=model,
        source=source.given,
        config_sha256=source.config_sha256,
        recipe=recipe,
        draft=draft,
        drafter=None if head is None else ServedHead.of(head.layer, head.tensors(), has_embedding=head.own_embedding),
        adapter_rank=max((read_adapter(path, model).rank for path in request.adapters), default=0),
        notes=(f"sizes only: {source.spec.exportable}",) if source.spec.exportable else (),
    )
    groups = [gpu_group(text) for text in request.gpus or (_DEFAULT_GPU,)]
    return resolve_server(subject, groups, request)


def _draft(source: ModelSource, model: ModelSpec, name: str) -> ModelSpec:
    """Return a draft model, which must have the tokens of the model."""
    draft = open_source(name)
    if draft.spec.vocab_size != model.vocab_size:
        raise InvalidInput(
            f"--draft {name}: has a vocabulary of {draft.spec.vocab_size} tokens and {source.given} of"
            f" {model.vocab_size}; servers need the same one"
        )
    source.check_draft(draft.folder)
    return draft.spec


def recipe_for(source: ModelSource, asked: Recipe | None) -> Recipe:
    """Return the recipe in a form that servers load: embedding and head in float."""
    if is_neutral(source.folder):
        manifest = read_manifest(source.folder)
        if asked is not None and asked.name not in (manifest.recipe.name, "keep"):
            raise InvalidInput(
                f"{source.given}: is quantised already, as {manifest.recipe.name}; leave out --recipe {asked.name},"
                " or give the float model"
            )
        if not has_float_embedding(manifest.recipe, manifest.model):
            raise Unsupported(
                f"{source.given}: its embedding or head is quantised, which servers cannot load; give the float model"
            )
        refuse_split(manifest.model, manifest.recipe)
        return manifest.recipe
    recipe = recipe_of(source, asked) or RECIPES["balanced"]
    if recipe.keeps:
        raise InvalidInput(f"{source.given}: keeps its own integers ({recipe.keeps}); choose a --recipe")
    if recipe.is_rare():
        raise Unsupported(f"recipe {recipe.name}: is the format of one target, not of servers; choose s4-g128 or s8")
    recipe = handover(recipe)
    refuse_split(source.spec, recipe)
    return recipe
