"""Completion, help and typing errors of the command line as a whole."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgekit.cli import command, read_commands
from edgekit.cli._complete import candidates, complete
from edgekit.cli._reference import every_command

TREE = read_commands()

# The time of the process, as a shell waits for it, and the modules that were imported.
_ASK = """
import json, os, sys, time
os.environ.update(_EDGEKIT_COMPLETE="bash_complete", COMP_WORDS="edgekit plan demo --device iph", COMP_CWORD="4")
try:
    from edgekit.cli import main
    main()
finally:
    print(json.dumps([time.process_time(), sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def offered(line: str) -> list[str]:
    """Return the values offered by completion at the end of `edgekit …`."""
    *words, incomplete = line.split(" ")
    return [value for kind, value, _ in candidates(words, incomplete, TREE) if kind == "plain"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pl", ["plan"]),
        ("devices sh", ["show"]),
        ("devices show raspberry-pi-5", ["raspberry-pi-5-16gb", "raspberry-pi-5-8gb"]),
        ("plan demo --device this", ["this", "this-cpu"]),
        ("plan demo --recipe s4", ["s4-g32", "s4-g64", "s4-g128"]),
        ("export demo --target e", ["executorch"]),
        ("bench x -w q", ["quick"]),
        ("run de", ["demo", "demo-draft"]),
        ("plan demo --prefer s", ["speed"]),
        ("plan --dev", ["--device"]),
        ("plan --context 4096 dem", ["demo", "demo-draft"]),
    ],
)
def test_completion_knows_commands_options_and_values(line: str, expected: list[str]) -> None:
    assert [value for value in offered(line) if value in expected] == expected
    assert all(value.startswith(line.split(" ")[-1]) for value in offered(line))


def test_completion_leaves_files_to_the_shell() -> None:
    assert candidates(["plan", "demo", "-o"], "pl", TREE) == [("file", "pl", "")]
    assert candidates(["run"], "./some", TREE) == [("file", "./some", "")]


def test_completion_has_the_format_of_each_shell() -> None:
    asked = {"COMP_WORDS": "edgekit devi", "COMP_CWORD": "1"}
    text = TREE["devices"]["help"]
    assert complete("bash", asked, TREE) == "plain,devices"
    assert complete("zsh", asked, TREE) == f"plain\ndevices\n{text}"
    assert complete("fish", {"COMP_WORDS": "edgekit devi", "COMP_CWORD": "devi"}, TREE) == f"plain,devices\t{text}"


def test_completion_is_quick_and_imports_no_command() -> None:
    runs = [subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True) for _ in range(3)]
    *lines, last = runs[0].stdout.splitlines()
    assert "plain,iphone-16-pro" in lines
    assert not {"numpy", "pydantic", "rich", "yaml"} & set(json.loads(last)[1])
    assert min(json.loads(run.stdout.splitlines()[-1])[0] for run in runs) < 0.2


def test_bash_itself_completes_a_device(tmp_path: Path) -> None:
    program = tmp_path / "edgekit"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m edgekit "$@"\n')
    program.chmod(0o755)
    script = """
    eval "$(_EDGEKIT_COMPLETE=bash_source edgekit)"
    COMP_WORDS=(edgekit plan demo --device pixel-9); COMP_CWORD=4
    _edgekit_completion edgekit
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    assert "pixel-9" in done.stdout.split(), done.stderr


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
    listed = {name for name in TREE if " " not in name and name}
    assert all(f"\n  {name} " in shown for name in listed)
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
