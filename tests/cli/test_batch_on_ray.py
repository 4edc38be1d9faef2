"""Batches on a Ray cluster: every line is answered once, even if a worker is killed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from fake_artifacts import install, make_artifact

from edgekit import OpenOptions
from edgekit.cli import _batch_on_ray, command
from edgekit.cli._batch_on_ray import answer_on_ray, answer_task
from edgekit.common.ray_map import Executor, in_order
from edgekit.errors import InvalidInput, TargetFailed

COUNT = 200


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    install(tmp_path / "site", monkeypatch)
    yield make_artifact(tmp_path / "artifact")
    _batch_on_ray._opened.cache_clear()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = ({"id": f"n{number}", "prompt": f"the cat {number}"} for number in range(COUNT))
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def names_in(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def in_this_process(monkeypatch: pytest.MonkeyPatch, execute: Executor = in_order) -> None:
    monkeypatch.setattr(_batch_on_ray, "executor_of", lambda *_: nullcontext(execute))


def test_interrupted_batch_continues_with_missing_lines(
    artifact: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, asked = artifact.parent / "answers.jsonl", []
    in_this_process(monkeypatch)

    def stops_after_three(task: object, progress: object) -> object:
        asked.append(task)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return answer_task(task, progress)  # type: ignore[arg-type]

    monkeypatch.setattr(_batch_on_ray, "answer_task", stops_after_three)
    with pytest.raises(KeyboardInterrupt):
        answer_on_ray("local", artifact, prompts, output, OpenOptions(), {"max_tokens": 2}, lambda *_: None)
    assert len(names_in(output)) == 24
    asked[:] = [None] * 4
    assert answer_on_ray("local", artifact, prompts, output, OpenOptions(), {"max_tokens": 2}, lambda *_: None) == 0
    assert sorted(names_in(output)) == sorted(f"n{number}" for number in range(COUNT))
    assert len(asked) == 4 + (COUNT - 24) / 8


def test_a_failed_task_gives_an_error_per_line(artifact: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = artifact.parent / "answers.jsonl"
    in_this_process(monkeypatch)

    def fails(task: object, progress: object) -> object:
        raise TargetFailed("its worker was lost")

    monkeypatch.setattr(_batch_on_ray, "answer_task", fails)
    assert answer_on_ray("local", artifact, prompts, output, OpenOptions(), {}, lambda *_: None) == COUNT
    assert "its worker was lost" in output.read_text()


@pytest.mark.parametrize(
    ("options", "told"),
    [([], "--ray: give --output FILE"), (["-o", "out", "--stats"], "--stats: belongs to a batch in one process")],
)
def test_unsupported_cluster_options_are_refused(artifact: Path, prompts: Path, options: list[str], told: str) -> None:
    done = CliRunner().invoke(command, ["run", str(artifact), "--batch", str(prompts), "--ray", "local", *options])
    assert isinstance(done.exception, InvalidInput) and told in str(done.exception)


@pytest.mark.slow
def test_a_killed_worker_loses_or_repeats_no_answer(artifact: Path, prompts: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed (edgekit[ray])")
    output, killed = artifact.parent / "answers.jsonl", []

    def kill_one() -> None:
        while not killed:
            answered = output.read_bytes().count(b"\n") if output.exists() else 0
            if answered == 0:
                continue
            for process in psutil.Process().children(recursive=True):
                if "_remote_task" in " ".join(process.cmdline()):
                    process.kill()
                    killed.append(answered)
                    return

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    options = {"max_tokens": 64}
    assert answer_on_ray("local", artifact, prompts, output, OpenOptions(), options, lambda *_: None) == 0
    killer.join(10)
    assert killed and killed[0] < COUNT
    assert sorted(names_in(output)) == sorted(f"n{number}" for number in range(COUNT))
