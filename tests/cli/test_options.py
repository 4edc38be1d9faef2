"""Options made from fields, their completion and their help."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest
from click.testing import CliRunner
from command_tables import every_command
from pydantic import Field

from edgekit.cli import command
from edgekit.cli._options import as_typed, options
from edgekit.common.base import Frozen
from edgekit.common.options import ByteCount, Option, read_options
from edgekit.errors import InvalidInput, UnknownName


class Cake(Frozen):
    """A model with a field of each kind."""

    layers: Annotated[int, Field(ge=1, le=9)] = Field(default=2, description="Layers of the cake.")
    sugar: Annotated[ByteCount, Field(ge=1)] | None = Field(default=None, description="Most sugar.")
    kind: Literal["plain", "nut"] = Field(default="plain", description="The dough.")
    tops: Annotated[tuple[str, ...], Option(name="top", short="t")] = Field(default=(), description="A topping.")
    plate: Path | None = Field(default=None, description="The plate.")
    warm: bool = Field(default=False, description="Serve it warm.")
    iced: Annotated[bool | None, Option(negative="bare")] = Field(default=None, description="With icing.")
    hidden: int = 3  # no description, and so no option


def bake(*arguments: str) -> tuple[Cake, list[str]]:
    given: list[Any] = []

    @click.command()
    @options(cake=Cake)
    def command(cake: Cake) -> None:
        given.extend([cake, as_typed("cake")])

    CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    return given[0], given[1]


def test_omitted_options_have_defaults_and_are_unset() -> None:
    cake, typed = bake()
    assert cake == Cake() and cake.model_fields_set == set() and typed == []


def test_every_field_type_becomes_an_option() -> None:
    words = "--layers 3 --sugar 1KiB --kind nut -t nuts -t cream --plate a/b --warm --bare"
    cake, typed = bake(*words.split())
    given = {"layers": 3, "sugar": 1024, "kind": "nut", "tops": ("nuts", "cream"), "plate": Path("a/b")}
    assert cake == Cake(**given, warm=True, iced=False)
    assert " ".join(typed) == "--layers 3 --sugar 1KiB --kind nut --top nuts --top cream --plate a/b --warm"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", "0"), "--layers 0: must be at least 1"),
        (("--layers", "10"), "--layers 10: must be at most 9"),
        (("--sugar", "much"), "--sugar: 'much' is not a size; write it as 1.5GiB, 800MB or a number of bytes"),
        (("--sugar", "0"), "--sugar '0': must be at least 1"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_options_name(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{message}"):
        bake(*arguments)


def test_an_unknown_keyword_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidInput, match=r"unknown option 'suger'; did you mean sugar\?"):
        read_options(Cake, {"suger": 1})


def test_the_help_has_types_choices_and_defaults() -> None:
    @click.command()
    @options(cake=Cake)
    def command(cake: Cake) -> None: ...

    shown = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    for part in (
        "--layers INTEGER Layers of the cake. [default: 2]",
        "--sugar SIZE",
        "[plain|nut]",
        "-t, --top TEXT A topping. May be repeated.",
        "--iced / --bare",
    ):
        assert part in shown
    assert "hidden" not in shown


def test_unknown_names_have_a_nearest_guess() -> None:
    assert "did you mean iphone-16-pro?" in str(UnknownName("device", "iPhone16pro", ["iphone-16-pro", "pixel-9"]))
    assert "did you mean" not in str(UnknownName("device", "toaster", ["iphone-16-pro", "pixel-9"]))


def test_bash_itself_completes_an_option(tmp_path: Path) -> None:
    program = tmp_path / "edgekit"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m edgekit "$@"\n')
    program.chmod(0o755)
    script = """
    eval "$(_EDGEKIT_COMPLETE=bash_source edgekit)"
    COMP_WORDS=(edgekit plan demo --devi); COMP_CWORD=3
    _edgekit_completion edgekit
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    assert "--device" in done.stdout.split(), done.stderr


def typed(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(command, list(arguments))
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("rnu", "did you mean edgekit run?"),
        ("exprot", "did you mean edgekit export?"),
        ("list", "did you mean edgekit store ls, or edgekit devices?"),
        ("models", "did you mean edgekit choose, or edgekit store ls?"),
        ("version", "did you mean edgekit --version?"),
        ("xyzzy", "`edgekit --help` lists them."),
    ],
)
def test_an_unknown_command_has_a_hint(wrong: str, hint: str) -> None:
    code, shown = typed(wrong)
    assert code == 2 and hint in shown


def test_an_unknown_option_has_a_hint() -> None:
    code, shown = typed("plan", "demo", "--devcie", "this")
    assert code == 2 and "--device" in shown


def test_without_a_command_help_is_shown_in_workflow_order() -> None:
    code, shown = typed()
    assert code == 0
    places = [shown.index(f"\n  {name} ") for name in ("run", "plan", "export", "quantize", "devices", "bench")]
    assert places == sorted(places)
    assert "..." not in shown.partition("[ARGS]...")[2], "no help is cut off"
    for name, each in every_command():
        if name and " " not in name:
            described = " ".join((each.help or "").split("\n\n")[0].split())
            assert f" {name} {described}" in " ".join(shown.split()), name
    assert typed("-h") == typed("--help") == (code, shown)


def test_version_is_printed() -> None:
    import edgekit

    assert typed("--version") == typed("-V") == (0, f"edgekit {edgekit.__version__}\n")


def test_help_imports_no_command(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom edgekit.cli import command\n"
        "command.main(['--help'], standalone_mode=False)\nprint(sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "edgekit.cli.run" not in done.stdout and "'numpy'" not in done.stdout


def with_examples() -> list[tuple[str, str]]:
    commands = [(name, each.epilog or "") for name, each in every_command()]
    return [(name, line.strip()) for name, text in commands for line in text.splitlines() if "  edgekit" in line]


@pytest.mark.parametrize(("name", "line"), with_examples())
def test_examples_in_help_parse(name: str, line: str) -> None:
    program, called, *arguments = shlex.split(line)
    assert (program, called) == ("edgekit", name)
    dict(every_command())[name].make_context(name, arguments)


def test_large_commands_list_their_options_by_section() -> None:
    text = CliRunner().invoke(dict(every_command())["chat"], ["--help"]).output
    sections = ["\nSampling:\n", "\nWhen an answer ends:\n", "\n  Examples:\n"]
    assert sorted(sections, key=text.index) == sections
    assert text.count("\n  --temperature FLOAT") == 1
