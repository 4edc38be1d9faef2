"""`edgekit run` and `edgekit chat`, as a user at the terminal meets them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_artifacts import install, make_artifact

import edgekit
from edgekit.artifact import open_artifact
from edgekit.cli import command

BIN = [sys.executable, "-m", "edgekit"]


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "site", monkeypatch)
    return make_artifact(tmp_path / "artifact")


def edgekit_cli(*arguments: str | Path, stdin: str | None = None, code: int = 0) -> tuple[str, str]:
    given = None if stdin is None else stdin.encode()
    done = subprocess.run([*BIN, *map(str, arguments)], capture_output=True, input=given, timeout=60)
    assert done.returncode == code, done.stderr.decode()
    # Not as text: that would turn a carriage return, which a sampled answer may hold, into a line's end.
    return done.stdout.decode(), done.stderr.decode()


def test_run_writes_the_answer_and_nothing_else(artifact: Path) -> None:
    out, err = edgekit_cli("run", artifact, "the cat", "--max-tokens", "12", "--raw")
    with edgekit.open(artifact) as runtime:
        assert out == runtime.generate("the cat", max_tokens=12).text + "\n"
    assert err == ""


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
        ("--top-k", "2"), ("--top-p", "0.2"), ("--min-p", "0.9"), ("--typical-p", "0.1"), ("--repetition-penalty", "5"),
        ("--presence-penalty", "2"), ("--frequency-penalty", "2"), ("--stop", sampled[3]),
    ):  # fmt: skip
        assert text("--temperature", "1.5", "--seed", "3", *option) != sampled, option
    assert text("--regex", "[ab]{3}") in {f"{a}{b}{c}\n" for a in "ab" for b in "ab" for c in "ab"}
    (tmp_path / "schema.json").write_text('{"type": "boolean"}')
    (tmp_path / "grammar.lark").write_text('start: "mat" | "cat"')
    assert text("--schema", str(tmp_path / "schema.json")) in ("true\n", "false\n")
    assert text("--grammar", str(tmp_path / "grammar.lark")) in ("mat\n", "cat\n")
    assert len(text("--window", "20", "--sinks", "2")) > 3 and text("--context", "256") == plain
    assert text("--exact") == plain


def test_json_holds_the_answer_and_its_statistics(artifact: Path) -> None:
    out, err = edgekit_cli("run", artifact, "the cat", "--max-tokens", "9", "--json", "--temperature", "1")
    found = json.loads(out)
    # The seed is drawn, so the answer may end by itself.
    assert found["finish_reason"] in ("length", "stop") and found["tokens"] <= 9 and found["seed"] >= 0 and err == ""
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
    if sys.platform == "linux":
        assert "not known" not in err.split("measured")[1]


def test_a_prompt_may_come_from_a_pipe(artifact: Path) -> None:
    piped, _ = edgekit_cli("run", artifact, "-", "--raw", "--max-tokens", "9", stdin="the cat")
    given, _ = edgekit_cli("run", artifact, "the cat", "--raw", "--max-tokens", "9")
    assert piped == given


WRONG = {
    "no such path": (["run", "{missing}", "x"], "does not exist"),
    "not an artifact": (["run", "{empty}", "x"], "holds no manifest.json"),
    "a file": (["run", "{file}", "x"], "is not a directory"),
    "chat without artifact": (["chat", "{missing}"], "does not exist"),
    "top-p past one": (["run", "{artifact}", "x", "--top-p", "2"], "top_p"),
    "temperature that is no number": (["run", "{artifact}", "x", "--temperature", "nan"], "temperature"),
    "no tokens": (["run", "{artifact}", "x", "--max-tokens", "0"], "max_tokens"),
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


def test_a_conversation_remembers_obeys_and_forgets(artifact: Path) -> None:
    lines = "the cat\n/stats\n/nope\nsat on\n\n/reset\nthe cat\n/help\n/exit\nnever\n"
    out, err = edgekit_cli("chat", artifact, "--max-tokens", "7", "--ignore-eos", stdin=lines)
    with edgekit.open(artifact) as runtime:
        options = {"max_tokens": 7, "ignore_eos": True}
        messages = [{"role": "user", "content": "the cat"}]
        first = runtime.chat(messages, **options).text
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "sat on"}]
        second = runtime.chat(messages, **options).text
    assert out == f"{first}\n{second}\n{first}\n"
    for word in ("tokens/s", "/nope is not a command", "forgotten", "ctrl-C stops an answer"):
        assert word in err


def test_a_conversation_that_grows_too_long_says_so_and_goes_on(artifact: Path) -> None:
    lines = f"the cat\n{'z' * 2000}\n/reset\nthe cat\n"
    out, err = edgekit_cli("chat", artifact, "--max-tokens", "5", "--ignore-eos", stdin=lines)
    answers = out.splitlines()
    assert "room for" in err and "/reset" in err and answers[0] == answers[-1]


def _started(arguments: list[str | Path], **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*BIN, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_ctrl_c_ends_an_answer_with_what_is_there(artifact: Path) -> None:
    process = _started(["run", artifact, "the cat", "--window", "64", "--max-tokens", "100000000", "--ignore-eos"])
    assert process.stdout is not None
    first = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Traceback" not in err
    assert len(first) == 20 and rest.endswith(b"\n")


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_ctrl_c_stops_the_answer_and_not_the_conversation(artifact: Path) -> None:
    process = _started(["chat", artifact, "--window", "64", "--max-tokens", "100000000", "--ignore-eos"])
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"the cat\n")
    process.stdin.flush()
    assert len(process.stdout.read(20)) == 20
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    _, err = process.communicate(b"/stats\n/exit\n", timeout=30)
    assert process.returncode == 0 and b"Traceback" not in err and b"tokens/s" in err
