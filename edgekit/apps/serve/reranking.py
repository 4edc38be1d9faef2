"""`POST /v1/rerank`: documents ordered for a query, in the form that Cohere's, Jina's and vLLM's clients read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from edgekit.apps.serve.call import Call, json_response
from edgekit.apps.serve.embeddings import MOST_TEXTS, read_texts
from edgekit.apps.serve.fields import WHOLE, ApiFields, Name, OwnFields, WithoutEffect

if TYPE_CHECKING:
    from starlette.responses import Response


class RerankFields(OwnFields):
    """Options of `Runtime.rerank`."""

    instruction: str | None = None
    truncate: bool | None = None


class RerankDocument(ApiFields):
    """A document as an object."""

    text: str


class RerankBody(ApiFields):
    """The body of a reranking."""

    model: Name | None = None
    query: str
    documents: Annotated[list[str | RerankDocument], Field(min_length=1, max_length=MOST_TEXTS)]
    top_n: Annotated[int, Field(ge=1, le=1 << 24), WHOLE] | None = None
    return_documents: bool | None = None
    edgekit: RerankFields | None = None

    user: WithoutEffect = None

    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


async def rerank(call: Call) -> Response:
    """Return the index and score of each document, the best first; with `return_documents`, also its text."""
    body = await call.body(RerankBody)
    model = await call.model(body.model)
    texts, submit = body.texts(), model.runtime.runtime.submit_rerank
    options = {**OwnFields.of(body.edgekit), "top_n": body.top_n}
    ranked, tokens = await read_texts(
        call,
        model,
        lambda: submit(body.query, texts, **options, adapter=model.adapter),
        model.runtime.results,
    )
    results = [
        {"index": each.index, "relevance_score": each.score}
        | ({"document": {"text": texts[each.index]}} if body.return_documents else {})
        for each in ranked
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json_response({"object": "list", "model": model.name, "results": results, "usage": usage})
