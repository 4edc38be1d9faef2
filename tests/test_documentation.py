"""Every command, argument and option has help and stands in the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from edgekit.cli import command as edgekit_command

ROOT = Path(__file__).parents[1]
COMMANDS = (ROOT / "docs/commands.md").read_text()


def commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for each in group.list_commands(context):
        found = group.get_command(context, each)
        assert found is not None
        yield f"{name} {each}", found
        if isinstance(found, click.Group):
            yield from commands(found, f"{name} {each}")


def section(name: str) -> str:
    """The part of docs/commands.md below the heading of that command."""
    heading = f"## {name}\n"
    assert heading in COMMANDS, f"docs/commands.md has no section {heading.strip()!r}"
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
            assert f"`{longest}" in text, f"docs/commands.md: {name} does not document {longest}"


def test_every_page_is_reachable_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert {page for page in pages if f"docs/{page}" not in readme} == set()


def test_every_link_between_pages_leads_somewhere() -> None:
    import re

    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"
