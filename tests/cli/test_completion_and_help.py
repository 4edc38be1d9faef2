"""Help, completion and typing errors of the command line as a whole."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_tables import every_command

from edgekit.cli import command


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
