"""Scores and vectors of texts: those of the engine, alone, together and asynchronously."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runtimes

from edgekit.common.divergence import log_softmax
from edgekit.contracts.engine import Chunk
from edgekit.errors import Cancelled, ContextExceeded, EdgekitError, InvalidInput, InvalidOption, Unsupported
from edgekit.model.parts import TextEmbedding
from edgekit.runtime.async_runtime import AsyncRuntime
from edgekit.runtime.embedding import embedding_params
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.scoring import Score
from edgekit.testing import FakeEngine

TEXTS = [" sat on", " mat the naïve façade", " cat", " sat on the mat. the cat sat on the mat. the cat"]


def expected(runtime: Runtime, tokens: list[int], start: int) -> list[float]:
    """Log-probabilities of `tokens` from `start` on, fed to the bare engine in one piece."""
    state = runtime.engine.start(runtime.kv_config)
    try:
        logs = log_softmax(runtime.engine.forward([Chunk(state, tokens, len(tokens))])[0])
    finally:
        state.close()
    return [float(logs[place - 1, tokens[place]]) for place in range(start, len(tokens))]


def test_scores_are_the_engines_log_probabilities() -> None:
    with runtimes.make_runtime() as runtime:
        prompt = runtime.encode("the cat")
        scores = runtime.score("the cat", TEXTS)
        for text, score in zip(TEXTS, scores, strict=True):
            whole = runtime.encode("the cat" + text)
            assert score.tokens == tuple(whole[len(prompt) :])
            assert score.logprobs == pytest.approx(expected(runtime, whole, len(prompt)), abs=1e-9)
            assert score.total == pytest.approx(sum(score.logprobs))
            assert score.mean == pytest.approx(score.total / len(score.tokens))
        assert runtime.score(prompt, TEXTS[:1]) == scores[:1]
        assert runtime.score("the cat", [scores[0].tokens]) == scores[:1]


def test_the_prompts_own_tokens_are_scored() -> None:
    engine = FakeEngine(vocabulary=runtimes.codec().vocabulary, max_chunk_tokens=512)
    with runtimes.make_runtime(engine, chunk_tokens=100) as runtime:
        text = "the cat sat on the mat. " * 12
        whole = runtime.encode(text)
        score = runtime.prompt_logprobs(text)
        assert score.tokens == tuple(whole[1:])
        assert score.logprobs == pytest.approx(expected(runtime, whole, 1), abs=1e-9)
        assert runtime.score("", [text]) == [score]  # after the bos alone


def test_messages_are_rendered_and_scored() -> None:
    with runtimes.make_runtime() as runtime:
        messages = [{"role": "user", "content": "the cat"}]
        rendered = runtime.render(messages)
        prompt = runtime.encode(rendered, add_special_tokens=False)
        (score,) = runtime.score(messages, [" sat"])
        whole = runtime.encode(rendered + " sat", add_special_tokens=False)
        assert score.tokens == tuple(whole[len(prompt) :])


@pytest.mark.parametrize(
    "engine",
    [{"max_rewind": 0}, {"max_rewind": 2}, {"max_states": 1}, {"max_chunk_tokens": 3}, {"can_evict": False}],
    ids=str,
)
def test_scores_do_not_depend_on_engine_abilities(engine: dict[str, Any]) -> None:
    with runtimes.make_runtime() as runtime:
        plain = runtime.score("the cat", TEXTS)
    vocabulary = runtimes.codec().vocabulary
    with runtimes.make_runtime(FakeEngine(vocabulary=vocabulary, **engine), prefix_bytes=1 << 20) as runtime:
        runtime.generate("the cat sat on", max_tokens=3)  # leaves a prefix, which scoring must not use
        hits = runtime.metrics().prefix_hits
        assert runtime.score("the cat", TEXTS) == plain
        assert runtime.metrics().prefix_hits == hits
        assert runtime.engine.states == []  # type: ignore[attr-defined]


def test_batched_scores_equal_single_scores() -> None:
    with runtimes.make_runtime(sequences=3) as runtime:
        alone = {text: runtime.score(text, TEXTS) for text in ("the", "a b c", "stop")}
        answers = [runtime.submit("the cat", max_tokens=9) for _ in range(2)]
        waiting = {text: runtime.submit_score(text, TEXTS) for text in alone}
        assert {text: scoring.scores() for text, scoring in waiting.items()} == alone
        assert len({answer.answer().text for answer in answers}) == 1


def test_continuations_that_change_the_end_of_the_prompt_are_scored_from_there() -> None:
    with runtimes.make_runtime() as runtime:
        merged, plain = runtime.score("the ca", ["t", " cat"])
        whole = runtime.encode("the cat")
        assert whole[: len(runtime.encode("the ca"))] != runtime.encode("the ca")
        assert merged.tokens == tuple(whole[-len(merged.tokens) :])
        assert [merged, plain] == [*runtime.score("the ca", ["t"]), *runtime.score("the ca", [" cat"])]
        assert merged.logprobs == pytest.approx(expected(runtime, whole, len(whole) - len(merged.tokens)), abs=1e-9)


def test_greedy_continuations_are_told_apart() -> None:
    with runtimes.make_runtime() as runtime:
        said = runtime.generate("the cat", max_tokens=4, ignore_eos=True).tokens
        other = [*said[:3], (said[3] + 1) % runtime.engine.capabilities.vocabulary]
        assert [score.is_greedy for score in runtime.score("the cat", [said, other])] == [True, False]


def test_a_failed_call_is_made_again_from_the_beginning() -> None:
    with runtimes.make_runtime() as runtime:
        plain = runtime.score("the cat", TEXTS)
        engine = runtime.engine
        assert isinstance(engine, FakeEngine)
        other = runtime.submit("the cat", max_tokens=3)
        scoring = runtime.submit_score("the cat", TEXTS)
        engine.failures = {engine.forwards + 3}
        assert scoring.scores() == plain
        assert other.answer().finish_reason == "length"


def test_asyncio_gets_the_same_scores() -> None:
    async def main() -> list[list[Score]]:
        async with AsyncRuntime(runtimes.make_runtime()) as together:
            return list(await asyncio.gather(*(together.score("the cat", TEXTS) for _ in range(3))))

    with runtimes.make_runtime() as runtime:
        plain = runtime.score("the cat", TEXTS)
    assert asyncio.run(main()) == [plain] * 3


def test_invalid_continuations_are_refused() -> None:
    with runtimes.make_runtime(context=32) as runtime:
        for continuations in ([], "text", [""], [" cat", ""]):
            with pytest.raises(InvalidInput, match="continuation"):
                runtime.score("the cat", continuations)
        with pytest.raises(InvalidInput, match="continuation 2 has no tokens"):
            runtime.score("the ca", ["t", " cat", ""])
        with pytest.raises(InvalidInput, match="vocabulary"):
            runtime.score("the cat", [[10**6]])
        with pytest.raises(ContextExceeded, match="room for"):
            runtime.score("the cat", [" sat" * 60])
        with pytest.raises(InvalidInput, match="give two or more"):
            runtime.prompt_logprobs("")
        scoring = runtime.submit_score("the cat", [" sat"])
        scoring.cancel()
        with pytest.raises(Cancelled):
            scoring.scores()


@pytest.mark.onnx
@pytest.mark.quantize
def test_scores_of_a_model_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import tiny_models

    import edgekit

    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    model = tiny_models.write_tiny(tmp_path / "tiny")
    artifact = tiny_models.artifact_of(model, tmp_path / "artifact", "float32")
    with edgekit.open(artifact) as runtime:
        prompt, scores = runtime.encode("the cat"), runtime.score("the cat", TEXTS)
        assert runtime.score("the cat", TEXTS) == scores  # to the bit
        assert [runtime.score("the cat", [text])[0] for text in TEXTS] == scores
        whole = [runtime.encode("the cat" + text) for text in TEXTS]
    decoder = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for tokens, score in zip(whole, scores, strict=True):
        with torch.no_grad():
            logs = log_softmax(decoder(torch.tensor([tokens])).logits[0].numpy())
        following = np.array(tokens[len(prompt) :])
        rows = logs[len(prompt) - 1 : -1]
        assert score.logprobs == pytest.approx(list(rows[np.arange(len(following)), following]), abs=2e-4)


TEXTS_OF_EMBEDDING = ["the cat", " sat on the mat. " * 7, "naïve façade", "a"]


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
        vectors = runtime.embed(TEXTS_OF_EMBEDDING, pooling=pooling, normalise=False)
        assert vectors.dtype == np.float32 and vectors.shape == (4, 16)
        for text, vector in zip(TEXTS_OF_EMBEDDING, vectors, strict=True):
            assert vector == pytest.approx(pool[pooling](hidden(runtime, text)), abs=1e-5)
        assert runtime.metrics().requests == 4


def test_vectors_are_cut_and_then_normalised() -> None:
    with runtimes.make_runtime() as runtime:
        whole = runtime.embed(TEXTS_OF_EMBEDDING, pooling="mean", normalise=False)
        cut = runtime.embed(TEXTS_OF_EMBEDDING, pooling="mean", dimensions=4)
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
        tokens = [runtime.encode(text) for text in TEXTS_OF_EMBEDDING]
        assert (runtime.embed(tokens, pooling="last") == runtime.embed(TEXTS_OF_EMBEDDING, pooling="last")).all()
        job = runtime.submit_embed(TEXTS_OF_EMBEDDING, pooling="last")
        assert job.tokens == [len(each) for each in tokens]
        assert (job.vectors() == runtime.embed(TEXTS_OF_EMBEDDING, pooling="last")).all()


def test_texts_are_embedded_while_others_are_answered() -> None:
    with runtimes.make_runtime(sequences=2) as runtime:
        alone, answer = runtime.embed(TEXTS_OF_EMBEDDING, pooling="mean"), runtime.generate("the cat", max_tokens=30)
        stream = runtime.submit("the cat", max_tokens=30)
        assert (runtime.embed(TEXTS_OF_EMBEDDING * 20, pooling="mean")[:4] == alone).all()
        assert stream.answer().tokens == answer.tokens


def test_a_failed_call_is_repeated_alone() -> None:
    engine = FakeEngine(vocabulary=runtimes.codec().vocabulary)
    with runtimes.make_runtime(engine) as runtime:
        expected = runtime.embed(TEXTS_OF_EMBEDDING, pooling="mean")
        engine.failures = {engine.forwards + 2}
        assert (runtime.embed(TEXTS_OF_EMBEDDING, pooling="mean") == expected).all()


def test_cancelled_texts_have_no_vectors() -> None:
    with runtimes.make_runtime() as runtime:
        job = runtime.submit_embed(TEXTS_OF_EMBEDDING, pooling="mean")
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
        assert runtime.submit_embed([text], truncate=True).tokens == [24]


@pytest.mark.parametrize(
    ("texts", "options", "error", "said"),
    [
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
