"""Commands, variables and threats are documented, and pages refer to what exists, in a bounded length."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from command_tables import agent_pages, every_command, notebook, pages, schemas

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
    for page, text in (pages() | agent_pages() | schemas() | notebook()).items():
        assert page.read_text() == text, f"{page.name} is not what its sources say: run `python docs/command_tables.py`"


def test_what_agents_read_names_what_is_there() -> None:
    guide, skill = ((ROOT / name).read_text() for name in ("AGENTS.md", "examples/skill/SKILL.md"))
    for path in re.findall(r"`((?:[\w.]+/)+[\w.]*|[A-Z]+\.md)`", guide):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", guide, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    names = {name for name, _ in every_command()}
    for words in re.findall(r"^\$ edgekit ([a-z]+)|`edgekit ([a-z]+)", skill, re.MULTILINE):
        assert "".join(words) in names, words


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


PAGE = (ROOT / "docs/environment.md").read_text()


SOURCES = [
    path
    for folder in ("edgekit", "targets", "examples/runner")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".cpp", ".h")
]


def test_every_variable_of_the_code_is_on_the_page_and_no_other() -> None:
    in_code = {name for path in SOURCES for name in re.findall(r"\bEDGEKIT_[A-Z_]+", path.read_text())}
    macros = {name for path in SOURCES for name in re.findall(r"#define (EDGEKIT_[A-Z_]+)", path.read_text())}
    assert set(re.findall(r"EDGEKIT_[A-Z_]+", PAGE)) == in_code - macros


def test_every_folder_below_home_is_on_the_page() -> None:
    folders = {
        name
        for path in SOURCES
        for name in re.findall(r'\b(?:home\(\) / |bounded_store\()"([a-z][^"]*)"', path.read_text())
    }
    assert len(folders) >= 8
    tests_only = {"real-models"}
    assert {name for name in folders - tests_only if f"`{name}/`" not in PAGE and f"`{name}`" not in PAGE} == set()


def test_every_threat_has_a_test_that_exists() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")]
    assert rows[0][-1].strip() == "test" and len(rows) > 20
    for row in rows[1:]:
        for named in row[-1].split(","):
            found = re.fullmatch(r"`(?P<file>tests/[\w/]+\.py)::(?P<name>test_\w+)`", named.strip())
            assert found is not None, row
            tree = ast.parse((ROOT / found["file"]).read_text())
            assert found["name"] in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, row


DOCS = ROOT / "docs"


MOST_WORDS = 2_100  # on their way down to 900


def test_the_architecture_page_names_code_that_exists() -> None:
    page = (DOCS / "architecture.md").read_text()
    table = page.split("## Folders")[0]
    for path in re.findall(r"`((?:edgekit|examples|tests)/[\w/]+(?:\.py|/))`", page):
        assert (ROOT / path).exists(), path
    places = re.findall(r"`([\w.]+)` in\s+`(edgekit/[\w/]+\.py)`", table)
    assert len(places) >= 5
    for name, path in places:
        for part in name.removeprefix("edgekit.").split("."):
            assert re.search(rf"(?:def|class) {part}\b", (ROOT / path).read_text()), f"{path} has no {part}"


def test_the_architecture_page_lists_every_folder() -> None:
    folders = {path.name for path in (ROOT / "edgekit").iterdir() if (path / "__init__.py").exists()}
    listed = (DOCS / "architecture.md").read_text().split("```text")[1].split("```")[0]
    assert {name for name in folders if f"{name}/" not in listed} == {"_demo"} & folders


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda path: path.relative_to(DOCS).as_posix())
def test_a_page_is_short_enough_to_read(page: Path) -> None:
    assert len(page.read_text().split()) <= MOST_WORDS


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "site" / "reference.html").read_text()
    for name in ("open_runtime", "AsyncRuntime", "check_engine", "ContextExceeded"):
        assert name in reference


PAGES = sorted((ROOT / "docs").glob("*.md"))


# Pages whose blocks are fragments of edgekit itself and no scripts.
NO_SCRIPTS = {"architecture.md"}


def scripts() -> dict[str, str]:
    """The blocks of each page as one script, in their order."""
    blocks = {
        page.stem.lower(): re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        for page in PAGES
        if page.name not in NO_SCRIPTS
    }
    return {name: "\n".join(found) for name, found in blocks.items() if found}


@pytest.mark.slow
def test_every_page_is_a_typed_script(tmp_path: Path) -> None:
    found = scripts()
    assert {"runtime", "chat", "python", "tutorial"} <= set(found)
    for name, text in found.items():
        (tmp_path / f"{name}_page.py").write_text(text)
    # With the options and the folder of `make check`, whose results it then uses again.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *sorted(map(str, tmp_path.glob("*_page.py")))],
        cwd=ROOT, env=os.environ | {"MYPYPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
