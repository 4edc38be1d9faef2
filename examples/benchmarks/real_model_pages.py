"""Writes the pages of real models from their rows: an overview, and a page of tables for each model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from edgekit.common.files import write_output
from edgekit.contracts.recipe import RECIPES
from examples.benchmarks.real_model_rows import DEFAULT, KINDS, MODELS, ROOT, TARGETS, Row, place

FOLDER = ROOT / "docs" / "evidence"
OVERVIEW, OF_MODEL = "real_models.md", "real_models_{}.md"
BEGIN, END = "<!-- tables: written by examples/benchmarks/real_models.py -->", "<!-- end of tables -->"
MOST_OTHERS = 0.1  # of all cores, used by other programs; beside more of them a speed says nothing, and is not shown
_ASKED = (DEFAULT, *RECIPES)


def write_pages(rows: Iterable[Row]) -> None:
    """Write the tables into the pages, between their marks."""
    rows = list(rows)
    _write(OVERVIEW, [line for model in MODELS for line in overview(model, _of(rows, model))])
    for model in MODELS:
        _write(OF_MODEL.format(model), model_tables(_of(rows, model)))


def _of(rows: Iterable[Row], model: str) -> list[Row]:
    return sorted((row for row in rows if row["model"] == model), key=place)


def _write(page: str, lines: list[str]) -> None:
    path = FOLDER / page
    text = path.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    body = "\n".join(lines).strip()
    write_output(path, f"{before}{BEGIN}\n\n{body}\n\n{END}{after}".encode())


def overview(model: str, rows: list[Row]) -> list[str]:
    """The loss on code of every recipe on every target."""
    found = {(row["recipe"], row["target"]): row for row in rows}
    lines = [[recipe, *(_loss(found.get((recipe, target))) for target in TARGETS)] for recipe in _ASKED]
    return [f"## {model}", "", *table(" | ".join(["recipe", *TARGETS]), lines), ""]


def _loss(row: Row | None) -> str:
    if row is None:
        return "not run"
    if row["refused"]:
        return "refused"
    if "quality" not in row:
        return "not measured"
    code = row["quality"]["code"]
    return f"{code['kl_mean']:.4f}, {code['same_top']:.1%}"


def model_tables(rows: list[Row]) -> list[str]:
    """Every table of one model, its refusals, and the rows that are missing."""
    lines = []
    for made in (quality_table(rows), run_table(rows), task_table(rows)):
        lines += [*made, ""] if made else []
    lines += [f"- {name(row)} is refused: {row['refused']}" for row in rows if row["refused"]]
    left = missing(rows)
    return [*lines, f"- not run: {'; '.join(left)}." if left else "- every other recipe was run."]


def name(row: Row) -> str:
    """The target and the recipe; of a default export also the device, and the recipe that its plan chose."""
    chosen = row["recipe"] == DEFAULT and not row["refused"]
    return f"{row['target']} {row['recipe']}" + (f" for {row['device']}: {row['stored_as']}" if chosen else "")


def missing(rows: list[Row]) -> list[str]:
    """Recipes that were not run, by target."""
    made = {(row["target"], row["recipe"]) for row in rows}
    left = {target: [each for each in _ASKED if (target, each) not in made] for target in TARGETS}
    return [f"{target} {', '.join(recipes)}" for target, recipes in left.items() if recipes]


def table(titles: str, lines: list[list[str]]) -> list[str]:
    """A Markdown table; nothing without lines."""
    cells = [title.strip() for title in titles.split("|")]
    every = [cells, ["---"] * len(cells), *lines] if lines else []
    return [f"| {' | '.join(line)} |" for line in every]


def quality_table(rows: list[Row]) -> list[str]:
    lines = []
    for row in rows:
        if "quality" not in row:
            continue
        texts = [row["quality"][kind] for kind in KINDS]
        lines.append([
            name(row),
            row["method"],
            f"{row['bits_per_weight']:.2f}",
            f"{row['bytes'] / 1e6:.1f}",
            f"{texts[0]['tokens']:,}",
            *(f"{text['kl_mean']:.4f} ± {text['kl_error']:.4f}" for text in texts),
            *(f"{text['same_top']:.1%}" for text in texts),
            *(f"{text['perplexity']:.2f} ({text['reference_perplexity']:.2f})" for text in texts),
            row["self_check"].partition(",")[0],
        ])  # fmt: skip
    titles = (
        "target, recipe | method | bits | MB | tokens | KL, code | KL, prose | same top, code | prose "
        "| perplexity, code (float) | prose (float) | self-check"
    )
    return table(titles, lines)


def run_table(rows: list[Row]) -> list[str]:
    lines = []
    for row in rows:
        if "run" not in row:
            continue
        run = row["run"]
        predicted, measured = run["predicted_private_bytes"], run["measured_private_bytes"]
        others = run.get("others_share")
        is_quiet = others is not None and others <= MOST_OTHERS
        lines.append([
            name(row),
            f"{run['context']:,}",
            f"{predicted / 2**20:.0f} MiB",
            f"{measured / 2**20:.0f} MiB",
            f"{predicted / measured - 1:+.1%}",
            f"{run['prefill_tokens_per_s']:.0f}" if is_quiet else "busy",
            f"{run['decode_tokens_per_s']:.1f}" if is_quiet else "busy",
        ])  # fmt: skip
    titles = "target, recipe | context | private memory, predicted | measured | off by | prefill tok/s | decode tok/s"
    return table(titles, lines)


def task_table(rows: list[Row]) -> list[str]:
    """The share of right answers of each task, with its 95 % interval."""
    asked = list(dict.fromkeys(task for row in rows for task in sorted(row.get("tasks", {}))))
    lines = [[name(row), *(_share(row["tasks"].get(task)) for task in asked)] for row in rows if row.get("tasks")]
    return table(" | ".join(["target, recipe", *(f"{task}: right (95 % interval)" for task in asked)]), lines)


def _share(share: dict[str, Any] | None) -> str:
    if share is None:
        return "not run"
    return f"{share['right']} of {share['asked']} ({share['low']:.0%} to {share['high']:.0%})"
