"""Writes the tables of options in docs/commands/ and of features in docs/concepts.md, docs/schemas/, what agents read.

The tutorial is written as a notebook too.

`docs/llms.txt` lists the pages, `examples/skill/SKILL.md` says how to use edgekit. Run `python docs/command_tables.py`
after an option, a capability or a page that they quote changes; a test compares the files with their sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import BaseModel

from edgekit import plugins
from edgekit.apps.bench.eval.evaluation import Evaluation
from edgekit.apps.bench.measurement import Measurement
from edgekit.apps.bench.report.results import Report
from edgekit.apps.bench.workload import Workload
from edgekit.cli import GROUPS, command
from edgekit.contracts.capabilities import Feature
from edgekit.contracts.recipe import RECIPES
from edgekit.model.parts import Layer
from edgekit.testing import fake_model

DOCUMENTED = Path(__file__).parent / "commands"
CONCEPTS = DOCUMENTED.parent / "concepts.md"
TUTORIAL = DOCUMENTED.parent / "tutorial.md"
TARGETS = ("onnx", "mlx", "executorch", "llamacpp")
_MEASURED: dict[str, type[BaseModel]] = {
    "workload": Workload,
    "measurement": Measurement,
    "evaluation": Evaluation,
    "report": Report,
}
_PAGES = ("use", "build", "ship", "look", "measure")  # in the order of work
_TABLE = re.compile(r"^\| option \|.*\n(?:\|.*\n)*", re.MULTILINE)
_LIST = re.compile(r"^\| command \|.*\n(?:\|.*\n)*", re.MULTILINE)
_FEATURES = re.compile(r"^\| backend \|.*\n(?:\|.*\n)*", re.MULTILINE)
_BLOCK = re.compile(r"```(console|python|sh)\n(.*?)```\n", re.DOTALL)
_HEADING = re.compile(r"^## edgekit (.+)$", re.MULTILINE)


def every_command(group: click.Group = command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield every command and subcommand, named without `edgekit`; the empty name is `edgekit` itself."""
    yield name, group
    context = click.Context(group)
    for word in group.list_commands(context):
        each = group.get_command(context, word)
        assert each is not None
        full = f"{name} {word}".strip()
        if isinstance(each, click.Group):
            yield from every_command(each, full)
        else:
            yield full, each


def pages() -> dict[Path, str]:
    """Return the pages of docs/commands/ with regenerated tables."""
    written = {DOCUMENTED / f"{name}.md": _with_tables((DOCUMENTED / f"{name}.md").read_text()) for name in _PAGES}
    described = dict(every_command())
    rows = [
        f"| [`edgekit {name}`]({page.name}#edgekit-{name}) | {described[name].get_short_help_str(200)} |"
        for page, text in written.items()
        for name in _HEADING.findall(text)
        if " " not in name
    ]
    index = DOCUMENTED / "index.md"
    table = "\n".join(["| command | does |", "|---|---|", *rows, ""])
    concepts = _FEATURES.sub(lambda _: _features(), CONCEPTS.read_text(), count=1)
    return {CONCEPTS: concepts, index: _LIST.sub(lambda _: table, index.read_text(), count=1), **written}


def _features() -> str:
    """Return the table of backends and features, for a plain model with heads of 64 values."""
    model = fake_model().model_copy(update={"layers": (Layer(kv_heads=1, head_dim=64),) * 2})
    features = get_args(Feature)
    rows = [
        f"| backend | {' | '.join(features)} | bits of the cache | exact mode |",
        "|---|" + "---|" * (len(features) + 2),
    ]
    for name in TARGETS:
        target = plugins.load_target(name)
        for backend in target.backends:
            able = target.capabilities(model, RECIPES["float32"], backend, model.max_positions)
            marks = ["yes" if feature in able.features else "" for feature in features]
            bits, exact = ", ".join(map(str, able.kv_bits)), able.exact.replace("_", " ")
            rows.append(f"| {name} {backend} | {' | '.join(marks)} | {bits} | {exact} |")
    return "\n".join([*rows, ""])


def _with_tables(text: str) -> str:
    """Regenerate the option table of each section `## edgekit NAME`."""
    first, *sections = re.split(r"^(?=## edgekit )", text, flags=re.MULTILINE)
    known = dict(every_command())
    for place, section in enumerate(sections):
        title = section.splitlines()[0].removeprefix("## edgekit").strip()
        if title in known and (table := _table(known[title])):
            sections[place] = _with_table(section.rstrip("\n") + "\n", table) + "\n"
    return "".join([first, *sections]).rstrip("\n") + "\n"


def _with_table(section: str, table: str) -> str:
    """Replace the section's option table, or append it."""
    if _TABLE.search(section):
        return _TABLE.sub(lambda _: f"{table}\n", section, count=1)
    return f"{section}\n{table}\n"


def _table(each: click.Command) -> str:
    rows = []
    for parameter in each.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            names = ", ".join(f"`{name}`" for name in (*reversed(parameter.opts), *parameter.secondary_opts))
            metavar = "" if parameter.is_flag or not parameter.metavar else f" {parameter.metavar}"
            if isinstance(parameter.type, click.Choice):
                metavar = f" {'|'.join(map(str, parameter.type.choices))}"
            text = f"{names}{metavar}".replace("|", "\\|")
            rows.append(f"| {text} | {(parameter.help or '').replace('|', chr(92) + '|')} |")
    return "\n".join(["| option | |", "|---|---|", *rows]) if rows else ""


def agent_pages() -> dict[Path, str]:
    """Return the list of pages and the skill, made of the start page, the commands and the page of errors."""
    start = (DOCUMENTED.parent / "index.md").read_text()
    purpose = start.partition("\n\n")[2].partition("\n\n")[0]
    listed = re.sub(r"^\*\*(.+)\*\*$", r"## \1", start.partition("## All pages\n")[2], flags=re.MULTILINE)
    steps = start[start.index("### 1. ") : start.index("## All pages")].replace("### ", "## ")
    commands = [f"- `edgekit {name}`: {text}" for group in GROUPS.values() for name, text in group.items()]
    skill = [
        "---\nname: edgekit\ndescription: Plan, quantise, export, run and measure language models on devices with the"
        " edgekit command and its Python API. Use it for questions such as: will this model fit that device, and make"
        " it run there.\n---\n",
        f"# Use edgekit\n\n{purpose}\n",
        "Install one runtime: `pip install 'edgekit[onnx]'` for PCs and boards, `'edgekit[mlx]'` for Apple silicon,"
        " `'edgekit[llamacpp]'` for GGUF files, `'edgekit[executorch]'` for phones; `'edgekit[quantize]'` adds torch to"
        " calibrate weights. Ask `edgekit COMMAND --help` for options: unknown ones are refused by name. Most commands"
        " print JSON with `--json`. Exit code 3: nothing fits.\n",
        _unlinked(steps).rstrip() + "\n",
        "## Commands\n",
        *commands,
        "\n## Errors and cures\n",
        _unlinked(_cures()),
    ]
    return {
        DOCUMENTED.parent / "llms.txt": f"# edgekit\n\n> {' '.join(purpose.split())}\n{listed}",
        DOCUMENTED.parents[1] / "examples/skill/SKILL.md": "\n".join(skill).rstrip() + "\n",
    }


def _cures() -> str:
    """Return the sections of the page of errors."""
    text = (DOCUMENTED.parent / "troubleshooting.md").read_text()
    return text[text.index("## ") :].replace("## ", "### ")


def _unlinked(text: str) -> str:
    """Replace links by their text: a skill is read outside the documentation."""
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)


def schemas() -> dict[Path, str]:
    """Return the JSON schemas of measurements, whose `$id` has their version.

    New fields have a default; any other change increases the version.
    """
    texts = {}
    for name, model in _MEASURED.items():
        schema = model.model_json_schema() | {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": f"edgekit:{name}:{model.model_fields['version'].default}",
        }
        text = json.dumps(schema, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        texts[DOCUMENTED.parent / "schemas" / f"{name}.schema.json"] = text
    return texts


def notebook() -> dict[Path, str]:
    """Return the tutorial as a notebook: text and output as Markdown, commands and Python as code."""
    page = TUTORIAL.read_text()
    cells, place = [], 0
    for block in _BLOCK.finditer(page):
        cells += _markdown(page[place : block.start()])
        cells.append(_cell("code", _code(block[1], block[2])))
        place = block.end()
    cells += _markdown(page[place:])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    kept = {"kernelspec": kernel, "language_info": {"name": "python"}}
    made = {"cells": cells, "metadata": kept, "nbformat": 4, "nbformat_minor": 5}
    return {TUTORIAL.with_suffix(".ipynb"): json.dumps(made, indent=1, ensure_ascii=False) + "\n"}


def _code(kind: str, text: str) -> str:
    if kind == "python":
        return f"%%writefile app.py\n{text}"
    lines = [line.removeprefix("$ ") for line in text.splitlines()]
    if kind == "sh":  # a notebook has its own environment
        return "\n".join(f"%{line}" if line.startswith("pip ") else f"!{line}" for line in lines if "venv" not in line)
    return "\n".join(f"!{line}" for line in lines)


def _markdown(text: str) -> list[dict[str, Any]]:
    stripped = text.strip()
    return [_cell("markdown", stripped)] if stripped else []


def _cell(kind: str, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": text.rstrip("\n").splitlines(keepends=True)}
    return {**cell, "execution_count": None, "outputs": []} if kind == "code" else cell


def main() -> None:
    """Write all pages."""
    for page, text in (pages() | agent_pages() | schemas() | notebook()).items():
        page.write_text(text)


if __name__ == "__main__":
    main()
