"""`edgekit score`, `rerank` and `embed`: a file line by line, resumable, bad lines refused by number."""

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
from edgekit.model.parts import Reranking, TextEmbedding

LINES = {
    "score": [
        {"id": "one", "prompt": "the cat", "continuations": [" sat", " mat on"]},
        {"prompt": "the cat sat on the mat"},
        {"messages": [{"role": "user", "content": "the cat"}], "continuations": [" sat"]},
    ],
    "rerank": [
        {"id": "one", "query": "the cat", "documents": ["a", "sat on the mat", "naïve"]},
        {"query": "stop", "documents": ["the"]},
    ],
    "embed": [{"id": "one", "text": "the cat"}, {"text": "a"}],
}
MODELS: dict[str, dict[str, Any]] = {
    "score": {},
    "rerank": {"context": 700, "reranking": Reranking(kind="qwen3", yes=40, no=41)},
    "embed": {"embedding": TextEmbedding(dimensions=())},
}
NEEDED = {"score": (), "rerank": (), "embed": ("--pooling", "mean")}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact and a file of lines for each command, by its name."""
    install(tmp_path / "site", monkeypatch)
    for name, options in MODELS.items():
        make_artifact(tmp_path / name, **options)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, LINES[name])) + "\n")
    return tmp_path


def run(folder: Path, name: str, *options: str, file: str = "", model: str = "") -> Result:
    words = [name, str(folder / (model or name)), str(folder / (file or f"{name}.jsonl")), *NEEDED[name], *options]
    return CliRunner().invoke(command, words, standalone_mode=False)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_each_line_gets_the_scores_of_the_api(folder: Path) -> None:
    one, two, three = lines_of(run(folder, "score", "--json").stdout)
    with edgekit.open(folder / "score") as runtime:
        scores = runtime.score("the cat", [" sat", " mat on"])
        assert [each["logprobs"] for each in one["scores"]] == [list(each.logprobs) for each in scores]
        assert [each["text"] for each in one["scores"]] == [" sat", " mat on"]
        whole = runtime.prompt_logprobs("the cat sat on the mat")
        assert two["id"] == 2 and two["scores"][0]["total"] == whole.total
        assert "text" not in two["scores"][0]
    assert three["id"] == 3 and len(three["scores"]) == 1
    table = run(folder, "score").stdout
    assert "' mat on'" in table and f"{scores[0].total:.4f}" in table


def test_each_line_gets_the_ranking_of_the_api(folder: Path) -> None:
    result = run(folder, "rerank", "--instruction", "Find cats", "--top-n", "2")
    assert result.return_value == 0, result.exception
    first, second = lines_of(result.stdout)
    with edgekit.open(folder / "rerank") as runtime:
        expected = runtime.rerank("the cat", ["a", "sat on the mat", "naïve"], instruction="Find cats", top_n=2)
    assert first["results"] == [{"index": each.index, "score": each.score} for each in expected]
    assert first["id"] == "one" and second["id"] == 2 and len(second["results"]) == 1 and second["tokens"] > 1


def test_each_line_gets_the_vector_of_the_api(folder: Path) -> None:
    (folder / "texts.txt").write_text("the cat\n\n  sat on\r\nthe mat\n")
    result = run(folder, "embed", "--dimensions", "8", file="texts.txt")
    assert result.return_value == 0, result.exception
    found = lines_of(result.stdout)
    texts = ["the cat", "  sat on", "the mat"]
    with edgekit.open(folder / "embed") as runtime:
        expected = runtime.embed(texts, pooling="mean", dimensions=8)
        assert [each["tokens"] for each in found] == [len(runtime.encode(text)) for text in texts]
    assert [each["id"] for each in found] == [1, 3, 4]
    assert [each["embedding"] for each in found] == expected.tolist()


@pytest.mark.parametrize("name", LINES)
def test_an_interrupted_run_resumes(folder: Path, name: str) -> None:
    output = folder / "answers.jsonl"
    assert run(folder, name, "-o", str(output)).return_value == 0
    whole = output.read_text()
    assert [each["id"] for each in lines_of(whole)] == [each.get("id", at) for at, each in enumerate(LINES[name], 1)]
    kept = whole.splitlines(keepends=True)
    output.write_text(kept[0] + kept[1][:20])
    assert run(folder, name, "-o", str(output)).return_value == 0
    assert output.read_text() == whole


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        ("score", {"prompt": "a", "continuations": [""]}, "continuation 0 has no tokens; give text to score"),
        ("rerank", {"query": "a", "documents": ["the cat " * 500]}, "tokens"),
        ("embed", {"text": "the cat " * 2000}, "tokens"),
    ],
)
def test_a_line_that_cannot_be_answered_gives_an_error_and_others_answers(
    folder: Path, name: str, line: dict[str, Any], said: str
) -> None:
    (folder / f"{name}.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(LINES[name][0]))
    result = run(folder, name, *(["--json"] if name == "score" else []))
    first, second = lines_of(result.stdout)
    assert result.return_value == 1 and first["id"] == 1 and second["id"] == "one"
    assert said in first["error"] and "error" not in second
    if name != "score":
        assert run(folder, name, "--truncate").return_value == 0


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("score", b'{"prompt": "a", "continuation": ["b"]}', "line 1: unknown key 'continuation'"),
        ("score", b'{"continuations": ["b"]}', "line 1: give `prompt`"),
        ("score", b'{"prompt": "a", "continuations": "b"}', "line 1: continuations must be a list of texts"),
        ("rerank", b'{"query": "a", "documents": ["b"], "text": "c"}', "line 1: unknown key 'text'"),
        ("rerank", b'{"documents": ["b"]}', "line 1: give `query`"),
        ("rerank", b'{"query": "a", "documents": "b"}', "line 1: give `documents`"),
        ("rerank", b'{"query": "a", "documents": []}', "line 1: give `documents`"),
        ("embed", b'{"prompt": "a"}', "line 1: unknown key 'prompt'"),
        ("embed", b'{"text": 3}', "line 1: give `text`"),
        ("embed", b'{"text": "a", "id": 1.5}', "line 1: id must be"),
    ],
)
def test_bad_lines_are_refused_before_any_is_answered(folder: Path, name: str, content: bytes, said: str) -> None:
    (folder / f"{name}.jsonl").write_bytes(content)
    result = run(folder, name)
    assert isinstance(result.exception, InvalidInput) and said in str(result.exception)


def test_other_models_are_refused(folder: Path) -> None:
    result = run(folder, "rerank", model="score")
    assert isinstance(result.exception, Unsupported) and "no reranker" in str(result.exception)


def test_a_file_that_is_no_text_is_refused_with_its_line(folder: Path) -> None:
    (folder / "texts.txt").write_bytes(b"ok\n\xff\xfe")
    result = run(folder, "embed", file="texts.txt")
    assert isinstance(result.exception, InvalidInput) and "line 2: is not UTF-8" in str(result.exception)
