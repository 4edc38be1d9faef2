"""Every command, argument and option has help and is documented."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from command_tables import pages

from edgekit.cli import command as edgekit_command

ROOT = Path(__file__).parents[2]
COMMANDS = "\n".join(path.read_text() for path in sorted((ROOT / "docs/commands").glob("*.md")))


def commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for each in group.list_commands(context):
        found = group.get_command(context, each)
        assert found is not None
        yield f"{name} {each}", found
        if isinstance(found, click.Group):
            yield from commands(found, f"{name} {each}")


def section(name: str) -> str:
    """Return the section of docs/commands/ about a command."""
    heading = f"## {name}\n"
    assert COMMANDS.count(heading) == 1, f"docs/commands/ must have one section {heading.strip()!r}"
    return COMMANDS.split(heading, 1)[1].split("\n## ", 1)[0]


EVERY = [pytest.param(*each, id=each[0]) for each in commands(edgekit_command, "edgekit")]


@pytest.mark.parametrize(("name", "found"), EVERY)
def test_a_command_and_each_of_its_options_is_documented(name: str, found: click.Command) -> None:
    assert found.help, f"{name} has no help"
    text = section(name)
    for parameter in found.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts} has no help"
            longest = max(parameter.opts, key=len)
            assert f"`{longest}" in text, f"docs/commands: {name} does not document {longest}"


def test_generated_command_tables_are_current() -> None:
    for page, text in pages().items():
        assert page.read_text() == text, "an option changed: run `python docs/command_tables.py`"


def test_every_page_is_reachable_from_the_front_page() -> None:
    reached, open_pages = set[Path](), [ROOT / "docs/index.md"]
    while open_pages:
        page = open_pages.pop()
        if page not in reached:
            reached.add(page)
            open_pages += [
                (page.parent / link).resolve() for link in re.findall(r"\]\(([\w/.-]+\.md)", page.read_text())
            ]
    assert set((ROOT / "docs").rglob("*.md")) - reached == set()


def test_every_link_between_pages_leads_somewhere() -> None:
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    for page in [*pages, *(ROOT / "docs").rglob("*.md")]:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", prose):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"
