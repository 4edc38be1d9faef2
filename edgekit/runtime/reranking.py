"""Scores of documents for a query, by models that were trained as rerankers.

A pair of query and document runs in the scheduler like any other request. It ends in one logit: of an encoder's
classifier, or of the token `yes` against `no`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from edgekit.common.options import unknown_option
from edgekit.errors import ContextExceeded, InvalidInput, InvalidOption, Unsupported, quote_short
from edgekit.model.reranking import SYSTEM
from edgekit.runtime.generation.tokenizer import check_size, text_bytes
from edgekit.runtime.reading_request import ReadingJob, ReadingRequest

if TYPE_CHECKING:
    from edgekit.contracts.engine import Logits
    from edgekit.model.parts import Reranking
    from edgekit.runtime.driver import Driver
    from edgekit.runtime.generation.tokenizer import Codec
    from edgekit.runtime.request import RequestLimits

# Qwen3-Reranker's published prompt.
_BEFORE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document's index in the given list, and its score: higher is more relevant."""

    index: int
    score: float


class RerankingOptions(TypedDict, total=False):
    """The options of `Runtime.rerank`, which documents them."""

    instruction: str | None
    top_n: int | None
    truncate: bool
    adapter: str | None


class LogitReader(NamedTuple):
    """Reads a score from the last logits of a pair."""

    answers: tuple[int, int] | None  # the tokens `yes` and `no`; None: a classifier's only logit
    is_share: bool  # the score is the logit's sigmoid

    def score(self, logits: Logits) -> float:
        if self.answers is None:
            value = float(logits[-1, 0])
        else:
            yes, no = self.answers
            value = float(logits[-1, yes]) - float(logits[-1, no])
        if not self.is_share:
            return value
        small = math.exp(-abs(value))
        return 1 / (1 + small) if value >= 0 else small / (1 + small)


def logit_reader(stated: Reranking | None, codec: Codec) -> LogitReader:
    """Return how a model's scores are read. Raises `Unsupported` for a model that is no reranker."""
    if stated is None:
        raise Unsupported(
            "rerank: this model is no reranker: neither an encoder with a classifier of one label, nor of "
            "Qwen3-Reranker's kind; use embed to compare vectors"
        )
    is_share = stated.activation == "sigmoid"
    if stated.kind == "classifier":
        return LogitReader(None, is_share)
    yes, no = (codec.id_of(text) if id_ is None else id_ for text, id_ in (("yes", stated.yes), ("no", stated.no)))
    if yes is None or no is None:
        raise Unsupported("rerank: the tokenizer has no tokens `yes` and `no`; take it from the same model")
    return LogitReader((yes, no), is_share)


def check_reranking(reader: LogitReader, query: object, documents: object, options: RerankingOptions) -> None:
    """Refuse arguments of another kind, and options that do not apply."""
    unknown = options.keys() - RerankingOptions.__annotations__.keys()
    if unknown:
        raise unknown_option(min(unknown), RerankingOptions.__annotations__)
    if not isinstance(query, str):
        raise InvalidInput("query: give a text")
    if isinstance(documents, str) or not isinstance(documents, Sequence) or not documents:
        raise InvalidInput("documents: give a list with at least one text")
    if any(not isinstance(each, str) for each in documents):
        raise InvalidInput("documents: each must be a text")
    top_n, instruction = options.get("top_n"), options.get("instruction")
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        raise InvalidOption(f"top_n: must be 1 or more, found {quote_short(top_n)}")
    if instruction is not None and reader.answers is None:
        raise InvalidOption("instruction: this model takes none; it scores the pair of texts as they are")


def encode_documents(
    codec: Codec,
    limits: RequestLimits,
    reader: LogitReader,
    query: str,
    documents: Sequence[str],
    options: RerankingOptions,
) -> list[tuple[list[int], int]]:
    """Return the tokens of each pair, and the index of the document's first one where a model asks for it."""
    room, cuts = limits.text_tokens, options.get("truncate", False)
    pairs = []
    for index, document in enumerate(documents):
        if not document:
            raise InvalidInput(f"document {index} is empty; give text to score")
        if reader.answers is None:
            tokens, second = codec.encode_pair(query, document, room, cuts=cuts)
        else:
            tokens, second = _prompted(codec, query, document, options.get("instruction"), room, cuts), 0
        if len(tokens) > room:
            raise ContextExceeded(len(tokens), room, "shorten the document or the query, or allow `truncate`")
        pairs.append((tokens, second))
    return pairs


def _prompted(codec: Codec, query: str, document: str, instruction: str | None, room: int, cuts: bool) -> list[int]:
    before, after = (codec.encode(text, add_special_tokens=False) for text in (_BEFORE, _AFTER))
    asked = f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>: "
    check_size(asked, room)
    text = asked + (document[: text_bytes(room)] if cuts else document)
    pair = codec.encode(text, add_special_tokens=False, most=None if cuts else room)
    if cuts:
        # The question and one token of the document stay; `encode_documents` refuses them if they are too many.
        least = len(codec.encode(asked, add_special_tokens=False)) + 1
        pair = pair[: max(least, room - len(before) - len(after))]
    return [*before, *pair, *after]


class RerankingRequest(ReadingRequest):
    """A request that feeds one pair of query and document, and reads its score."""

    def __init__(self, limits: RequestLimits, codec: Codec, pair: tuple[list[int], int], reader: LogitReader) -> None:
        tokens, second = pair
        super().__init__(limits, codec, tokens, second)
        self.score: float | None = None
        self._reader = reader

    def rows(self, fed: int, count: int) -> int:
        return int(fed + count == len(self.tokens))

    def read(self, rows: Logits) -> None:
        self.score = self._reader.score(rows)

    def end(self) -> None:
        assert self.score is not None


class Ranking(ReadingJob["tuple[list[int], int]", float]):
    """Pending scores of documents, and the requests that compute them."""

    def __init__(
        self,
        driver: Driver,
        limits: RequestLimits,
        codec: Codec,
        pairs: Sequence[tuple[list[int], int]],
        reader: LogitReader,
        top_n: int | None = None,
    ) -> None:
        self._limits, self._codec, self._reader, self._top_n = limits, codec, reader, top_n
        super().__init__(driver, pairs, [len(tokens) for tokens, _ in pairs])

    def request(self, item: tuple[list[int], int]) -> RerankingRequest:
        return RerankingRequest(self._limits, self._codec, item, self._reader)

    def result(self, request: RerankingRequest) -> float | None:
        return request.score

    def ranked(self) -> list[Ranked]:
        """Wait for all scores and return them, the best first."""
        self.wait()
        return self.results()

    def results(self) -> list[Ranked]:
        """Return the scores, the best first, once every request has ended."""
        return best_first(self.in_order(), self._top_n)


def best_first(scores: Sequence[float], top_n: int | None) -> list[Ranked]:
    """Return indices and scores, the best first; equal scores in the order of the documents."""
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    return [Ranked(place, scores[place]) for place in order[:top_n]]
