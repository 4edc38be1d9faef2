"""`edgekit run` and `edgekit chat` in pipes and terminals."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import pytest
from click.testing import CliRunner
from fake_artifacts import make_artifact
from rich.console import Console

import edgekit
from edgekit.artifact.artifact import open_artifact
from edgekit.cli import _answers, command, main
from edgekit.cli._answers import Answering, is_repeating
from edgekit.cli._markdown import _print, _silent_keys, split_blocks
from edgekit.runtime.open_options import OpenOptions
from edgekit.runtime.recommended import ChatSampling, chat_sampling

GREEDY = ("--temperature", "0")
BIN = [sys.executable, "-m", "edgekit"]


def edgekit_cli(*arguments: str | Path, stdin: str | None = None, code: int = 0) -> tuple[str, str]:
    with CliRunner().isolation(input=stdin) as (out, err, _):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, arguments)))
        sys.stdout.flush(), sys.stderr.flush()
    assert ended.value.code == code, err.getvalue().decode()
    # Not as text: that would turn a carriage return, which a sampled answer may hold, into a line's end.
    return out.getvalue().decode(), err.getvalue().decode()


def test_run_writes_the_answer_and_why_it_ends(artifact: Path) -> None:
    out, err = edgekit_cli("run", artifact, "the cat", "--max-tokens", "12", "--raw")
    with edgekit.open(artifact) as runtime:
        assert out == runtime.generate("the cat", max_tokens=12).text + "\n"
    assert err == "edgekit: cut: --max-tokens 12 is reached\n"


def test_run_uses_the_chat_template_where_there_is_one(artifact: Path, tmp_path: Path) -> None:
    chat, _ = edgekit_cli("run", artifact, "the cat", "--max-tokens", "9", "--system", "sat on")
    with edgekit.open(artifact) as runtime:
        messages = [{"role": "system", "content": "sat on"}, {"role": "user", "content": "the cat"}]
        assert chat == runtime.chat(messages, max_tokens=9).text + "\n"
    plain = make_artifact(tmp_path / "plain", chat=False)
    out, _ = edgekit_cli("run", plain, "the cat", "--max-tokens", "9")
    with edgekit.open(plain) as runtime:
        assert out == runtime.generate("the cat", max_tokens=9).text + "\n"
    _, err = edgekit_cli("run", plain, "the cat", "--chat", code=2)
    assert "no chat template" in err
    _, err = edgekit_cli("run", plain, "the cat", "--system", "x", code=2)
    assert "--system" in err
    _, err = edgekit_cli("chat", plain, code=2)
    assert "no chat template" in err


def test_every_option_reaches_the_answer(artifact: Path, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    runner = CliRunner()

    def text(*arguments: str) -> str:
        result = runner.invoke(command, ["run", str(artifact), "the cat", "--raw", "--max-tokens", "150", *arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    plain = text()
    sampled = text("--temperature", "1.5", "--seed", "3")
    assert sampled != plain and text("--temperature", "1.5", "--seed", "3") == sampled
    for option in (
        ("--top-k", "2"), ("--top-p", "0.2"), ("--min-p", "0.9"), ("--repetition-penalty", "5"),
        ("--stop", sampled[3]),
    ):  # fmt: skip
        assert text("--temperature", "1.5", "--seed", "3", *option) != sampled, option
    assert text("--regex", "[ab]{3}") in {f"{a}{b}{c}\n" for a in "ab" for b in "ab" for c in "ab"}
    (tmp_path / "schema.json").write_text('{"type": "boolean"}')
    (tmp_path / "grammar.lark").write_text('start: "mat" | "cat"')
    assert text("--schema", str(tmp_path / "schema.json")) in ("true\n", "false\n")
    assert text("--grammar", str(tmp_path / "grammar.lark")) in ("mat\n", "cat\n")
    assert len(text("--window", "20")) > 3 and text("--context", "256") == plain
    assert text("--exact") == plain


def test_json_holds_the_answer_and_its_statistics(artifact: Path) -> None:
    out, err = edgekit_cli("run", artifact, "the cat", "--max-tokens", "9", "--json", "--temperature", "1")
    found = json.loads(out)
    # The seed is drawn, so the answer may end by itself.
    assert found["finish_reason"] in ("length", "stop") and found["tokens"] <= 9 and found["seed"] >= 0 and err == ""
    assert list(found) == ["text", "finish_reason", "seed", "tokens", "statistics"]
    assert found["statistics"]["first_token_s"] > 0 and found["statistics"]["predicted_total_bytes"] > 0
    again, _ = edgekit_cli(
        "run", artifact, "the cat", "--max-tokens", "9", "--temperature", "1", "--seed", str(found["seed"])
    )
    assert again == found["text"] + "\n"


def test_statistics_show_predicted_beside_measured(artifact: Path) -> None:
    _, err = edgekit_cli("run", artifact, "the cat", "--max-tokens", "9", "--stats")
    for word in ("first token", "prefill", "decode", "measured RSS"):
        assert word in err
    device = open_artifact(artifact).plan.device
    assert err.count(f"predicted for {device}: ") == 2
    assert err.count("private, in all") == 1 and "of it private" not in err, "private memory is predicted once"
    if sys.platform == "linux":
        assert "not known" not in err.split("measured")[1]


def test_a_prompt_may_come_from_a_pipe(artifact: Path) -> None:
    arguments = [*BIN, "run", str(artifact), "-", "--raw", "--max-tokens", "9"]
    piped = subprocess.run(arguments, capture_output=True, text=True, input="the cat", timeout=60).stdout
    given, _ = edgekit_cli("run", artifact, "the cat", "--raw", "--max-tokens", "9")
    assert piped == given


WRONG = {
    "no such path": (["run", "{missing}", "x"], "does not exist"),
    "not an artifact": (["run", "{empty}", "x"], "holds no manifest.json"),
    "a file": (["run", "{file}", "x"], "is not a directory"),
    "chat without artifact": (["chat", "{missing}"], "does not exist"),
    "two shapes": (["run", "{artifact}", "x", "--regex", "a", "--schema", "{file}"], "exclude"),
    "a schema that is not there": (["run", "{artifact}", "x", "--schema", "{missing}"], "cannot be read"),
    "a window past the plan": (["run", "{artifact}", "x", "--window", "9999"], "window"),
    "a prompt past the context": (["run", "{artifact}", "x" * 3000, "--raw"], "room for"),
    "an unknown option": (["run", "{artifact}", "x", "--top-q", "2"], "No such option"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_one_line_with_a_cure(artifact: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("{}")
    places = {
        "missing": tmp_path / "missing",
        "empty": tmp_path / "empty",
        "file": tmp_path / "file",
        "artifact": artifact,
    }
    out, err = edgekit_cli(*(argument.format(**places) for argument in arguments), code=2)
    assert message in err and "Traceback" not in err and out == ""
    assert "No such option" in message or len(err.strip().splitlines()) == 1


def test_conversation_keeps_history_and_runs_slash_commands(artifact: Path) -> None:
    lines = "the cat\n/stats\n/nope\nsat on\n\n/clear\nthe cat\n/?\n/quit\nnever\n"
    out, err = edgekit_cli("chat", artifact, *GREEDY, "--max-tokens", "7", stdin=f"/set ignore_eos true\n{lines}")
    with edgekit.open(artifact) as runtime:
        options = {"max_tokens": 7, "ignore_eos": True}
        messages = [{"role": "user", "content": "the cat"}]
        first = runtime.chat(messages, **options).text
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "sat on"}]
        second = runtime.chat(messages, **options).text
    assert out == f"{first}\n{second}\n{first}\n"
    for word in (
        "tokens/s",
        "/nope is not a command",
        "forgotten",
        "ctrl-C stops an answer",
        "(cut: --max-tokens 7 is reached)",
    ):
        assert word in err


def test_a_full_context_is_reported_and_chat_continues(artifact: Path) -> None:
    lines = f"the cat\n{'z' * 2000}\n/reset\nthe cat\n"
    out, err = edgekit_cli("chat", artifact, *GREEDY, "--max-tokens", "5", stdin=f"/set ignore_eos true\n{lines}")
    answers = out.splitlines()
    assert "room for" in err and "/reset" in err and answers[0] == answers[-1]


def test_a_message_may_have_several_lines(artifact: Path) -> None:
    lines = '"""the cat\nsat on\nthe mat"""\n/undo\nthe cat\\\nsat on\\\nthe mat\n/retry\n'
    out, err = edgekit_cli("chat", artifact, *GREEDY, "--max-tokens", "7", stdin=f"/set ignore_eos true\n{lines}")
    with edgekit.open(artifact) as runtime:
        message = {"role": "user", "content": "the cat\nsat on\nthe mat"}
        answer = runtime.chat([message], max_tokens=7, ignore_eos=True).text
    assert out == f"{answer}\n" * 3
    assert "Forgotten: the cat" in err


def test_a_conversation_is_saved_and_continued(artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "saved.json"
    begin = f"/system sat on\nthe cat\n/set max_tokens 9\n/save {file}\n"
    first, _ = edgekit_cli("chat", artifact, *GREEDY, "--max-tokens", "7", stdin=f"/set ignore_eos true\n{begin}")
    saved = json.loads(file.read_bytes())
    assert saved["system"] == "sat on" and saved["options"]["max_tokens"] == 9
    assert saved["messages"] == [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": first.removesuffix("\n")},
    ]
    out, err = edgekit_cli("chat", artifact, stdin=f"/load {file}\nthe mat\n")
    with edgekit.open(artifact) as runtime:
        messages = [{"role": "system", "content": "sat on"}, *saved["messages"], {"role": "user", "content": "the mat"}]
        assert out == runtime.chat(messages, max_tokens=9, ignore_eos=True, temperature=0.0).text + "\n"
    assert "Loaded 2 messages." in err


def test_a_failing_slash_command_prints_one_line(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"messages": [{"role": "root", "content": "x"}]}')
    lines = (
        f"/set temprature 1\n/set temperature hot\n/load {tmp_path}/other.json\n/load nowhere\n/save\n/undo\n/retry\n"
    )
    out, err = edgekit_cli("chat", artifact, stdin=lines)
    for message in ("did you mean temperature?", "temperature: ", "holds no conversation", "cannot be read",
                    "/save needs the name of a file", "nothing to undo", "no question to answer again"):  # fmt: skip
        assert message in err
    assert out == "" and "Traceback" not in err


def test_chat_samples_as_the_model_recommends_else_at_0_7(artifact: Path, tmp_path: Path) -> None:
    place = tmp_path / "files"
    place.mkdir()
    assert chat_sampling(place, {}).options == {"temperature": 0.7}
    assert chat_sampling(place, {"temperature": 0.2}) == ChatSampling({}, "as given")
    (place / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95}')
    assert chat_sampling(place, {}) == ChatSampling(
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, "from generation_config.json"
    )
    (place / "generation_config.json").write_text('{"temperature": "hot", "top_k": -4}')
    assert chat_sampling(place, {}).options == {"temperature": 0.7}
    _, err = edgekit_cli("chat", artifact, stdin="/set\n")
    assert "temperature 0.7" in err


def test_chat_stops_an_answer_that_repeats_itself(artifact: Path) -> None:
    pytest.importorskip("llguidance")
    out, err = edgekit_cli("chat", artifact, stdin="/set regex (ab ){400}\nhello\n/set\n")
    assert "(stopped: the answer repeated itself" in err
    assert 80 <= out.count("ab ") < 400
    assert '"(ab ){400}"' in err.split("(stopped")[1], "the session goes on"


def test_an_answer_that_repeats_itself_is_recognised() -> None:
    assert is_repeating("So: " + "the cat sat on the mat. " * 12)
    assert is_repeating("=" * 240)
    assert not is_repeating("the cat sat on the mat. " * 5)
    assert not is_repeating(" ".join(f"line {number}" for number in range(100)))


def test_finished_markdown_blocks_are_split_off_but_never_inside_code() -> None:
    assert split_blocks("One.\n\nTwo") == ("One.\n\n", "Two")
    assert split_blocks("```\na\n\nb\n") == ("", "```\na\n\nb\n")
    assert split_blocks("```\na\n\nb\n```\n\nTwo") == ("```\na\n\nb\n```\n\n", "Two")


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals as POSIX has them")
def test_a_terminal_has_a_header_and_rendered_markdown(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import termios

    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 60))
    arguments = [*BIN, "chat", str(artifact), "--seed", "1", "--max-tokens", "5"]
    environment = dict(os.environ)  # a child also gets readline's COLUMNS otherwise, which `os.environ` lacks
    with (
        subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process,
        ExitStack() as ended,
    ):
        ended.callback(process.kill)  # a failed check must not wait for it for ever
        os.close(theirs)
        shown = _read_until(ours, "> ")
        os.write(ours, b"the cat\n")
        shown += _read_until(ours, "> ")
        os.write(ours, b"/help\n")
        shown += _read_until(ours, "> ")
        os.write(ours, b"/exit\n")
        assert process.wait(timeout=60) == 0
        os.close(ours)
    plan = open_artifact(artifact).plan
    assert f"{plan.model.name} as {plan.target} {plan.backend} {plan.recipe.name}, context 512" in " ".join(
        shown.split()
    )
    assert max(map(len, shown.splitlines())) <= 60, "lines end between words, not where the terminal does"
    assert "temperature 0.7 (the default of chat)" in " ".join(shown.split())


def test_code_is_printed_without_a_margin_and_unbroken(capsys: pytest.CaptureFixture[str]) -> None:
    line = "x = " + "1 + " * 30 + "1"
    _print(Console(width=40), f"Text:\n```py\nif x:\n    {line}\n```\nMore")
    shown = [each.rstrip() for each in capsys.readouterr().out.split("\n") if each.strip()]
    assert shown == ["Text:", "if x:", f"    {line}", "More"]


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals as POSIX has them")
def test_keys_are_not_written_into_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import termios

    ours, theirs = os.openpty()
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        with _silent_keys():
            assert not termios.tcgetattr(theirs)[3] & termios.ECHO
        assert termios.tcgetattr(theirs)[3] & termios.ECHO
    os.close(ours)


def _read_until(terminal: int, prompt: str) -> str:
    """Return a terminal's output, without control sequences, up to the next prompt."""
    shown = ""
    waiting = select.poll()  # unlike `select`, for a process with any number of open files
    waiting.register(terminal, select.POLLIN)
    while not shown.endswith(prompt):
        assert waiting.poll(60_000), f"nothing more after {shown!r}"
        shown = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", shown + os.read(terminal, 4096).decode(errors="replace"))
    return shown


def _started(arguments: list[str | Path], **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*BIN, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_ctrl_c_keeps_the_partial_answer(artifact: Path) -> None:
    process = _started(["run", artifact, "the cat", "--window", "64", "--regex", "[a-z ]{20000}"])
    assert process.stdout is not None
    first = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Traceback" not in err
    assert len(first) == 20 and rest.endswith(b"\n")


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_ctrl_c_stops_the_answer_and_not_the_conversation(artifact: Path) -> None:
    process = _started(["chat", artifact, "--window", "64", "--max-tokens", "100000000"])
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"/set ignore_eos true\nthe cat\n")
    process.stdin.flush()
    assert len(process.stdout.read(20)) == 20
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    _, err = process.communicate(b"/stats\n/exit\n", timeout=30)
    assert process.returncode == 0 and b"Traceback" not in err and b"tokens/s" in err


def test_a_terminal_is_told_of_an_opening_that_takes_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    said, told, runtime = list[str](), Event(), ExitStack()
    monkeypatch.setattr(runtime, "notes", (), raising=False)
    monkeypatch.setattr(_answers, "_SLOW_S", 0.0)
    monkeypatch.setattr(_answers, "announce", lambda text: (said.append(text), told.set()))
    monkeypatch.setattr(edgekit, "open", lambda artifact, options: told.wait(60) and runtime)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with _answers.opened(Path("my.edgekit"), OpenOptions(), Answering()):
        assert said == ["opening my.edgekit"]
