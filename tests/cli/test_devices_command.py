"""`edgekit devices` on the command line: lists, filters, shows, and refuses in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from edgekit.cli import main

ROOT = Path(__file__).parents[2]


class Answer(NamedTuple):
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Answer]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))

    def command(*arguments: str) -> Answer:
        with pytest.raises(SystemExit) as ended:
            main(["devices", *arguments])
        out, err = capsys.readouterr()
        code = ended.value.code
        return Answer(code if isinstance(code, int) else 1, out, err)

    return command


def names(answer: Answer) -> set[str]:
    assert answer.code == 0, answer.err
    return {device["name"] for device in json.loads(answer.out)}


def test_the_bare_command_lists_every_device(run: Run) -> None:
    answer = run()
    assert answer.code == 0
    for file in (ROOT / "profiles").glob("*.yaml"):
        assert file.stem in answer.out
    assert len(names(run("--json"))) == len(list((ROOT / "profiles").glob("*.yaml")))


def test_filters_compose(run: Run) -> None:
    assert names(run("--kind", "board", "--json")) == {
        f"raspberry-pi-{board}" for board in ("4-8gb", "5-8gb", "5-16gb")
    }
    ipads = names(run("--os", "ipados", "--json"))
    assert ipads and ipads == names(run("--kind", "tablet", "--json"))
    mlx = names(run("--target", "mlx", "--json"))
    assert "macbook-m4-16gb" in mlx and "pixel-9" not in mlx
    large = names(run("--kind", "mac", "--min-memory", "40GiB", "--json"))
    assert "m4-max-64gb" in large and "macbook-m4-16gb" not in large
    assert large < names(run("--kind", "mac", "--json"))


def test_filters_without_a_match_give_an_empty_list(run: Run) -> None:
    assert names(run("--kind", "board", "--min-memory", "1TiB", "--json")) == set()
    assert "0 devices" in run("--kind", "board", "--target", "mlx").out


def test_show_prints_every_figure_with_source_and_confidence(run: Run) -> None:
    answer = run("show", "ipad-8gb")
    assert answer.code == 0
    for part in ("documented", "recalled", "826325", "from 26.4, before 26.6", "increased-memory-limit", "sha256"):
        assert part in answer.out
    body = json.loads(run("show", "ipad-8gb", "--json").out)
    assert body["profile"]["ram"]["confidence"] == "documented" and len(body["sha256"]) == 64
    assert len(body["budgets"]) == len(body["profile"]["app_limits"])


@pytest.mark.parametrize(("version", "private_bytes"), [("26.3", 6_000_000_000), ("26.4", 3_000_000_000)])
def test_show_answers_for_one_os_version(run: Run, version: str, private_bytes: int) -> None:
    body = json.loads(run("show", "ipad-8gb", "--os-version", version, "--json").out)
    assert [budget["private_bytes"] for budget in body["budgets"]] == [private_bytes]


def test_show_answers_for_an_entitlement(run: Run) -> None:
    answer = run("show", "iphone-15-pro", "--entitlement", "increased-memory-limit", "--json")
    assert json.loads(answer.out)["budgets"][0]["private_bytes"] == 6_000_000_000


def test_show_measures_this_machine_when_asked(run: Run) -> None:
    body = json.loads(run("show", "this", "--measure", "--json").out)["profile"]
    assert body["name"] == "this" and body["usable_bandwidth_gb_s"]["value"] > 0
    assert run("show", "this-cpu").code == 0


def test_show_reads_a_file_and_a_folder(run: Run) -> None:
    folder = ROOT / "examples" / "profiles"
    assert "Reception kiosk" in run("show", str(folder / "reception-kiosk.yaml")).out
    assert "Reception kiosk" in run("show", "reception-kiosk", "--profiles", str(folder)).out
    assert "reception-kiosk" in names(run("--profiles", str(folder), "--json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(("show", "iphone-16-por"), "did you mean iphone-16-pro", id="a near miss"),
        pytest.param(("show", "./absent.yaml"), "absent.yaml", id="a missing file"),
        pytest.param(("show", "pixel-9", "--measure"), "--measure", id="measuring another device"),
        pytest.param(("show", "pixel-9", "--os-version", "soon"), "OS version 'soon'", id="a version that is none"),
        pytest.param(("--min-memory", "lots"), "'lots' is not a size", id="a size that is none"),
        pytest.param(("--kind", "toaster"), "toaster", id="an unknown kind"),
        pytest.param(("--profiles", "/nonexistent"), "/nonexistent", id="a missing folder"),
        pytest.param(("--json", "show", "pixel-9"), "go after its name", id="an option before the subcommand"),
    ],
)
def test_a_mistake_is_a_clear_line_and_exit_code_2(run: Run, arguments: tuple[str, ...], message: str) -> None:
    answer = run(*arguments)
    assert answer.code == 2 and message in answer.err and "Traceback" not in answer.err


def test_a_bad_file_in_a_folder_is_named(run: Run, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: bad\ncolour: red\n")
    answer = run("--profiles", str(tmp_path))
    assert answer.code == 2 and f"{bad}:" in answer.err
    assert answer.err.count("\n") == 1


def test_a_bad_profile_of_the_user_does_not_stop_a_named_one(run: Run, tmp_path: Path) -> None:
    own = tmp_path / "home" / "profiles"
    own.mkdir(parents=True)
    (own / "bad.yaml").write_text("nonsense")
    assert run("show", "pixel-9").code == 0
