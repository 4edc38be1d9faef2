"""The ASGI application: routes over one service, behind the guard."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from edgekit.apps.serve import ollama
from edgekit.apps.serve.call import Endpoint, Handler
from edgekit.apps.serve.chat import chat_completions
from edgekit.apps.serve.completions import completions
from edgekit.apps.serve.embeddings import embeddings, ollama_embed, ollama_embeddings
from edgekit.apps.serve.exposition import metrics
from edgekit.apps.serve.guard import Guard, problem
from edgekit.apps.serve.listing import list_models, live, ready, show_model
from edgekit.apps.serve.messages import count_tokens, messages
from edgekit.apps.serve.models import Models
from edgekit.apps.serve.openapi import openapi
from edgekit.apps.serve.page import PAGE
from edgekit.apps.serve.pool import pool_settings
from edgekit.apps.serve.problems import ApiError
from edgekit.apps.serve.reranking import rerank
from edgekit.apps.serve.responses import responses
from edgekit.apps.serve.service import Service
from edgekit.apps.serve.settings import ServerSettings
from edgekit.apps.serve.tokens import detokenize, tokenize, tokenizer_info

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from edgekit import AsyncRuntime, Runtime
    from edgekit.apps.serve.pool import OnDemand

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:path}", show_model),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/responses", responses),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/v1/rerank", rerank),
    ("GET", "/openapi.json", openapi),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("GET", "/tokenizer_info", tokenizer_info),
    ("GET", "/metrics", metrics),
    ("GET", "/livez", live),
    ("GET", "/readyz", ready),
    ("GET", "/health", ready),
    ("GET", "/v1/health", ready),
)

OLLAMA: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/api/chat", ollama.chat),
    ("POST", "/api/generate", ollama.generate),
    ("GET", "/api/tags", ollama.tags),
    ("GET", "/api/ps", ollama.running),
    ("POST", "/api/show", ollama.show),
    ("GET", "/api/version", ollama.version),
    ("DELETE", "/api/delete", ollama.not_served),
    *(("POST", f"/api/{name}", ollama.not_served) for name in ("pull", "push", "create", "copy")),
    ("POST", "/api/embed", ollama_embed),
    ("POST", "/api/embeddings", ollama_embeddings),
)


def app(
    models: Mapping[str, Runtime | AsyncRuntime | OnDemand],
    settings: ServerSettings | None = None,
    *,
    aliases: Mapping[str, str] | None = None,
) -> ASGIApp:
    """Return an ASGI application that serves models under their names.

    Args:
        models: the served models by name; the first is the default. The application's lifespan closes open runtimes
            at its end. Models of `edgekit.apps.serve.on_demand` are opened and closed within `memory`.
        settings: access rules and limits. Host, port and shutdown times are not used; your own server decides them.
        aliases: other names that clients may use, or patterns such as `gpt-*`.

    Example:
        application = app({"small": edgekit.open("my-artifact"), "large": on_demand("my-artifact")})
    """
    settings = settings or ServerSettings()
    return application(Service.of(Models(models, aliases, pool_settings(settings, len(models))), settings))


def application(service: Service) -> ASGIApp:
    """The application of a service."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await service.models.pool.close()

    served = routes_of(service.settings)
    routes = [Route(path, Endpoint(service, path, handler), methods=[method]) for method, path, handler in served]
    handlers = {HTTPException: _refused_by_router}
    return Guard(Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers), service)  # type: ignore[arg-type]


def routes_of(settings: ServerSettings) -> tuple[tuple[str, str, Handler], ...]:
    """Every route of a server with these settings."""
    root = PAGE if settings.page else (("GET", "/", ollama.greeting),) if settings.ollama else ()
    return (*ROUTES, *(OLLAMA if settings.ollama else ()), *root)


async def _refused_by_router(request: Request, error: HTTPException) -> Response:
    """Return the error for an unknown path or method, in the form of the path's API."""
    if error.status_code == 404:
        found = ApiError(404, "there is nothing at this path; docs/server.md lists what is served", code="not_found")
    else:
        found = ApiError(error.status_code, "this path takes another method", code="method_not_allowed")
    found.headers |= dict(error.headers or {})
    return problem(found, request.scope)
