"""Opens an artifact, or a GGUF file as it is: planned for this machine, in its own types, neither packed nor sealed."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from edgekit.artifact.artifact import Artifact, open_artifact
from edgekit.common.files import is_gguf
from edgekit.contracts.manifest import MANIFEST_VERSION, Manifest
from edgekit.errors import Unsupported

TARGET = "llamacpp"  # the only one that reads GGUF


def open_file(path: str | Path, context: int | None = None) -> Artifact:
    """Open an artifact, or a GGUF file as one that is not sealed, planned for this machine with `context` tokens.

    A file's header is checked as a model's is, and again when the target opens it.
    """
    place = Path(path)
    if not is_gguf(place):
        return open_artifact(path)
    from edgekit.model.gguf_source import file_identity

    return _opened(place, context, file_identity(place))


@lru_cache(maxsize=16)
def _opened(path: Path, context: int | None, identity: str) -> Artifact:
    # An artifact needs neither planner nor quantiser.
    from edgekit.model.source import open_source
    from edgekit.planner.make import make_plans
    from edgekit.planner.request import PlanRequest
    from edgekit.quant.own_integers import as_is

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
