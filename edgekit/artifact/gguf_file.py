"""Opens a GGUF file as it is: a plan for this machine, and the file's own types. Nothing is exported or sealed."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from edgekit.artifact.artifact import Artifact
from edgekit.contracts.manifest import MANIFEST_VERSION, Manifest
from edgekit.errors import Unsupported
from edgekit.model.gguf_source import file_identity
from edgekit.model.source import open_source
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.quant.own_integers import as_is

TARGET = "llamacpp"  # the only one that reads GGUF


def open_gguf_file(path: Path, context: int | None = None) -> Artifact:
    """Return a GGUF file as an artifact that is not sealed, planned for this machine with up to `context` tokens.

    Its header is checked as a model's is, and again when the target opens it.
    """
    return _opened(path, context, file_identity(path))


@lru_cache(maxsize=16)
def _opened(path: Path, context: int | None, identity: str) -> Artifact:
    source = open_source(path)
    recipe = as_is(source)
    if recipe is None:
        raise Unsupported(
            f"{path}: holds {source.quantised_as}, which llama.cpp does not open here; `edgekit export` converts it"
        )
    request = PlanRequest(target=TARGET, recipe=recipe, context=context)
    (plan,) = make_plans(source, ["this"], request, may_measure=False)
    note = f"{path.name} is opened as it is, quantised by its maker ({recipe.keeps}); it is not sealed"
    plan = plan.model_copy(update={"notes": (note, *plan.notes)})
    manifest = Manifest(
        version=MANIFEST_VERSION,
        plan=plan,
        weights_sha256=identity,
        files={},
        tools={},
        self_check="none: a file of another tool",
    )
    return Artifact(source.folder, manifest, identity, is_sealed=False, weights=path, hold=source.hold)
