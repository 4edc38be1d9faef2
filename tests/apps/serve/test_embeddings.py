"""Embeddings and rankings over HTTP, as official clients ask for them; they equal those of the Python API."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest
from click.testing import CliRunner
from fake_artifacts import install, make_artifact
from runtimes import codec, make_runtime
from serving import Served, SlowEngine, eventually, serving
from tiny_encoders import write_bert
from tiny_models import artifact_of

import edgekit
from edgekit.apps.serve import on_demand
from edgekit.cli import command
from edgekit.model.parts import Reranking
from edgekit.testing import FakeEngine

MEAN = {"edgekit": {"pooling": "mean"}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    encoder = FakeEngine(vocabulary=codec().vocabulary, seed=1)
    encoder.capabilities = encoder.capabilities.model_copy(update={"generates": False})
    with serving({"tiny": make_runtime(), "encoder": make_runtime(encoder)}, ollama=True) as found:
        yield found


def test_vectors_are_those_of_the_python_api(served: Served, client: openai.OpenAI) -> None:
    texts = ["the cat", " sat on the mat. " * 4, "naïve"]
    expected = served.runtime.embed(texts, pooling="mean")
    tokens = [served.runtime.encode(text) for text in texts]
    for given in (texts, tokens, [texts[0], *tokens[1:]]):
        for form in ("float", "base64"):
            found = client.embeddings.create(model="tiny", input=given, encoding_format=form, extra_body=MEAN)  # type: ignore[arg-type, call-overload]
            assert [each.index for each in found.data] == [0, 1, 2]
            vectors = [
                np.frombuffer(base64.b64decode(each.embedding), "<f4") if form == "base64" else each.embedding
                for each in found.data
            ]
            assert np.array_equal(np.asarray(vectors, np.float32), expected)
            assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, tokens))
    default = client.embeddings.create(model="tiny", input=texts)  # the client asks for base64
    assert np.array_equal(np.array([each.embedding for each in default.data], np.float32), expected)


def test_one_text_and_one_list_of_tokens_give_one_vector(served: Served, client: openai.OpenAI) -> None:
    cut = served.runtime.embed(["the cat"], pooling="last", dimensions=4)[0].tolist()
    body = {"edgekit": {"pooling": "last"}}
    for given in ("the cat", served.runtime.encode("the cat")):
        found = client.embeddings.create(model="tiny", input=given, dimensions=4, extra_body=body)
        assert [each.embedding for each in found.data] == [cut]


def test_encoder_and_chat_model_are_served_together(served: Served, client: openai.OpenAI) -> None:
    vector = client.embeddings.create(model="encoder", input="the cat", extra_body=MEAN).data[0].embedding
    assert vector != client.embeddings.create(model="tiny", input="the cat", extra_body=MEAN).data[0].embedding
    with pytest.raises(openai.BadRequestError, match="is an encoder, which writes no text"):
        client.completions.create(model="encoder", prompt="the cat")
    assert client.completions.create(model="tiny", prompt="the cat", max_tokens=3).choices[0].finish_reason


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"input": [10**6], **MEAN}, 400, "outside the vocabulary"),
        ({"input": "the cat " * 900, **MEAN}, 400, "tokens"),
        ({"input": "x", "dimensions": 17, **MEAN}, 400, "dimensions: must be 1 to 16"),
        ({"input": "x", "edgekit": {"adapter": "a"}}, 400, "edgekit.adapter: is unknown"),
        ({"input": "x", "edgekit": {"pooling": "mean", "prompt": "q"}}, 400, "is not among the model's prompts"),
        ({"input": "x", "model": "other", **MEAN}, 404, "does not exist"),
    ],
)
def test_invalid_texts_are_refused(served: Served, body: dict[str, Any], status: int, said: str) -> None:
    answer = httpx.post(f"{served.v1}/embeddings", json={"model": "tiny", **body})
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]["message"]


@pytest.mark.quantize
@pytest.mark.onnx
def test_ollamas_client_embeds_with_an_encoder_that_is_opened_on_demand(tmp_path: Path) -> None:
    artifact = artifact_of(write_bert(tmp_path / "bert", is_matryoshka=True), tmp_path / "a", "float32", context=64)
    with edgekit.open(artifact) as runtime:
        texts, long = ["the cat", "a dog ran"], "the cat " * 90
        expected, cut = runtime.embed(texts), runtime.embed([long], truncate=True)
    talk = CliRunner().invoke(command, ["chat", str(artifact)])
    assert f"an encoder writes no text; use `edgekit embed {artifact} FILE`" in str(talk.exception)
    models = {"tiny": make_runtime(), "bert": on_demand(artifact)}
    with serving(models, ollama=True, memory=8 << 30) as served:
        listed = httpx.get(f"{served.v1}/models").json()["data"]
        assert [each["capabilities"] for each in listed] == [["completion"], ["embedding"]]
        client = ollama.Client(host=served.url)
        found = client.embed("bert", texts)
        assert np.array_equal(np.array(found.embeddings, np.float32), expected)
        assert found.prompt_eval_count == 4 + 5 and found.total_duration
        assert np.array_equal(np.array(client.embed("bert", long).embeddings, np.float32), cut)
        with pytest.raises(ollama.ResponseError, match="tokens"):
            client.embed("bert", long, truncate=False)
        older = client.embeddings("bert", "the cat").embedding
        assert np.allclose(np.array(older, np.float32), expected[0], atol=1e-6)
        assert client.show("bert").capabilities == ["embedding"]
        assert len(client.embed("bert", "the cat", dimensions=5).embeddings[0]) == 5
        with pytest.raises(ollama.ResponseError, match="is an encoder"):
            client.generate("bert", "the cat")
        assert client.generate("tiny", "the cat", options={"num_predict": 3}).done
        client._client.close()


def test_requests_are_counted_and_limited(served: Served) -> None:
    httpx.post(f"{served.v1}/embeddings", json={"model": "tiny", "input": "the cat", **MEAN})
    text = httpx.get(f"{served.url}/metrics").text
    assert 'edgekit_request_prompt_tokens_count{engine="0",model_name="tiny"' in text
    engine = SlowEngine(0.2)
    with serving({"slow": make_runtime(engine, sequences=1)}, max_queued=0) as slow, httpx.Client() as client:
        url, body = f"{slow.v1}/embeddings", {"input": ["the cat sat " * 30] * 3, **MEAN}
        with pytest.raises(httpx.ReadTimeout):
            client.post(url, json=body, timeout=0.5)
        eventually(lambda: slow.service.metrics.disconnected == 1)
        eventually(lambda: not engine.states)
        assert slow.service.admission.active == 0


DOCUMENTS = ["the cat", " sat on the mat. " * 4, "naïve"]


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        install(folder / "site", patch)
        ranker = edgekit.open(
            make_artifact(folder / "a", context=700, reranking=Reranking(kind="qwen3", yes=40, no=41))
        )
        with serving({"ranker": ranker, "tiny": make_runtime()}) as found:
            yield found


def post(ranking: Served, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{ranking.v1}/rerank", json={"model": "ranker", "query": "the cat", "documents": DOCUMENTS, **body}
    )


def test_scores_are_those_of_the_python_api(ranking: Served) -> None:
    expected = ranking.runtime.rerank("the cat", DOCUMENTS)
    answer = post(ranking).json()
    assert answer["results"] == [{"index": each.index, "relevance_score": each.score} for each in expected]
    assert answer["model"] == "ranker" and answer["usage"]["total_tokens"] > 3 * 100
    objects = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    (best,) = post(ranking, documents=objects, top_n=1, return_documents=True).json()["results"]
    assert best["document"] == {"text": DOCUMENTS[expected[0].index]} and best["index"] == expected[0].index
    own = post(ranking, edgekit={"instruction": "Find cats"}).json()["results"]
    asked = ranking.runtime.rerank("the cat", DOCUMENTS, instruction="Find cats")
    assert [each["relevance_score"] for each in own] == [each.score for each in asked]
    assert own != answer["results"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "tiny"}, 400, "this model is no reranker"),
        ({"model": "other"}, 404, "does not exist"),
        ({"documents": [""]}, 400, "document 0 is empty"),
        ({"documents": ["the cat " * 900]}, 400, "tokens"),
        ({"edgekit": {"adapter": "a"}}, 400, "edgekit.adapter: is unknown"),
    ],
)
def test_invalid_bodies_are_refused(ranking: Served, body: dict[str, Any], status: int, said: str) -> None:
    answer = post(ranking, **body)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]["message"]
