"""Methods of a runtime that read text and generate none: log-probabilities, embeddings and rankings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgekit.errors import InvalidInput, InvalidOption, Unsupported, quote_short
from edgekit.model.parts import TextEmbedding
from edgekit.runtime.embedding import Embedding, check_texts, embedding_params, encode_texts
from edgekit.runtime.generation.sampling import MAX_TOP
from edgekit.runtime.lifetimes import OwnedByProcess
from edgekit.runtime.prompts import Prompt, encode_prompt, text_of
from edgekit.runtime.reranking import Ranked, Ranking, check_reranking, encode_documents, logit_reader
from edgekit.runtime.scoring import Branch, Score, Scoring, branches_for

if TYPE_CHECKING:
    from typing import Unpack

    from edgekit.artifact.artifact import Artifact
    from edgekit.contracts.kv_policy import KVCacheConfig
    from edgekit.runtime.driver import Driver
    from edgekit.runtime.embedding import EmbeddingOptions, Vectors
    from edgekit.runtime.generation.chat_template import ChatTemplate
    from edgekit.runtime.generation.tokenizer import Codec
    from edgekit.runtime.loras import LoraRegistry
    from edgekit.runtime.pressure import PressureControl
    from edgekit.runtime.request import RequestLimits
    from edgekit.runtime.reranking import RerankingOptions


class TextReading(OwnedByProcess):
    """The methods of a `Runtime` that generate nothing."""

    artifact: Artifact | None
    codec: Codec
    kv_config: KVCacheConfig
    pressure: PressureControl
    template: ChatTemplate
    _adapters: LoraRegistry
    _driver: Driver
    _limits: RequestLimits

    def score(
        self, prompt: Prompt, continuations: Sequence[str | Sequence[int]], *, adapter: str | None = None
    ) -> list[Score]:
        """Return the log-probabilities of each of `continuations` after `prompt`: a text, tokens or messages.

        Each score has natural logarithms, one for each token. The prompt is fed once. The prefix cache is neither read
        nor written, so equal calls give equal numbers. Raises the errors of `submit`.

            >>> blue, green = runtime.score("The sky is", [" blue", " green"])
            >>> print(blue.total > green.total)
        """
        return self.submit_score(prompt, continuations, adapter=adapter).scores()

    def prompt_logprobs(self, prompt: Prompt, *, top: int = 0, adapter: str | None = None) -> Score:
        """Return the log-probabilities of the tokens of `prompt`, except its first, which follows no token.

        `top`: the number of likeliest tokens to report at each position, at most 20. Raises the errors of `submit`.
        """
        return self.submit_prompt_logprobs(prompt, top=top, adapter=adapter).scores()[0]

    def submit_prompt_logprobs(self, prompt: Prompt, *, top: int = 0, adapter: str | None = None) -> Scoring:
        """Queue a `prompt_logprobs` request and return at once."""
        if type(top) is not int or not 0 <= top <= MAX_TOP:
            raise InvalidOption(f"top: must be 0 to {MAX_TOP}, found {quote_short(top)}")
        tokens = self._encoded(prompt)[0]
        if len(tokens) < 2:
            raise InvalidInput(
                f"the prompt has {len(tokens)} tokens and its first has no probability; give two or more"
            )
        return self._score([Branch(tokens, 1)], adapter, top)

    def submit_score(
        self, prompt: Prompt, continuations: Sequence[str | Sequence[int]], *, adapter: str | None = None
    ) -> Scoring:
        """Queue a `score` request and return at once; all queued requests advance while one is waited for."""
        if isinstance(continuations, str) or not continuations:
            raise InvalidInput("continuations: give a list with at least one text")
        text, tokens = text_of(prompt, self.template, self._limits), self._encoded(prompt)[0]
        most = self._limits.text_tokens
        return self._score(branches_for(self.codec, text, tokens, continuations, most), adapter)

    def embed(self, texts: Sequence[str | Sequence[int]], **options: Unpack[EmbeddingOptions]) -> Vectors:
        """Return one vector for each text, or list of tokens, as float32 [texts, dimensions].

            >>> query, *passages = runtime.embed(["What is a fjord?", "A long inlet.", "A kind of bread."])
            >>> print(passages @ query)

        Args:
            texts: at least one. They run in batches of similar length.
            pooling: `mean` of all tokens, the `last` one, the first (`cls`) or the `max`. None: as the model's files
                state it.
            normalise: scale vectors to length 1. None: as the model's files state it, otherwise True.
            dimensions: keep only this many values, before normalising; refused unless the model's
                files say that it was trained for that (`is_matryoshka` or `matryoshka_dimensions` in config.json).
            prompt: the name of one of the model's prompts, which is put before each text. None: the model's default.
                An instruction of your own is part of the text.
            truncate: cut texts that are too long, instead of refusing them.
            adapter: the name of a loaded LoRA adapter.

        Raises:
            InvalidOption: an option is unknown or does not apply to this model.
            InvalidInput: a text is empty or has unknown tokens; ContextExceeded if it is too long.
            Unsupported: this engine returns no hidden states.
        """
        return self.submit_embed(texts, **options).vectors()

    def submit_embed(self, texts: Sequence[str | Sequence[int]], **options: Unpack[EmbeddingOptions]) -> Embedding:
        """Queue an `embed` request and return at once; all queued requests advance while one is waited for."""
        check_texts(texts)
        # Without an artifact nothing is stated, so every length is allowed.
        stated = self.artifact.plan.model.embedding if self.artifact else TextEmbedding(dimensions=())
        params = embedding_params(stated or TextEmbedding(), self._limits.capabilities.hidden_size, options)
        limits = self._limits_with(options.get("adapter"))
        tokens = encode_texts(self.codec, limits, params, texts, options.get("truncate", False))
        return Embedding(self._driver, limits, self.codec, tokens, params)

    def rerank(self, query: str, documents: Sequence[str], **options: Unpack[RerankingOptions]) -> list[Ranked]:
        """Score each of `documents` for `query` with a reranker; return their indices and scores, the best first.

            >>> texts = ["A kind of bread.", "A long inlet between cliffs."]
            >>> for found in runtime.rerank("What is a fjord?", texts, top_n=1):
            ...     print(texts[found.index], found.score)

        Args:
            query: the text that is searched for.
            documents: at least one. They run in batches of similar length.
            instruction: what makes a document relevant, for models that were trained with instructions
                (Qwen3-Reranker). None: the one for a web search.
            top_n: return only this many. None: all.
            truncate: cut documents that are too long, instead of refusing them.
            adapter: the name of a loaded LoRA adapter.

        Raises:
            InvalidOption: an option is unknown or does not apply to this model.
            InvalidInput: a document is empty; ContextExceeded if it is too long.
            Unsupported: this model is no reranker.
        """
        return self.submit_rerank(query, documents, **options).ranked()

    def submit_rerank(self, query: str, documents: Sequence[str], **options: Unpack[RerankingOptions]) -> Ranking:
        """Queue a `rerank` request and return at once; all queued requests advance while one is waited for."""
        reader = logit_reader(self.artifact.plan.model.reranking if self.artifact else None, self.codec)
        check_reranking(reader, query, documents, options)
        limits = self._limits_with(options.get("adapter"))
        pairs = encode_documents(self.codec, limits, reader, query, documents, options)
        return Ranking(self._driver, limits, self.codec, pairs, reader, options.get("top_n"))

    def _limits_with(self, adapter: str | None) -> RequestLimits:
        kv_config = self.pressure.kv_config(self.kv_config, self._limits.policy)
        return self._limits._replace(kv_config=self._adapters.kv_config(kv_config, adapter))

    def _check_generates(self, what: str) -> None:
        """Refuse methods that need logits if the model is an encoder."""
        capabilities = self._limits.capabilities
        if not capabilities.generates:
            use = "rerank" if capabilities.classifies else "embed"
            raise Unsupported(f"{what}: this model is an encoder, which writes no text; use {use}")

    def _encoded(
        self,
        prompt: Prompt,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        limits: RequestLimits | None = None,
    ) -> tuple[list[int], list[int]]:
        limits = limits or self._limits
        return encode_prompt(prompt, self.codec, self.template, limits, tools, template_options)

    def _score(self, branches: Sequence[Branch], adapter: str | None, top: int = 0) -> Scoring:
        self._check_generates("score")
        return Scoring(self._driver, self._limits_with(adapter), self.codec, branches, top)
