"""`GET /openapi.json`: the request bodies, described from the pydantic models that check them."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import models_json_schema

from edgekit.apps.serve.call import Call, json_response
from edgekit.apps.serve.chat import ChatBody
from edgekit.apps.serve.completions import CompletionBody
from edgekit.apps.serve.embeddings import EmbeddingBody
from edgekit.apps.serve.messages import MessagesBody, PromptBody
from edgekit.apps.serve.reranking import RerankBody
from edgekit.apps.serve.responses import ResponseBody
from edgekit.apps.serve.tokens import DetokenizeBody, TokenizeBody

if TYPE_CHECKING:
    from pydantic import BaseModel
    from starlette.responses import Response

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponseBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": PromptBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/rerank": RerankBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
READ = ("/v1/models", "/tokenizer_info", "/metrics", "/livez", "/readyz", "/health")
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_REFUSALS = (400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 500, 501, 503, 504)


async def openapi(call: Call) -> Response:
    """Return the OpenAPI document of this server with its present models."""
    return json_response(described(call.service.models.names()))


def described(models: list[str]) -> dict[str, Any]:
    """Return the OpenAPI document."""
    schemas, shared = models_json_schema(
        [(body, "validation") for body in dict.fromkeys(BODIES.values())], ref_template="#/components/schemas/{model}"
    )
    components = shared.get("$defs", {})
    for name in ("ChatBody", "CompletionBody", "ResponseBody", "MessagesBody"):
        components[name]["properties"]["model"] = {"anyOf": [{"type": "string", "examples": models}, {"type": "null"}]}
    error = {"description": "refused", "content": {"application/json": {"schema": {"type": "object"}}}}
    refusals = {str(status): error for status in _REFUSALS}
    paths: dict[str, Any] = {}
    for path, body in BODIES.items():
        kinds = {"application/json": {"schema": {"type": "object"}}}
        if path in _STREAMED:
            kinds["text/event-stream"] = {}  # events, which OpenAPI 3.1 has no words for
        schema = schemas[body, "validation"]
        paths[path] = {
            "post": {
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"200": {"description": "answered", "content": kinds}, **refusals},
            }
        }
    for path in READ:
        paths[path] = {"get": {"responses": {"200": {"description": "answered"}, **refusals}}}
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "edgekit serve", "version": importlib.metadata.version("edgekit")},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": keys},
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }
