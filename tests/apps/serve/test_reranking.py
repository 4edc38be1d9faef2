"""`/v1/rerank`: the scores of the Python API in the form of other servers, within the server's limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_artifacts import install, make_artifact
from runtimes import make_runtime
from serving import Served, serving

import edgekit
from edgekit.model.parts import Reranking

DOCUMENTS = ["the cat", " sat on the mat. " * 4, "naïve"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        install(folder / "site", patch)
        ranker = edgekit.open(
            make_artifact(folder / "a", context=700, reranking=Reranking(kind="qwen3", yes=40, no=41))
        )
        with serving({"ranker": ranker, "tiny": make_runtime()}) as found:
            yield found


def post(served: Served, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{served.v1}/rerank", json={"model": "ranker", "query": "the cat", "documents": DOCUMENTS, **body}
    )


def test_scores_are_those_of_the_python_api(served: Served) -> None:
    expected = served.runtime.rerank("the cat", DOCUMENTS)
    answer = post(served).json()
    assert answer["results"] == [{"index": each.index, "relevance_score": each.score} for each in expected]
    assert answer["model"] == "ranker" and answer["usage"]["total_tokens"] > 3 * 100
    objects = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    (best,) = post(served, documents=objects, top_n=1, return_documents=True).json()["results"]
    assert best["document"] == {"text": DOCUMENTS[expected[0].index]} and best["index"] == expected[0].index
    own = post(served, edgekit={"instruction": "Find cats"}).json()["results"]
    asked = served.runtime.rerank("the cat", DOCUMENTS, instruction="Find cats")
    assert [each["relevance_score"] for each in own] == [each.score for each in asked]
    assert own != answer["results"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "tiny"}, 400, "this model is no reranker"),
        ({"model": "other"}, 404, "does not exist"),
        ({"documents": []}, 400, "documents"),
        ({"documents": "the cat"}, 400, "documents"),
        ({"documents": [3]}, 400, "documents"),
        ({"documents": [""]}, 400, "document 0 is empty"),
        ({"documents": ["x"] * 2049}, 400, "documents"),
        ({"documents": ["the cat " * 900]}, 400, "tokens"),
        ({"query": None}, 400, "query"),
        ({"top_n": 0}, 400, "top_n"),
        ({"edgekit": {"instruction": 3}}, 400, "edgekit.instruction"),
        ({"edgekit": {"adapter": "a"}}, 400, "edgekit.adapter: unknown"),
    ],
)
def test_invalid_bodies_are_refused(served: Served, body: dict[str, Any], status: int, said: str) -> None:
    answer = post(served, **body)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]["message"]
