"""`edgekit score`, `rerank` and `embed`: a file line by line, resumable, bad lines refused by number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_artifacts import install, make_artifact

import edgekit
from edgekit.cli import command
from edgekit.errors import InvalidInput, Unsupported
from edgekit.model.parts import Reranking, TextEmbedding

LINES = [
    {"id": "one", "prompt": "the cat", "continuations": [" sat", " mat on"]},
    {"prompt": "the cat sat on the mat"},
    {"messages": [{"role": "user", "content": "the cat"}], "continuations": [" sat"]},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    install(tmp_path / "site", monkeypatch)
    make_artifact(tmp_path / "artifact")
    (tmp_path / "file.jsonl").write_text("\n".join(map(json.dumps, LINES)) + "\n")
    return tmp_path


def score(folder: Path, *options: str) -> Result:
    words = ["score", str(folder / "artifact"), str(folder / "file.jsonl"), *options]
    return CliRunner().invoke(command, words, standalone_mode=False)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_each_line_gets_the_scores_of_the_api(folder: Path) -> None:
    result = score(folder, "--json")
    one, two, three = lines_of(result.stdout)
    with edgekit.open(folder / "artifact") as runtime:
        scores = runtime.score("the cat", [" sat", " mat on"])
        assert [each["logprobs"] for each in one["scores"]] == [list(each.logprobs) for each in scores]
        assert [each["text"] for each in one["scores"]] == [" sat", " mat on"]
        whole = runtime.prompt_logprobs("the cat sat on the mat")
        assert two["id"] == 2 and two["scores"][0]["total"] == whole.total
        assert "text" not in two["scores"][0]
    assert three["id"] == 3 and len(three["scores"]) == 1
    table = score(folder).stdout
    assert "' mat on'" in table and f"{scores[0].total:.4f}" in table


def test_an_interrupted_run_resumes(folder: Path) -> None:
    output = folder / "scores.jsonl"
    assert score(folder, "-o", str(output)).return_value == 0
    whole = output.read_text()
    kept = whole.splitlines(keepends=True)
    output.write_text(kept[0] + kept[1][:20])
    assert score(folder, "-o", str(output)).return_value == 0
    assert output.read_text() == whole


def test_an_unscorable_line_gives_an_error_and_others_scores(folder: Path) -> None:
    (folder / "file.jsonl").write_text(json.dumps({"prompt": "a", "continuations": [""]}) + "\n" + json.dumps(LINES[0]))
    result = score(folder, "--json")
    first, second = lines_of(result.stdout)
    assert result.return_value == 1
    assert first == {"id": 1, "error": "continuation 0 has no tokens; give text to score"}
    assert len(second["scores"]) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"prompt": "a", "continuation": ["b"]}, "line 1: unknown key 'continuation'"),
        ({"continuations": ["b"]}, "line 1: give `prompt`"),
        ({"prompt": "a", "continuations": "b"}, "line 1: continuations must be a list of texts"),
        ({"prompt": "a", "id": 1.5}, "line 1: id must be"),
    ],
    ids=["key", "prompt", "list", "id"],
)
def test_bad_lines_are_refused_before_any_is_scored(folder: Path, line: dict[str, Any], said: str) -> None:
    (folder / "file.jsonl").write_text(json.dumps(line))
    result = score(folder)
    assert isinstance(result.exception, InvalidInput)
    assert said in str(result.exception)


LINES_OF_RERANK_COMMAND = [
    {"id": "one", "query": "the cat", "documents": ["a", "sat on the mat", "naïve"]},
    {"query": "stop", "documents": ["the"]},
]


@pytest.fixture
def ranked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "site", monkeypatch)
    make_artifact(tmp_path / "artifact", context=700, reranking=Reranking(kind="qwen3", yes=40, no=41))
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, LINES_OF_RERANK_COMMAND)))
    return tmp_path


def rerank(ranked: Path, *options: str) -> Result:
    words = ["rerank", str(ranked / "artifact"), str(ranked / "lines.jsonl"), *options]
    return CliRunner().invoke(command, words, standalone_mode=False)


def test_each_line_gets_the_ranking_of_the_api(ranked: Path) -> None:
    result = rerank(ranked, "--instruction", "Find cats", "--top-n", "2")
    assert result.return_value == 0, result.exception
    first, second = lines_of(result.stdout)
    with edgekit.open(ranked / "artifact") as runtime:
        expected = runtime.rerank("the cat", ["a", "sat on the mat", "naïve"], instruction="Find cats", top_n=2)
    assert first["results"] == [{"index": each.index, "score": each.score} for each in expected]
    assert first["id"] == "one" and second["id"] == 2 and len(second["results"]) == 1 and second["tokens"] > 1


def test_an_interrupted_run_resumes_and_long_documents_are_reported(ranked: Path) -> None:
    with (ranked / "lines.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"query": "a", "documents": ["the cat " * 500]}))
    output = ranked / "ranked.jsonl"
    assert rerank(ranked, "-o", str(output)).return_value == 1
    whole = output.read_text()
    assert "tokens" in lines_of(whole)[2]["error"]
    output.write_text(whole.splitlines(keepends=True)[0] + "{")
    assert rerank(ranked, "-o", str(output)).return_value == 1
    assert output.read_text() == whole
    assert rerank(ranked, "--truncate").return_value == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"query": "a", "documents": ["b"], "text": "c"}, "line 1: unknown key 'text'"),
        ({"documents": ["b"]}, "line 1: give `query`"),
        ({"query": "a", "documents": "b"}, "line 1: give `documents`"),
        ({"query": "a", "documents": []}, "line 1: give `documents`"),
    ],
)
def test_bad_lines_are_refused_before_any_is_scored_rerank_command(ranked: Path, content: object, said: str) -> None:
    (ranked / "lines.jsonl").write_text(json.dumps(content))
    result = rerank(ranked)
    assert isinstance(result.exception, InvalidInput) and said in str(result.exception)


def test_other_models_are_refused(ranked: Path) -> None:
    make_artifact(ranked / "other")
    words = ["rerank", str(ranked / "other"), str(ranked / "lines.jsonl")]
    result = CliRunner().invoke(command, words, standalone_mode=False)
    assert isinstance(result.exception, Unsupported) and "no reranker" in str(result.exception)


@pytest.fixture
def embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "site", monkeypatch)
    make_artifact(tmp_path / "artifact", embedding=TextEmbedding(dimensions=()))
    (tmp_path / "texts.txt").write_text("the cat\n\n  sat on\r\nthe mat\n")
    return tmp_path


def embed(embedded: Path, file: str, *options: str) -> Result:
    words = ["embed", str(embedded / "artifact"), str(embedded / file), *options]
    return CliRunner().invoke(command, words, standalone_mode=False)


def test_each_line_gets_the_vector_of_the_api(embedded: Path) -> None:
    result = embed(embedded, "texts.txt", "--pooling", "mean", "--dimensions", "8")
    assert result.return_value == 0, result.exception
    found = lines_of(result.stdout)
    texts = ["the cat", "  sat on", "the mat"]
    with edgekit.open(embedded / "artifact") as runtime:
        expected = runtime.embed(texts, pooling="mean", dimensions=8)
        assert [each["tokens"] for each in found] == [len(runtime.encode(text)) for text in texts]
    assert [each["id"] for each in found] == [1, 3, 4]
    assert [each["embedding"] for each in found] == expected.tolist()


def test_objects_have_ids_and_an_interrupted_run_resumes(embedded: Path) -> None:
    lines = [{"id": "one", "text": "the cat"}, {"text": "a"}]
    (embedded / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    output = embedded / "vectors.jsonl"
    options = ("--pooling", "last", "-o", str(output))
    assert embed(embedded, "texts.jsonl", *options).return_value == 0
    whole = output.read_text()
    assert [each["id"] for each in lines_of(whole)] == ["one", 2]
    output.write_text(whole.splitlines(keepends=True)[0] + "{")
    assert embed(embedded, "texts.jsonl", *options).return_value == 0
    assert output.read_text() == whole


def test_a_too_long_text_gives_an_error_and_others_vectors(embedded: Path) -> None:
    (embedded / "texts.txt").write_text("the cat " * 2000 + "\na\n")
    result = embed(embedded, "texts.txt", "--pooling", "mean")
    first, second = lines_of(result.stdout)
    assert result.return_value == 1
    assert "tokens" in first["error"] and "embedding" in second
    assert embed(embedded, "texts.txt", "--pooling", "mean", "--truncate").return_value == 0


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("a.jsonl", b'{"prompt": "a"}', "line 1: unknown key 'prompt'"),
        ("a.jsonl", b'{"text": 3}', "line 1: give `text`"),
        ("a.jsonl", b'{"text": "a", "id": 1.5}', "line 1: id must be"),
        ("a.txt", b"ok\n\xff\xfe", "line 2: is not UTF-8"),
    ],
)
def test_bad_lines_are_refused_before_any_is_embedded(embedded: Path, file: str, content: bytes, said: str) -> None:
    (embedded / file).write_bytes(content)
    result = embed(embedded, file, "--pooling", "mean")
    assert isinstance(result.exception, InvalidInput) and said in str(result.exception)
