"""Embeddings of texts: the hidden states of a text's tokens after the last norm, pooled to one vector.

A text runs in the scheduler like any other request, but no token is generated. Decoders process it in chunks, encoders
as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np

from edgekit.common.options import unknown_option
from edgekit.errors import ContextExceeded, InvalidInput, InvalidOption, Unsupported, quote_short
from edgekit.model.parts import POOLINGS, Pooling, TextEmbedding
from edgekit.runtime.generation.tokenizer import text_bytes
from edgekit.runtime.reading_request import ReadingJob, ReadingRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.contracts.engine import State
    from edgekit.runtime.driver import Driver
    from edgekit.runtime.generation.tokenizer import Codec
    from edgekit.runtime.request import RequestLimits

    Vectors = NDArray[np.float32]
    Pooled = NDArray[np.float64]


class EmbeddingParams(NamedTuple):
    """The prefix and length limit of a text, and how the hidden states of its tokens become a vector."""

    pooling: Pooling
    normalise: bool
    dimensions: int
    prefix: str
    max_tokens: int | None  # None: as many as the context

    def finished(self, vectors: Vectors) -> Vectors:
        """Cut vectors [texts, width] to the first `dimensions` values, and scale them to length 1."""
        cut = vectors[:, : self.dimensions].copy()
        if self.normalise:
            cut /= np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12)
        return cut


class EmbeddingOptions(TypedDict, total=False):
    """The options of `Runtime.embed`, which documents them."""

    pooling: Pooling | None
    normalise: bool | None
    dimensions: int | None
    prompt: str | None
    truncate: bool
    adapter: str | None


def embedding_params(stated: TextEmbedding, width: int | None, options: EmbeddingOptions) -> EmbeddingParams:
    """Complete the options of `embed` from the model's files; where they state no pooling, it is the mean."""
    unknown = options.keys() - EmbeddingOptions.__annotations__.keys()
    if unknown:
        raise unknown_option(min(unknown), EmbeddingOptions.__annotations__)
    if width is None:
        raise Unsupported("embed: this engine gives no hidden states; export for the onnx target on the CPU")
    pooling, dimensions = options.get("pooling") or stated.pooling or "mean", options.get("dimensions")
    if pooling not in POOLINGS:
        raise InvalidOption(f"pooling: {quote_short(pooling)} is not one of {', '.join(POOLINGS)}")
    if stated.dense and pooling == "max":
        raise InvalidOption("pooling: max: this model's dense layers follow a mean; leave the option out")
    if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= width):
        raise InvalidOption(f"dimensions: must be 1 to {width}, found {quote_short(dimensions)}")
    if dimensions not in (None, width):
        _check_shortened(stated.dimensions, dimensions)
    prompt, normalise = options.get("prompt"), options.get("normalise")
    name = stated.default_prompt if prompt is None else prompt
    if name is not None and name not in stated.prompts:
        known = ", ".join(stated.prompts) or "none"
        raise InvalidOption(f"prompt: {quote_short(name)} is not among the model's prompts ({known})")
    return EmbeddingParams(
        pooling,
        stated.normalise if normalise is None else normalise,
        dimensions or width,
        stated.prompts[name] if name is not None else "",
        stated.max_tokens,
    )


def _check_shortened(stated: tuple[int, ...] | None, dimensions: int) -> None:
    """Refuse a vector length that the model was not trained for: such vectors would be of little use."""
    if stated is None:
        raise InvalidOption(
            f"dimensions: {dimensions}: the model's files do not say that its vectors can be cut; if its card does, "
            'put "is_matryoshka": true into config.json and export again'
        )
    if stated and dimensions not in stated:
        raise InvalidOption(
            f"dimensions: {dimensions}: the model was trained for {', '.join(map(str, stated))} (config.json)"
        )


def encode_texts(
    codec: Codec, limits: RequestLimits, params: EmbeddingParams, texts: Sequence[str | Sequence[int]], truncate: bool
) -> list[list[int]]:
    """Return the tokens of each text, after its prefix; texts that are too long are cut or refused."""
    room = min(limits.text_tokens, params.max_tokens or limits.text_tokens)
    return [_encoded(codec, limits, params, index, text, room, truncate) for index, text in enumerate(texts)]


def _encoded(
    codec: Codec,
    limits: RequestLimits,
    params: EmbeddingParams,
    index: int,
    text: str | Sequence[int],
    room: int,
    truncate: bool,
) -> list[int]:
    if isinstance(text, str):
        whole = params.prefix + text
        if truncate:
            whole = whole[: text_bytes(room)]
        tokens = codec.encode(whole, add_special_tokens=True, most=None if truncate else room)
        if len(tokens) > room and truncate:
            tokens = codec.encode_at_most(whole, room)
    else:
        tokens = list(text)[:room] if truncate else list(text)
    if not tokens:
        raise InvalidInput(f"text {index} has no tokens; give text to embed")
    if any(type(token) is not int or not 0 <= token < limits.capabilities.vocabulary for token in tokens):
        raise InvalidInput(f"text {index} holds a token outside the vocabulary of {limits.capabilities.vocabulary}")
    if len(tokens) > room:
        raise ContextExceeded(len(tokens), room, "shorten the text, or allow `truncate`")
    return tokens


class EmbeddingRequest(ReadingRequest):
    """A request that feeds one text and pools the hidden states of its tokens."""

    reads_hidden = True

    def __init__(self, limits: RequestLimits, codec: Codec, tokens: Sequence[int], pooling: Pooling) -> None:
        super().__init__(limits, codec, tokens)
        self.vector: Vectors | None = None
        self._pooling = pooling
        self._pooled: Pooled | None = None  # the tokens so far

    def start(self, state: State) -> None:
        super().start(state)
        self._pooled = None

    def rows(self, fed: int, count: int) -> int:
        is_read = {"cls": fed == 0, "last": fed + count == len(self.tokens)}.get(self._pooling, True)
        return (1 if self._pooling == "last" else count) if is_read else 0

    def read(self, rows: Vectors) -> None:
        self._pooled = self._added(rows)

    def end(self) -> None:
        assert self._pooled is not None
        count = len(self.tokens) if self._pooling == "mean" else 1
        self.vector = (self._pooled / count).astype(np.float32)

    def _added(self, hidden: Vectors) -> Pooled:
        """Return the pooled values so far combined with the hidden states of one more chunk."""
        before, pooled = self._pooled, np.zeros(hidden.shape[-1])
        if self._pooling in ("cls", "last"):
            pooled[:] = hidden[0 if self._pooling == "cls" else -1]
        elif self._pooling == "max":
            pooled = np.max(hidden if before is None else [before, *hidden], axis=0)
        else:
            pooled += np.sum(hidden, axis=0, dtype=np.float64)
            pooled += 0.0 if before is None else before
        return pooled


class Embedding(ReadingJob["Sequence[int]", "Vectors"]):
    """Pending embeddings of several texts, and the requests that compute them."""

    def __init__(
        self,
        driver: Driver,
        limits: RequestLimits,
        codec: Codec,
        tokens: Sequence[Sequence[int]],
        params: EmbeddingParams,
    ) -> None:
        self._limits, self._codec, self._params = limits, codec, params
        super().__init__(driver, tokens, [len(each) for each in tokens])

    def request(self, item: Sequence[int]) -> EmbeddingRequest:
        return EmbeddingRequest(self._limits, self._codec, item, self._params.pooling)

    def result(self, request: EmbeddingRequest) -> Vectors | None:
        return request.vector

    def vectors(self) -> Vectors:
        """Wait for all texts and return their vectors [texts, dimensions]."""
        self.wait()
        return self.results()

    def results(self) -> Vectors:
        """Return the vectors, once every request has ended."""
        return self._params.finished(np.stack(self.in_order()))


def check_texts(texts: object) -> None:
    """Refuse anything but a list of texts or of token lists."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
        raise InvalidInput("texts: give a list with at least one text")
    if any(isinstance(each, bytes) or not isinstance(each, Sequence) for each in texts):
        raise InvalidInput("texts: each must be a text or a list of tokens")
