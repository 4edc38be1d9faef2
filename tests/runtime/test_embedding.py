"""Embeddings of texts: the engine's hidden states, pooled; the same however a text is cut, batched or interrupted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import runtimes

from edgekit.contracts.engine import Chunk
from edgekit.errors import Cancelled, ContextExceeded, EdgekitError, InvalidInput, InvalidOption, Unsupported
from edgekit.model.parts import TextEmbedding
from edgekit.runtime.embedding import embedding_params
from edgekit.runtime.runtime import Runtime
from edgekit.testing import FakeEngine

TEXTS = ["the cat", " sat on the mat. " * 7, "naïve façade", "a"]


def hidden(runtime: Runtime, text: str) -> Any:
    """The hidden states of a text, fed to the bare engine in one piece."""
    tokens = runtime.encode(text)
    engine = FakeEngine(vocabulary=runtime.codec.vocabulary, max_chunk_tokens=512)
    return engine.forward([Chunk(engine.start(runtime.kv_config), tokens, len(tokens), hidden=True)])[0]


@pytest.mark.parametrize("pooling", ["mean", "last", "cls", "max"])
@pytest.mark.parametrize("chunk_tokens", [5, 64])
def test_vectors_are_the_engines_hidden_states_pooled(pooling: Any, chunk_tokens: int) -> None:
    pool = {"mean": lambda h: h.mean(0), "last": lambda h: h[-1], "cls": lambda h: h[0], "max": lambda h: h.max(0)}
    with runtimes.make_runtime(chunk_tokens=chunk_tokens, sequences=3) as runtime:
        vectors = runtime.embed(TEXTS, pooling=pooling, normalise=False)
        assert vectors.dtype == np.float32 and vectors.shape == (4, 16)
        for text, vector in zip(TEXTS, vectors, strict=True):
            assert vector == pytest.approx(pool[pooling](hidden(runtime, text)), abs=1e-5)
        assert runtime.metrics().requests == 4


def test_vectors_are_cut_and_then_normalised() -> None:
    with runtimes.make_runtime() as runtime:
        whole = runtime.embed(TEXTS, pooling="mean", normalise=False)
        cut = runtime.embed(TEXTS, pooling="mean", dimensions=4)
        assert cut == pytest.approx(whole[:, :4] / np.linalg.norm(whole[:, :4], axis=1, keepdims=True), abs=1e-6)


@pytest.mark.parametrize(
    ("stated", "dimensions", "said"),
    [(None, 4, "files do not say"), ((8,), 4, "was trained for 8"), ((4, 8), 4, ""), ((), 4, ""), (None, 16, "")],
)
def test_vectors_are_cut_only_where_the_model_was_trained_for_it(
    stated: tuple[int, ...] | None, dimensions: int, said: str
) -> None:
    files = TextEmbedding(pooling="mean", dimensions=stated)
    if not said:
        assert embedding_params(files, 16, {"dimensions": dimensions}).dimensions == dimensions
        return
    with pytest.raises(InvalidOption, match=f"dimensions: {dimensions}: .*{said}"):
        embedding_params(files, 16, {"dimensions": dimensions})


def test_tokens_are_embedded_as_their_text() -> None:
    with runtimes.make_runtime() as runtime:
        tokens = [runtime.encode(text) for text in TEXTS]
        assert (runtime.embed(tokens, pooling="last") == runtime.embed(TEXTS, pooling="last")).all()
        job = runtime.submit_embed(TEXTS, pooling="last")
        assert job.tokens == [len(each) for each in tokens]
        assert (job.vectors() == runtime.embed(TEXTS, pooling="last")).all()


def test_texts_are_embedded_while_others_are_answered() -> None:
    with runtimes.make_runtime(sequences=2) as runtime:
        alone, answer = runtime.embed(TEXTS, pooling="mean"), runtime.generate("the cat", max_tokens=30)
        stream = runtime.submit("the cat", max_tokens=30)
        assert (runtime.embed(TEXTS * 20, pooling="mean")[:4] == alone).all()
        assert stream.answer().tokens == answer.tokens


def test_a_failed_call_is_repeated_alone() -> None:
    engine = FakeEngine(vocabulary=runtimes.codec().vocabulary)
    with runtimes.make_runtime(engine) as runtime:
        expected = runtime.embed(TEXTS, pooling="mean")
        engine.failures = {engine.forwards + 2}
        assert (runtime.embed(TEXTS, pooling="mean") == expected).all()


def test_cancelled_texts_have_no_vectors() -> None:
    with runtimes.make_runtime() as runtime:
        job = runtime.submit_embed(TEXTS, pooling="mean")
        job.cancel()
        with pytest.raises(Cancelled, match="ask again"):
            job.vectors()


def test_texts_up_to_the_context_are_embedded_and_longer_ones_refused_or_cut() -> None:
    with runtimes.make_runtime(context=24) as runtime:
        long = list(range(3, 28))
        with pytest.raises(ContextExceeded, match="25 tokens"):
            runtime.embed([long], pooling="mean")
        full = runtime.embed([long[:24]], pooling="mean")
        assert (runtime.embed([long], pooling="mean", truncate=True) == full).all()
        text = "the cat sat on the mat. " * 20
        assert runtime.submit_embed([text], pooling="mean", truncate=True).tokens == [24]


@pytest.mark.parametrize(
    ("texts", "options", "error", "said"),
    [
        (["a"], {}, InvalidOption, "pooling: the model's files state none; give one of mean, last, cls, max"),
        (["a"], {"pooling": "sum"}, InvalidOption, "'sum' is not one of mean"),
        (["a"], {"pooling": "mean", "dimensions": 17}, InvalidOption, "dimensions: must be 1 to 16"),
        (["a"], {"pooling": "mean", "dimensions": True}, InvalidOption, "dimensions"),
        (["a"], {"pooling": "mean", "prompt": "query"}, InvalidOption, "'query' is not among the model's prompts"),
        (["a"], {"poolng": "mean"}, EdgekitError, "did you mean pooling"),
        ("a", {"pooling": "mean"}, InvalidInput, "give a list"),
        ([], {"pooling": "mean"}, InvalidInput, "give a list"),
        (["a", 3], {"pooling": "mean"}, InvalidInput, "each must be"),
        ([[]], {"pooling": "mean"}, InvalidInput, "text 0 has no tokens"),
        ([[1, 10**6]], {"pooling": "mean"}, InvalidInput, "outside the vocabulary"),
        ([[1, -1]], {"pooling": "mean"}, InvalidInput, "outside the vocabulary"),
        ([["a"]], {"pooling": "mean"}, InvalidInput, "outside the vocabulary"),
    ],
)
def test_invalid_texts_are_refused(texts: Any, options: Any, error: type, said: str) -> None:
    with runtimes.make_runtime() as runtime, pytest.raises(error, match=said):
        runtime.embed(texts, **options)


def test_missing_hidden_states_and_logits_are_refused() -> None:
    engine = FakeEngine(vocabulary=runtimes.codec().vocabulary)
    engine.capabilities = engine.capabilities.model_copy(update={"hidden_size": None})
    with runtimes.make_runtime(engine) as runtime, pytest.raises(Unsupported, match="onnx target"):
        runtime.embed(["a"], pooling="mean")
    encoder = FakeEngine(vocabulary=runtimes.codec().vocabulary)
    encoder.capabilities = encoder.capabilities.model_copy(update={"generates": False})
    with runtimes.make_runtime(encoder) as runtime:
        for refused in (
            lambda: runtime.generate("a"),
            lambda: runtime.chat([{"role": "user", "content": "a"}]),
            lambda: runtime.score("a", ["b"]),
            lambda: runtime.prompt_logprobs("a b"),
        ):
            with pytest.raises(Unsupported, match="is an encoder, which writes no text; use embed"):
                refused()
        assert runtime.embed(["a"], pooling="mean").shape == (1, 16)
