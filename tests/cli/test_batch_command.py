"""`edgekit run --batch`: every line answered in order, resumable, and errors with line numbers."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import edgekit
from edgekit.cli import command
from edgekit.common.results_file import ResultsFile
from edgekit.errors import InvalidInput, OutOfSpace

LINES: list[dict[str, Any]] = [
    {"prompt": "the cat", "max_tokens": 9},
    {"id": "talk", "messages": [{"role": "user", "content": "sat on"}], "max_tokens": 5},
    {"prompt": "the mat", "temperature": 0.8, "seed": 4},
    {"id": 17, "prompt": "the cat sat", "stop": ["e"]},
]


def batch(artifact: Path, lines: list[dict[str, Any]] | str, *options: str) -> Result:
    path = artifact.parent / "prompts.jsonl"
    path.write_text(lines if isinstance(lines, str) else "\n".join(map(json.dumps, lines)))
    arguments = ["run", str(artifact), "--batch", str(path), "--max-tokens", "12", *options]
    return CliRunner().invoke(command, arguments, standalone_mode=False)


def test_a_full_disk_names_file_and_bytes_and_leaves_no_half_line(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, write, room = artifact.parent / "answers.jsonl", os.write, [0]

    def until_full(handle: int, data: bytes | memoryview) -> int:
        if not output.exists() or os.fstat(handle).st_ino != output.stat().st_ino:
            return write(handle, data)
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write(handle, memoryview(data)[: room[0]])
        room[0] -= count
        return count

    monkeypatch.setattr(os, "write", until_full)
    with pytest.raises(OutOfSpace, match=r"answers.jsonl: \d+ bytes are needed"):
        raise batch(artifact, LINES, "-o", str(output)).exception or AssertionError("answered")
    assert not output.exists()
    room[0] = 400  # the first line, and a part of another
    assert isinstance(batch(artifact, LINES, "-o", str(output)).exception, OutOfSpace)
    assert 1 <= len(answers_in(output)) < len(LINES)
    room[0] = 1 << 20
    assert batch(artifact, LINES, "-o", str(output)).exit_code == 0
    assert len(answers_in(output)) == len(LINES)


def test_two_batches_never_write_one_file(artifact: Path) -> None:
    output = artifact.parent / "answers.jsonl"
    with ResultsFile(output), pytest.raises(InvalidInput, match=r"answers.jsonl: another process writes it now; wait"):
        raise batch(artifact, LINES, "-o", str(output)).exception or AssertionError("answered")
    assert batch(artifact, LINES, "-o", str(output)).exit_code == 0
    assert len(answers_in(output)) == len(LINES)


def answers_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("sequences", ["1", "3"])
def test_batch_answers_are_in_order_and_equal_single_answers(artifact: Path, sequences: str) -> None:
    output = artifact.parent / "answers.jsonl"
    done = batch(artifact, LINES, "-o", str(output), "--sequences", sequences, "--stats")
    assert done.return_value == 0 and done.stdout == ""
    assert "requests  4" in done.stderr
    found = answers_in(output)
    assert [answer["id"] for answer in found] == [1, "talk", 3, 17]
    with edgekit.open(artifact) as runtime:
        for answer, line in zip(found, LINES, strict=True):
            options = {"max_tokens": 12, **{key: line[key] for key in line.keys() - {"id", "prompt", "messages"}}}
            alone = runtime.submit(line.get("prompt") or line["messages"], **options).answer()
            assert (answer["text"], answer["tokens"]) == (alone.text, len(alone.tokens))


def test_interrupted_batch_resumes_and_repairs_a_partial_line(artifact: Path) -> None:
    output = artifact.parent / "answers.jsonl"
    batch(artifact, LINES, "-o", str(output))
    whole = answers_in(output)
    data = output.read_bytes()
    second = data.index(b"\n", data.index(b"\n") + 1)
    for kept in (0, 5, second - 3, second, second + 1, len(data)):
        output.write_bytes(data[:kept])
        done = batch(artifact, LINES, "-o", str(output), "--stats")
        assert done.exit_code == 0
        again = answers_in(output)
        assert [(one["id"], one["text"]) for one in again] == [(one["id"], one["text"]) for one in whole]
        assert f"requests  {4 - data[:kept].count(10)} " in done.stderr


def test_without_an_output_answers_are_printed(artifact: Path) -> None:
    done = batch(artifact, LINES)
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == [1, "talk", 3, 17]


def test_a_line_that_cannot_be_answered_does_not_end_the_others(artifact: Path) -> None:
    lines = [{"prompt": "the " * 5000}, {"prompt": "the cat", "top_k": -1}, {"prompt": "the cat", "spell": 1}, LINES[0]]
    done = batch(artifact, lines)
    assert done.return_value == 1 and "3 lines have an error" in done.stderr
    first, second, third, last = (json.loads(line) for line in done.stdout.splitlines())
    assert "tokens" in first["error"] and "top_k" in second["error"] and "unknown option" in third["error"]
    assert last["text"]


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "not JSON": ('{"prompt": "a"}\n{"prompt"', "line 2: not valid JSON"),
        "a list": ("[1]", "line 1: holds list"),
        "no prompt": ('{"id": 1}', "line 1: give `prompt`"),
        "both": ('{"prompt": "a", "messages": []}', "give `prompt`"),
        "a number": ('{"prompt": 1}', "give `prompt`"),
        "an id of another kind": ('{"id": 1.5, "prompt": "a"}', "id must be a string or an integer"),
        "an id twice": ('{"prompt": "a"}\n\n{"id": 1, "prompt": "b"}', "line 3: the id 1 is used twice"),
    }.values(),
)
def test_a_bad_line_is_refused_with_its_number_before_any_answer(artifact: Path, text: str, said: str) -> None:
    output = artifact.parent / "answers.jsonl"
    done = batch(artifact, text, "-o", str(output))
    assert isinstance(done.exception, InvalidInput) and said in str(done.exception)
    assert not output.exists()


def test_options_of_one_answer_and_of_a_batch_do_not_mix(artifact: Path) -> None:
    for arguments, said in (
        (["x", "--batch", "f"], "PROMPT"),
        (["--batch", "f", "--json"], "--json"),
        (["--batch", "f", "--system", "s"], "--system"),
        (["x", "-o", "f"], "--output"),
        (["x", "--sequences", "2"], "--sequences"),
        ([], "PROMPT is missing"),
    ):
        done = CliRunner().invoke(command, ["run", str(artifact), *arguments])
        assert isinstance(done.exception, InvalidInput) and said in str(done.exception)


def test_output_file_with_other_content_is_refused(artifact: Path) -> None:
    output = artifact.parent / "notes.txt"
    for text in ("my notes\n", '{"my": "notes"}\n'):
        output.write_text(text)
        done = batch(artifact, LINES, "-o", str(output))
        assert isinstance(done.exception, InvalidInput)
        assert output.read_text() == text


def test_prefixes_are_kept_between_starts(artifact: Path) -> None:
    kept = artifact.parent / "kept"
    arguments = ["run", str(artifact), "the cat sat on the mat", "--raw", "--max-tokens", "9", "--prefixes", str(kept)]
    first = CliRunner().invoke(command, arguments, standalone_mode=False)
    assert first.exit_code == 0, first.output
    size = kept.stat().st_size
    assert CliRunner().invoke(command, arguments, standalone_mode=False).stdout == first.stdout
    assert kept.stat().st_size == size
    told = CliRunner().invoke(command, [*arguments, "--json"], standalone_mode=False).stdout
    found = json.loads(told)["statistics"]
    assert found["cached_tokens"] == found["prompt_tokens"] - 1
    kept.write_bytes(kept.read_bytes()[:-1])
    assert "cut short" in str(CliRunner().invoke(command, arguments, standalone_mode=False).exception)
