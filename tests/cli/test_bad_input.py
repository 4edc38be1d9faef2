"""Bad input to commands: one-line errors with the value, and no replaced device files."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf_files
import pytest

from edgekit.cli import main
from edgekit.cli._console import draw
from edgekit.common.files import check_output, not_read, write_output
from edgekit.errors import InvalidInput
from edgekit.model.source import open_source

PI = ["--device", "raspberry-pi-5-8gb"]


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run a command; return its exit code and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["plan", "x" * 5000, *PI], "File name too long"),
        (["plan", "demo", "--draft", "x" * 5000, *PI], "File name too long"),
        (["plan", "demo", *PI, "--profiles", "x" * 5000], "File name too long"),
        (["plan", "demo", *PI, "--entitlement", "increased-memory-limt"], "increased-memory-limit"),
        (["plan", "demo", *PI, "-o", "x" * 5000], "choose another path"),
        (["devices", "--target", "onyx"], "known: executorch, llamacpp, mlx, onnx"),
        (["devices", "show", "iphone-16", "--entitlement", "no"], "known: increased-memory-limit"),
        (["verify", "x" * 5000], "File name too long"),
        (["lab", "history", "run\udcff"], "not valid UTF-8"),
        (["inspect", "x" * 5000], "File name too long"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_errors_are_one_clear_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = told(capsys, *arguments)
    assert code == 2
    assert named in said
    assert said.startswith("edgekit: ")
    assert len(said.splitlines()) == 1
    assert len(said) < 600


@pytest.mark.parametrize("command", [["run", "absent", "hello"], ["chat", "absent"]], ids=lambda value: value[0])
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--max-tokens=-1", "--max-tokens -1: must be at least 0"),
        ("--temperature=nan", "--temperature nan: "),
        ("--stop=", "--stop "),
        ("--seed=-1", "--seed -1: must be at least 0"),
    ],
)
def test_options_of_an_answer_are_refused_before_a_model_is_opened(
    command: list[str], option: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = told(capsys, *command, option)
    assert code == 2
    assert found.startswith(f"edgekit: {said}")


def test_unusual_file_names_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    odd = tmp_path / "odd [bold] näme [red] 模型"
    shutil.copytree(open_source("demo").folder, odd)
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(odd), *PI, "-o", str(tmp_path / "plän [b].json")])
    assert not ended.value.code
    said = capsys.readouterr().out
    assert "odd [bold] näme [red] 模型 as onnx" in said
    assert f"--plan '{tmp_path / 'plän [b].json'}'" in said, "what is proposed can be pasted"
    assert (tmp_path / "plän [b].json").is_file()


@pytest.mark.parametrize(
    "arguments",
    [["quantize", "demo", "-r", "balanced"], ["export", "demo", "--recipe", "s4-g32", "--effort", "normal", *PI]],
    ids=lambda value: value[0],
)
def test_without_torch_calibrating_is_refused_with_the_cure(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(sys.modules, "torch", None)
    code, said = told(capsys, *arguments, "-o", str(tmp_path / "out"))
    assert code == 2
    assert "pip install 'edgekit[quantize]'" in said.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_chat_from_a_pipe_ends_at_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgekit.cli import chat

    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(KeyboardInterrupt):
        chat._read("> ")


def test_output_to_a_device_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        write_output(pipe, b"result")
        assert reader.communicate()[0] == b"result"
    assert pipe.is_fifo()


def test_output_follows_a_symlink_and_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_output(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_unwritable_output_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path, tmp_path / "file" / "report.json", tmp_path / ("x" * 300)):
        with pytest.raises(InvalidInput, match=r"name a file in it|choose another path"):
            write_output(path, b"")
    for path in (tmp_path, tmp_path / "file" / "report.json"):
        with pytest.raises(InvalidInput):
            check_output(path)
    check_output(tmp_path / "new" / "report.json")
    check_output(None)


@pytest.mark.parametrize(
    ("environment", "arguments"),
    [
        ({"PYTHONIOENCODING": "ascii"}, ["plan", "demo", *PI]),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, ["devices"]),
        ({"NO_COLOR": "1", "COLUMNS": "40"}, ["plan", "demo", *PI]),
        ({"COLUMNS": "1", "TERM": "dumb"}, ["devices", "show", "raspberry-pi-5-8gb"]),
    ],
    ids=["a terminal of ascii alone", "the C locale", "forty columns without colour", "one column, dumb"],
)
def test_unusual_terminals_work(environment: dict[str, str], arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edgekit", *arguments],
        capture_output=True,
        env=dict(os.environ) | environment,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    assert b"\x1b" not in done.stdout


def test_a_closed_pipe_ends_a_command_silently() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "edgekit", "devices", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) in (0, 1)
    closed = subprocess.run(["sh", "-c", f"{sys.executable} -m edgekit devices >&-"], capture_output=True)
    assert (closed.returncode, closed.stderr.count(b"\n")) == (2, 1)


def test_control_characters_of_others_are_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise InvalidInput("the template says: \x1b[2J\x07\u202egnp.exe\x1b]0;x")

    monkeypatch.setattr("edgekit.cli.command.main", fail)
    with pytest.raises(SystemExit):
        main(["doctor"])
    assert capsys.readouterr().err == r"edgekit: the template says: \x1b[2J\x07\u202egnp.exe\x1b]0;x" + "\n"
    draw(("model",), [("a\x1b[31m",)])
    assert capsys.readouterr().out.split() == ["model", r"a\x1b[31m"]


def test_a_home_that_cannot_be_written_is_named_and_a_limit_is_no_fault_of_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gguf_files.write_family(tmp_path / "a.gguf", "llama")
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "a.gguf" / "home"))
    code, said = told(capsys, "run", str(tmp_path / "a.gguf"), "the cat")
    assert code == 2 and "set EDGEKIT_HOME to a folder that can be written" in said
    for number in (errno.ENOMEM, errno.EMFILE):
        assert "ulimit -a" in str(not_read(tmp_path, OSError(number, os.strerror(number))))
