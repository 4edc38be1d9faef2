"""The artifact for `run`, `chat` and `serve`: an existing one, or one of the named model, ready or made and cached."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path

import click

import edgekit
from edgekit.artifact.artifact import open_artifact, read_manifest
from edgekit.artifact.gguf_file import TARGET, open_file
from edgekit.common.content_store import bounded_store
from edgekit.common.files import is_gguf
from edgekit.contracts.installed import holds_artifact
from edgekit.errors import InvalidInput, Unsupported
from edgekit.model.source import (
    BUNDLED,
    DEMO_ARTIFACT,
    DEMO_WEIGHTS,
    ModelSource,
    open_source,
    unknown_model,
)
from edgekit.plugins import load_target
from edgekit.runtime.open_options import OpenOptions

# Subfolders of a store entry: the artifact, and its neutral weights until it is complete.
_ARTIFACT, _WEIGHTS = "artifact", "weights"


def artifact_for(model: str, opening: OpenOptions) -> Path:
    """Return the artifact at path `model`, or the artifact of model `model` for this machine.

    An artifact of the cache is held until the running command ends, so that no other process removes it.

    A clone has one of `demo` for onnx. Any other is planned and exported where the cache has none yet. A line on stderr
    names the choice and its reason.
    """
    path, context, target = Path(model), opening.context, opening.target
    if holds_artifact(path) or not _names_model(model):
        if not path.exists():
            raise unknown_model(model)
        return path
    if is_gguf(path) and target in (None, TARGET) and load_target(TARGET).missing() is None:
        with suppress(Unsupported):  # types that llama.cpp has no name for here: they are exported
            click.echo(f"edgekit: {open_file(path, context).plan.notes[0]}", err=True)
            return path
    if model == "demo" and DEMO_ARTIFACT.is_dir() and _is_answered_as_shipped(context, target):
        return DEMO_ARTIFACT
    source = _opened(model)
    store = bounded_store("artifacts")
    is_made = False

    def make(folder: Path) -> None:
        from edgekit.cli._export_here import export_here  # a cached artifact needs neither planner nor quantiser

        nonlocal is_made
        is_made = True
        if not (folder / _ARTIFACT).exists():
            export_here(source, context, target, folder / _ARTIFACT, folder / _WEIGHTS)
        shutil.rmtree(folder / _WEIGHTS, ignore_errors=True)  # packed into the artifact: a second copy of the model

    def say_waiting(holder: str) -> None:
        click.echo(f"edgekit: {holder} is making the same artifact; waiting", err=True)

    absent: list[str] = []  # targets of artifacts that another environment made, and this one cannot run
    while True:
        key = _key(source, context, target, absent)
        place, hold = store.hold(key, make, lambda entry: open_artifact(entry / _ARTIFACT), say_waiting)
        kept = read_manifest(place / _ARTIFACT)
        if is_made or kept.target().missing() is None:
            break
        hold.close()
        absent.append(kept.plan.target)
    context_of_command = click.get_current_context(silent=True)
    if context_of_command is not None:
        context_of_command.call_on_close(hold.close)
    if not is_made:
        click.echo(f"edgekit: {model} as {kept.plan.built_as}, made earlier", err=True)
    return place / _ARTIFACT


def _is_answered_as_shipped(context: int | None, target: str | None) -> bool:
    """Return whether a clone's artifact of `demo` can answer here; if so, print a line about it to stderr."""
    artifact = read_manifest(DEMO_ARTIFACT)
    plan = artifact.plan
    if target not in (None, plan.target) or (context or 0) > plan.context or artifact.target().missing() is not None:
        return False
    click.echo(f"edgekit: demo as {plan.built_as}, as it comes with edgekit", err=True)
    return True


def _names_model(model: str) -> bool:
    """Return whether `model` is a bundled name, a model folder, a .gguf file, or a hub id that is not a path."""
    path = Path(model)
    if model in BUNDLED or (path / "config.json").is_file() or is_gguf(path):
        return True
    return not path.exists() and model.count("/") == 1 and not model.startswith((".", "/", "~"))


def _opened(model: str) -> ModelSource:
    """Open the model with its weights; prefer the copy in the hub's cache, and what comes with edgekit."""
    if model == "demo":
        return open_source(DEMO_WEIGHTS)._replace(given=model)
    try:
        return open_source(model, need_weights=True, offline=True)
    except InvalidInput:
        return open_source(model, need_weights=True)


def _key(source: ModelSource, context: int | None, target: str | None, absent: list[str]) -> str:
    described = source.hashes(), context, target, absent, edgekit.__version__
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
