"""`GET /v1/models` and the health checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgekit.apps.serve.call import Call, json_response
from edgekit.apps.serve.models import ServedModel
from edgekit.apps.serve.problems import ApiError

if TYPE_CHECKING:
    from starlette.responses import Response


async def list_models(call: Call) -> Response:
    """List every model, the default one first."""
    models = call.service.models
    listed = [_described(call, models.find(name)) for name in models.names()]
    if "anthropic-version" not in call.request.headers:
        return json_response({"object": "list", "data": listed})
    data = [{"type": "model", "id": each["id"], "display_name": each["id"], "created_at": _CREATED} for each in listed]
    return json_response({"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]})


_CREATED = "2026-01-01T00:00:00Z"


async def show_model(call: Call) -> Response:
    """Describe one model; its name may contain slashes."""
    return json_response(_described(call, call.service.models.find(call.request.path_params["name"])))


def _described(call: Call, model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": call.service.models.created,
        "owned_by": "edgekit",
        "max_model_len": model.context,
        "status": model.model.state,
        "capabilities": ["completion"] if model.writes_text else ["embedding"],
        "parent": model.name.rpartition(":")[0] if model.adapter else None,
    }


async def live(call: Call) -> Response:
    """Answer that the process is alive."""
    return json_response({"status": "ok"})


async def ready(call: Call) -> Response:
    """Answer 200 if new requests are accepted and run, 503 while the server drains, a queue is full or none runs."""
    service = call.service
    if service.admission.is_draining:
        raise ApiError(503, "the server is being stopped", code="draining", retry_after_s=1)
    models = service.models.pool.models
    for model in models:
        if model.runtime is not None and (problem := model.runtime.problem()):
            raise ApiError(503, f"{model.name} does not answer: {problem}", code="server_overloaded", retry_after_s=5)
    full = [model.name for model in models if service.admission.is_full(model)]
    if full:
        raise ApiError(503, f"the queue of {full[0]} is full", code="server_overloaded", retry_after_s=1)
    return json_response({"status": "ok", "models": {model.name: model.state for model in models}})
