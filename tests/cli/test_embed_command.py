"""`edgekit embed`: texts of a file, a vector each, resumable, bad lines refused by number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_artifacts import install, make_artifact

import edgekit
from edgekit.cli import command
from edgekit.errors import InvalidInput, InvalidOption
from edgekit.model.parts import TextEmbedding


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "site", monkeypatch)
    make_artifact(tmp_path / "artifact", embedding=TextEmbedding(dimensions=()))
    (tmp_path / "texts.txt").write_text("the cat\n\n  sat on\r\nthe mat\n")
    return tmp_path


def embed(folder: Path, file: str, *options: str) -> Result:
    words = ["embed", str(folder / "artifact"), str(folder / file), *options]
    return CliRunner().invoke(command, words, standalone_mode=False)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_each_line_gets_the_vector_of_the_api(folder: Path) -> None:
    result = embed(folder, "texts.txt", "--pooling", "mean", "--dimensions", "8")
    assert result.return_value == 0, result.exception
    found = lines_of(result.stdout)
    texts = ["the cat", "  sat on", "the mat"]
    with edgekit.open(folder / "artifact") as runtime:
        expected = runtime.embed(texts, pooling="mean", dimensions=8)
        assert [each["tokens"] for each in found] == [len(runtime.encode(text)) for text in texts]
    assert [each["id"] for each in found] == [1, 3, 4]
    assert [each["embedding"] for each in found] == expected.tolist()
    unscaled = lines_of(embed(folder, "texts.txt", "--pooling", "mean", "--unscaled").stdout)
    assert sum(value**2 for value in unscaled[0]["embedding"]) > 2


def test_objects_have_ids_and_an_interrupted_run_resumes(folder: Path) -> None:
    lines = [{"id": "one", "text": "the cat"}, {"text": "a"}]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    output = folder / "vectors.jsonl"
    options = ("--pooling", "last", "-o", str(output))
    assert embed(folder, "texts.jsonl", *options).return_value == 0
    whole = output.read_text()
    assert [each["id"] for each in lines_of(whole)] == ["one", 2]
    output.write_text(whole.splitlines(keepends=True)[0] + "{")
    assert embed(folder, "texts.jsonl", *options).return_value == 0
    assert output.read_text() == whole


def test_a_too_long_text_gives_an_error_and_others_vectors(folder: Path) -> None:
    (folder / "texts.txt").write_text("the cat " * 2000 + "\na\n")
    result = embed(folder, "texts.txt", "--pooling", "mean")
    first, second = lines_of(result.stdout)
    assert result.return_value == 1
    assert "tokens" in first["error"] and "embedding" in second
    assert embed(folder, "texts.txt", "--pooling", "mean", "--truncate").return_value == 0


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("a.jsonl", b'{"prompt": "a"}', "line 1: unknown key 'prompt'"),
        ("a.jsonl", b'{"text": 3}', "line 1: give `text`"),
        ("a.jsonl", b'{"text": "a", "id": 1.5}', "line 1: id must be"),
        ("a.txt", b"ok\n\xff\xfe", "line 2: is not UTF-8"),
    ],
)
def test_bad_lines_are_refused_before_any_is_embedded(folder: Path, file: str, content: bytes, said: str) -> None:
    (folder / file).write_bytes(content)
    result = embed(folder, file, "--pooling", "mean")
    assert isinstance(result.exception, InvalidInput) and said in str(result.exception)


def test_unknown_pooling_must_be_given(folder: Path) -> None:
    result = embed(folder, "texts.txt")
    assert isinstance(result.exception, InvalidOption) and "pooling" in str(result.exception)
