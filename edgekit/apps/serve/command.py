"""`edgekit serve`: a local server for clients of OpenAI's, Anthropic's and Ollama's APIs."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from pydantic import Field

from edgekit import OpenOptions
from edgekit.apps.serve.settings import ServerSettings
from edgekit.commands import SectionedCommand, SomeFields, adapter_of, artifact_for, draw, json_option, options
from edgekit.common.base import Frozen
from edgekit.common.log import log
from edgekit.common.options import Option
from edgekit.common.units import show_bytes
from edgekit.errors import InvalidInput, vendor_errors

if TYPE_CHECKING:
    from edgekit.apps.serve.service import Service


class ServedRuntimes(Frozen):
    """Names of the served models and their adapters."""

    aliases: Annotated[tuple[str, ...], Option(name="alias", metavar="NAME=MODEL")] = Field(
        default=(), description="Another name of a model, for tools with fixed names; `gpt-*` matches many."
    )
    adapters: Annotated[tuple[str, ...], Option(name="adapter", metavar="NAME[=PATH]")] = Field(
        default=(),
        description="A LoRA adapter of the first model, served as MODEL:NAME: a PEFT folder, or one in the artifact.",
    )


_EXAMPLES = """\b
Examples:
  edgekit serve my-artifact --port 8000
  edgekit serve demo --host 0.0.0.0 --api-key-file keys
"""


@click.command(name="serve", cls=SectionedCommand, epilog=_EXAMPLES)
@click.argument("models", nargs=-1, required=True)
@options(
    served=ServedRuntimes,
    opening=SomeFields(OpenOptions, ("target", "context", "sequences", "exact", "draft")),
    settings=ServerSettings,
)
@json_option("Print the served models as one line of JSON.")
def command(
    models: tuple[str, ...], served: ServedRuntimes, opening: OpenOptions, settings: ServerSettings, as_json: bool
) -> None:
    """Serve MODELS over HTTP: artifacts, models' folders, .gguf files, hub ids, or `demo`.

    A model has the name of its artifact; NAME=PATH gives it another. The first model is the default and is opened at
    the start, the others at their first request.
    """
    with vendor_errors("edgekit[serve]"):
        from edgekit.apps.serve.models import Models
        from edgekit.apps.serve.pool import on_demand, pool_settings
        from edgekit.apps.serve.server import address_of, check_exposure, listen, run
        from edgekit.apps.serve.service import Service

    check_exposure(settings)
    named = dict(_named(each) for each in models)
    if len(named) < len(models):
        raise InvalidInput("two models have one name; give one of them another, as NAME=PATH")
    listener = listen(settings)
    opening = opening.model_copy(update={"warm_template": True})
    adapters = dict(adapter_of(each) for each in served.adapters)
    sources = {
        name: on_demand(artifact_for(model, opening), opening, adapters=None if index else adapters)
        for index, (name, model) in enumerate(named.items())
    }
    aliases = dict(_alias(each) for each in served.aliases)
    models_served = Models(sources, aliases, pool_settings(settings, len(sources)))
    first = models_served.pool.models[0]
    models_served.pool.open_now(first)
    with ExitStack() as opened:
        if first.runtime is not None:
            opened.enter_context(first.runtime.runtime)
        service = Service.of(models_served, settings)
        described = _described(service, address_of(listener))
        if as_json:
            click.echo(json.dumps(described))
        else:
            _show(described)
        log.info("serving %d models", len(sources))
        run(service, listener)


def _named(given: str) -> tuple[str, str]:
    """Split `NAME=PATH`; a path alone gets the name of its artifact."""
    name, equals, path = given.partition("=")
    if equals and name and path and not Path(given).exists():
        return name, path
    return Path(given).stem if given.endswith(".gguf") else Path(given).name or given, given


def _alias(given: str) -> tuple[str, str]:
    name, equals, model = given.partition("=")
    if not (name and equals and model):
        raise InvalidInput(f"--alias {given!r}: must be NAME=MODEL")
    return name, model


def _described(service: Service, address: str) -> dict[str, Any]:
    settings = service.settings
    return {
        "url": address,
        "models": [
            {
                "name": name,
                "context": model.context,
                "status": model.model.state,
                "sequences": model.model.sequences,
                "predicted_private_bytes": model.model.predicted_bytes,
            }
            for name in service.models.names()
            for model in [service.models.find(name)]
        ],
        "keys": len(service.keys),
        "allowed_origins": list(settings.allowed_origins),
        "allowed_hosts": list(settings.allowed_hosts),
        "queue": settings.max_queued,
        "overflow": settings.overflow,
        "overflow_model": settings.overflow_model,
        "memory": settings.memory,
    }


def _show(described: dict[str, Any]) -> None:
    rows = [
        (
            each["name"],
            f"{each['context']:,} tokens",
            f"{each['sequences']} at a time, {described['queue']} waiting",
            show_bytes(each["predicted_private_bytes"]),
            "open" if each["status"] == "ready" else "at its first request",
        )
        for each in described["models"]
    ]
    draw(("model", "context", "answers", "memory predicted", "opened"), rows)
    keys = f"{described['keys']} keys" if described["keys"] else "no key: this machine only"
    origins = ", ".join(described["allowed_origins"]) or "none"
    click.echo(f"at         {described['url']}/v1")
    click.echo(f"protected  {keys}; web pages that may call: {origins}")
    if described["memory"] is not None:
        click.echo(f"memory     {show_bytes(described['memory'])} of private memory for all models together")
    if described["overflow_model"] is not None:
        click.echo(f"overflow   conversations that would wait too long go to {described['overflow_model']}")
    if described["overflow"] is not None:
        click.echo(f"overflow   clients are redirected to {described['overflow']}")
    click.echo("ctrl-C stops: running answers are finished first")
