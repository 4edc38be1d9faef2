"""Runs public tasks on artifacts. Each answer is stored, so an interrupted run continues where it stopped.

Only the seed decides which items share a batch, so that even an engine whose rounding depends on the batch gives the
same answers after an interruption.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

from edgekit import Artifact, Runtime, Scoring, Stream, open as open_runtime, open_artifact, read_template
from edgekit.apps.bench.tasks.calls import FunctionCalls
from edgekit.apps.bench.tasks.choices import HellaSwag, TruthfulQa
from edgekit.apps.bench.tasks.code import HumanEval
from edgekit.apps.bench.tasks.code_sandbox import run_tests
from edgekit.apps.bench.tasks.results import GroupResult, TaskComparison, TaskOutcome, TaskReport, TaskResult
from edgekit.apps.bench.tasks.statistics import paired, wilson
from edgekit.apps.bench.tasks.task import Judgement, ModelInput, PublicTask, TaskAnswer
from edgekit.apps.bench.tasks.word_problems import Gsm8k
from edgekit.common.files import home
from edgekit.common.progress import Progress
from edgekit.common.results_file import ResultsFile
from edgekit.errors import ContextExceeded, EdgekitError, InvalidInput, Unsupported

_ALL: tuple[PublicTask, ...] = (HumanEval(), Gsm8k(), HellaSwag(), TruthfulQa(), FunctionCalls())
TASKS: dict[str, PublicTask] = {task.name: task for task in _ALL}
_AHEAD = 4  # items of a batch per concurrent sequence
_FOLDER = "task-answers"  # under edgekit's home


class TaskOptions(NamedTuple):
    """The selection of items, and the options for answering them."""

    limit: int | None = None
    seed: int = 0
    temperature: float = 0.0
    allow_code: bool = False
    fresh: bool = False


def run_tasks(paths: Sequence[Path], names: Sequence[str], options: TaskOptions, progress: Progress) -> TaskReport:
    """Run every task on every artifact; compare each artifact with the first one, item by item."""
    tasks = [TASKS[name] for name in dict.fromkeys(names)]
    check_code(tasks, options)
    check_templates(tasks, paths)
    items = {task.name: chosen(task, options) for task in tasks}  # fetched before an artifact is opened
    results: dict[str, list[TaskResult]] = {task.name: [] for task in tasks}
    for path in paths:
        with open_runtime(path, prefixes=0) as runtime:
            for task in tasks:
                results[task.name].append(run_task(runtime, task, items[task.name], options, progress))
    return TaskReport(
        results=tuple(result for every in results.values() for result in every),
        comparisons=tuple(_compared(every[0], other) for every in results.values() for other in every[1:]),
    )


def check_code(tasks: Sequence[PublicTask], options: TaskOptions) -> None:
    """Refuse tasks with generated code unless it is allowed and can be isolated on this machine."""
    for task in tasks:
        if task.runs_code and not options.allow_code:
            raise InvalidInput(f"{task.name} runs code that the model writes; allow that with --allow-code")
        if task.runs_code:
            run_tests("def f(): return 1", "", "def check(f):\n    assert f() == 1\n", "f")
    if options.allow_code and not any(task.runs_code for task in tasks):
        raise InvalidInput("--allow-code: none of these tasks runs code")


def check_templates(tasks: Sequence[PublicTask], paths: Sequence[Path]) -> None:
    """Refuse tasks that ask in chats on models without a chat template."""
    asked_in_chats = next((task.name for task in tasks if task.needs_chat), None)
    for artifact in map(open_artifact, paths if asked_in_chats else ()):
        template = read_template(artifact.folder)
        template.close()
        if not template.exists:
            raise Unsupported(
                f"{asked_in_chats}: needs a model with a chat template; {artifact.plan.model.name} has none"
            )


def chosen(task: PublicTask, options: TaskOptions) -> dict[str, dict[str, Any]]:
    """Return the items to ask, shuffled by the seed: all, or the first `limit`."""
    every = list(task.items().items())
    random.Random(f"{task.name} {options.seed}").shuffle(every)
    return dict(every[: options.limit])


def run_task(
    runtime: Runtime, task: PublicTask, items: Mapping[str, dict[str, Any]], options: TaskOptions, progress: Progress
) -> TaskResult:
    """Answer the items that have no stored answer, then judge all."""
    artifact = runtime.artifact
    assert artifact is not None
    place = _place(artifact, task, runtime.sequences, options)
    if options.fresh:
        place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, dict[str, Any]] = {}
    with ResultsFile(place, lambda line: known.update({line["id"]: line})) as kept:
        names, size = list(items), _AHEAD * runtime.sequences
        for start in range(0, len(names), size):
            batch = names[start : start + size]
            if all(name in known for name in batch):
                continue

            def tell(done: int, before: int = start) -> None:
                progress(before + done, len(names), f"{task.name}: {artifact.plan.recipe.name}")

            for line in _answers(runtime, task, {name: items[name] for name in batch}, options, tell):
                kept.write(line)  # a later line replaces an earlier one, e.g. of a run with a smaller --limit
                known[line["id"]] = line
    outcomes = []
    for place_of, (name, item) in enumerate(items.items()):
        progress(place_of, len(items), f"{task.name}, judging: {name}")
        outcomes.append(_outcome(task, name, item, known[name]))
    progress(1, 1, f"{task.name}, judging: done")
    times = {name: round(sum(known[item][name] for item in items), 1) for name in ("seconds", "processor_s")}
    unanswered = sum("error" in known[name] for name in items)
    return _result(artifact, task, outcomes, times, options).model_copy(update={"unanswered": unanswered})


def _answers(
    runtime: Runtime,
    task: PublicTask,
    items: Mapping[str, dict[str, Any]],
    options: TaskOptions,
    tell: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Answer one batch; its time is divided evenly among the answers."""
    began, used = perf_counter(), process_time()
    chat, tools = runtime.template.exists, runtime.template.takes_tools
    asked = {name: _submitted(runtime, task.ask(item, chat=chat, tools=tools), options) for name, item in items.items()}
    lines = []
    for done, (name, waiting) in enumerate(asked.items()):
        tell(done)
        lines.append({"id": name, **_answered(waiting)})
    times = {"seconds": perf_counter() - began, "processor_s": process_time() - used}
    return [line | {name: round(value / len(lines), 4) for name, value in times.items()} for line in lines]


def _submitted(runtime: Runtime, asked: ModelInput, options: TaskOptions) -> Scoring | Stream | EdgekitError:
    try:
        if asked.continuations:
            return runtime.submit_score(asked.prompt, asked.continuations)
        return runtime.submit(
            asked.prompt,
            tools=list(asked.tools) or None,
            max_tokens=asked.max_tokens,
            stop=asked.stop,
            temperature=options.temperature,
            seed=options.seed,
        )
    except ContextExceeded as error:
        return error


def _answered(waiting: Scoring | Stream | EdgekitError) -> dict[str, Any]:
    if isinstance(waiting, EdgekitError):
        return {"error": str(waiting)}
    if isinstance(waiting, Scoring):
        return {"totals": [score.total for score in waiting.scores()]}
    return {"text": waiting.answer().text}


def _outcome(task: PublicTask, name: str, item: Mapping[str, Any], line: Mapping[str, Any]) -> TaskOutcome:
    if "error" in line:
        judged = Judgement(False, str(line["error"]))
    else:
        judged = task.judge(item, TaskAnswer(tuple(line.get("totals", ())), str(line.get("text", ""))))
    return TaskOutcome(id=name, group=task.group(item), right=judged.right, why=judged.why[:300])


def _result(
    artifact: Artifact,
    task: PublicTask,
    outcomes: Sequence[TaskOutcome],
    times: Mapping[str, float],
    options: TaskOptions,
) -> TaskResult:
    plan = artifact.plan
    groups = dict.fromkeys(outcome.group for outcome in outcomes if outcome.group)
    by_group = {group: [each.right for each in outcomes if each.group == group] for group in groups}
    return TaskResult(
        task=task.name,
        title=task.title,
        artifact_sha256=artifact.sha256,
        model=plan.model.name,
        target=plan.target,
        backend=plan.backend,
        recipe=plan.recipe.name,
        artifact=artifact.folder.name,
        data_sha256=tuple(data.sha256 for data in task.data),
        seed=options.seed,
        temperature=options.temperature,
        share=wilson(sum(each.right for each in outcomes), len(outcomes)),
        groups=tuple(GroupResult(name=name, share=wilson(sum(all_), len(all_))) for name, all_ in by_group.items()),
        seconds=times["seconds"],
        processor_s=times["processor_s"],
        outcomes=tuple(outcomes),
    )


def _compared(reference: TaskResult, other: TaskResult) -> TaskComparison:
    return TaskComparison(
        task=other.task,
        artifact=other.label,
        reference=reference.label,
        paired=paired([one.right for one in other.outcomes], [one.right for one in reference.outcomes]),
    )


def _place(artifact: Artifact, task: PublicTask, sequences: int, options: TaskOptions) -> Path:
    """Return the file of stored answers; its name is a hash of everything that can change an answer."""
    inputs = {
        "artifact": artifact.sha256,
        "task": task.name,
        "version": task.version,
        "data": [data.sha256 for data in task.data],
        "sequences": sequences,
        "seed": options.seed,
        "temperature": options.temperature,
    }
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    return home() / _FOLDER / f"{key}.jsonl"
