"""Writes the files derived from the commands: `commands.json` and the tables of docs/commands/.

`commands.json` serves `edgekit --help` and completion.

Run `python -m edgekit.cli._reference` after an option changes; a test compares the files with the commands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from edgekit.cli import COMMANDS_FILE, Commands, command
from edgekit.contracts.recipe import GGUF_RECIPES, KEEP, NATIVE_RECIPES, RECIPES
from edgekit.measure.bench.workload import bundled_workloads
from edgekit.model.source import BUNDLED

DOCUMENTED = Path(__file__).parents[2] / "docs/commands"
_PAGES = ("use", "read", "build", "servers", "deliver", "look", "measure", "lab")  # in the order of work
_TARGETS = ["onnx", "mlx", "llamacpp", "executorch"]
_TABLE = re.compile(r"^\| option \|.*\n(?:\|.*\n)*", re.MULTILINE)
_LIST = re.compile(r"^\| command \|.*\n(?:\|.*\n)*", re.MULTILINE)
_HEADING = re.compile(r"^## edgekit (.+)$", re.MULTILINE)


def tree() -> dict[str, Any]:
    """Describe every command by name: help, arguments, and options with the values for completion."""
    return {name: _described(each) for name, each in every_command()}


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
    return {index: _LIST.sub(lambda _: table, index.read_text(), count=1), **written}


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


def _described(each: click.Command) -> dict[str, Any]:
    options = [parameter for parameter in each.params if isinstance(parameter, click.Option)]
    arguments = [parameter for parameter in each.params if isinstance(parameter, click.Argument)]
    described: dict[str, Any] = {"help": (each.help or "").split("\n\n")[0].replace("\n", " ")}
    if isinstance(each, click.Group):
        described["commands"] = each.list_commands(click.Context(each))
    described["arguments"] = [_values(argument, str(argument.name)) for argument in arguments]
    described["options"] = {
        name: [_values(option, max(option.opts, key=len)), (option.help or "").split(". ")[0]]
        for option in options
        for name in (*option.opts, *option.secondary_opts)
    }
    return described


def _values(parameter: click.Parameter, name: str) -> str | list[str] | None:
    """Return the values for completion: a list, one of the kinds `flag`, `file`, `device`, or None for any text."""
    if getattr(parameter, "is_flag", False):
        return "flag"
    if isinstance(parameter.type, click.Choice):
        return [str(choice) for choice in parameter.type.choices]
    known: dict[str, str | list[str]] = {
        "--device": "device",
        "name": "device",
        "--recipe": [*RECIPES, KEEP.name, *NATIVE_RECIPES, *GGUF_RECIPES],
        "--recipes": [*RECIPES, *NATIVE_RECIPES, *GGUF_RECIPES],
        "--target": _TARGETS,
        "--workload": sorted(bundled_workloads()),
        "--calibrate": ["default"],
        "--draft": ["ngram", "early-exit", "head", "auto", "off", *BUNDLED],
        "model": list(BUNDLED),
    }
    if name in known:
        return known[name]
    is_path = isinstance(parameter.type, click.Path) or "Path" in repr(parameter.type)
    return "file" if is_path or name.startswith(("artifact", "before", "after", "folder", "file")) else None


def main() -> None:
    """Write all files."""
    assert isinstance(command, Commands)
    COMMANDS_FILE.write_text(json.dumps(tree(), indent=1, ensure_ascii=False) + "\n")
    for page, text in pages().items():
        page.write_text(text)


if __name__ == "__main__":
    main()
