"""`edgekit score`: a jsonl of prompts and continuations, scored by line, resumable, bad lines refused by number."""

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
from edgekit.errors import InvalidInput

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
