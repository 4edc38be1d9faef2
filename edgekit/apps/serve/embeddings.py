"""`POST /v1/embeddings`, and Ollama's `/api/embed` and `/api/embeddings`: vectors of texts."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import Field

from edgekit.apps.serve.call import Call, json_response
from edgekit.apps.serve.completions import TokenList
from edgekit.apps.serve.fields import WHOLE, ApiFields, Name, OwnFields, WithoutEffect, listed
from edgekit.apps.serve.models import ServedModel
from edgekit.apps.serve.ollama import OllamaBody

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from starlette.responses import Response

    from edgekit import ReadingJob

Job = TypeVar("Job", bound="ReadingJob[Any, Any]")
Result = TypeVar("Result")
MOST_TEXTS = 2048  # OpenAI's limit
_Dimensions = Annotated[int, Field(ge=1, le=1 << 24), WHOLE]
_Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS)]


class EmbeddingFields(OwnFields):
    """Options of `Runtime.embed`."""

    pooling: Literal["mean", "last", "cls", "max"] | None = None
    normalise: bool | None = None
    prompt: str | None = None
    truncate: bool | None = None


class EmbeddingBody(ApiFields):
    """The body of an embedding."""

    model: Name | None = None
    input: str | TokenList | Annotated[list[str | TokenList], Field(min_length=1, max_length=MOST_TEXTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: _Dimensions | None = None
    edgekit: EmbeddingFields | None = None

    user: WithoutEffect = None


class OllamaEmbed(OllamaBody):
    """The body of `/api/embed`."""

    input: str | _Texts
    truncate: bool | None = None
    dimensions: _Dimensions | None = None


class OllamaEmbeddings(OllamaBody):
    """The body of the older `/api/embeddings`."""

    prompt: str


class EmbeddingResult(NamedTuple):
    """The vectors of one request, its tokens, and the seconds that it took."""

    vectors: NDArray[np.float32]
    tokens: int
    seconds: float


async def embeddings(call: Call) -> Response:
    """Return one vector for each text, in the order of the texts."""
    body = await call.body(EmbeddingBody)
    model = await call.model(body.model)
    options = {**OwnFields.of(body.edgekit), "dimensions": body.dimensions}
    found = await embed(call, model, listed(body.input), options)
    vectors: list[Any] = [vector.tolist() for vector in found.vectors]
    if body.encoding_format == "base64":
        vectors = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in found.vectors]
    data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(vectors)]
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    return json_response({"object": "list", "data": data, "model": model.name, "usage": usage})


async def ollama_embed(call: Call) -> Response:
    """Return embeddings in Ollama's form. Long texts are cut unless `truncate` is false."""
    body = await call.body(OllamaEmbed)
    model = await body.model_of(call)
    texts = [body.input] if isinstance(body.input, str) else body.input
    options = {"dimensions": body.dimensions, "truncate": body.truncate is not False}
    found = await embed(call, model, texts, options)
    return json_response(
        {
            "model": model.name,
            "embeddings": found.vectors.tolist(),
            "total_duration": round(found.seconds * 1e9),
            "load_duration": 0,
            "prompt_eval_count": found.tokens,
        }
    )


async def ollama_embeddings(call: Call) -> Response:
    """Return the vector of one text."""
    body = await call.body(OllamaEmbeddings)
    found = await embed(call, await body.model_of(call), [body.prompt], {"truncate": True})
    return json_response({"embedding": found.vectors[0].tolist()})


async def embed(
    call: Call, model: ServedModel, texts: Sequence[str | Sequence[int]], options: dict[str, Any]
) -> EmbeddingResult:
    """Embed texts within the limits of the server."""
    began, submit = perf_counter(), model.runtime.runtime.submit_embed
    vectors, tokens = await read_texts(
        call, model, lambda: submit(texts, **options, adapter=model.adapter), model.runtime.results
    )
    return EmbeddingResult(vectors, tokens, perf_counter() - began)


async def read_texts(
    call: Call, model: ServedModel, submit: Callable[[], Job], wait: Callable[[Job], Awaitable[Result]]
) -> tuple[Result, int]:
    """Submit texts that are read, within the limits of the server; return the result, and the number of their tokens.

    The end of the call cancels the job in any case.
    """
    admission = call.service.admission
    call.stack.enter_context(admission.slots(model, call.key, 1))
    job = await asyncio.to_thread(submit)
    call.stack.callback(job.cancel_soon)
    tokens = sum(job.tokens)
    with admission.prompt_tokens(model, tokens):
        result = await wait(job)
    call.ignore("x-edgekit-model", [model.name])
    return result, tokens
