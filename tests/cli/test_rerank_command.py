"""`edgekit rerank`: documents of a file, ordered line by line, resumable, bad lines refused by number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_artifacts import install, make_artifact

import edgekit
from edgekit.cli import command
from edgekit.errors import InvalidInput, Unsupported
from edgekit.model.parts import Reranking

LINES = [
    {"id": "one", "query": "the cat", "documents": ["a", "sat on the mat", "naïve"]},
    {"query": "stop", "documents": ["the"]},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "site", monkeypatch)
    make_artifact(tmp_path / "artifact", context=700, reranking=Reranking(kind="qwen3", yes=40, no=41))
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, LINES)))
    return tmp_path


def rerank(folder: Path, *options: str) -> Result:
    words = ["rerank", str(folder / "artifact"), str(folder / "lines.jsonl"), *options]
    return CliRunner().invoke(command, words, standalone_mode=False)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_each_line_gets_the_ranking_of_the_api(folder: Path) -> None:
    result = rerank(folder, "--instruction", "Find cats", "--top-n", "2")
    assert result.return_value == 0, result.exception
    first, second = lines_of(result.stdout)
    with edgekit.open(folder / "artifact") as runtime:
        expected = runtime.rerank("the cat", ["a", "sat on the mat", "naïve"], instruction="Find cats", top_n=2)
    assert first["results"] == [{"index": each.index, "score": each.score} for each in expected]
    assert first["id"] == "one" and second["id"] == 2 and len(second["results"]) == 1 and second["tokens"] > 1


def test_an_interrupted_run_resumes_and_long_documents_are_reported(folder: Path) -> None:
    with (folder / "lines.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"query": "a", "documents": ["the cat " * 500]}))
    output = folder / "ranked.jsonl"
    assert rerank(folder, "-o", str(output)).return_value == 1
    whole = output.read_text()
    assert "tokens" in lines_of(whole)[2]["error"]
    output.write_text(whole.splitlines(keepends=True)[0] + "{")
    assert rerank(folder, "-o", str(output)).return_value == 1
    assert output.read_text() == whole
    assert rerank(folder, "--truncate").return_value == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"query": "a", "documents": ["b"], "text": "c"}, "line 1: unknown key 'text'"),
        ({"documents": ["b"]}, "line 1: give `query`"),
        ({"query": "a", "documents": "b"}, "line 1: give `documents`"),
        ({"query": "a", "documents": []}, "line 1: give `documents`"),
    ],
)
def test_bad_lines_are_refused_before_any_is_scored(folder: Path, content: object, said: str) -> None:
    (folder / "lines.jsonl").write_text(json.dumps(content))
    result = rerank(folder)
    assert isinstance(result.exception, InvalidInput) and said in str(result.exception)


def test_other_models_are_refused(folder: Path) -> None:
    make_artifact(folder / "other")
    words = ["rerank", str(folder / "other"), str(folder / "lines.jsonl")]
    result = CliRunner().invoke(command, words, standalone_mode=False)
    assert isinstance(result.exception, Unsupported) and "no reranker" in str(result.exception)
