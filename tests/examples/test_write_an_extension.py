"""The example package adds a command, drafter, scorer and method; what cannot be loaded harms nothing else."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from entry_points import declare
from exported_demo import export_demo

import edgekit
from edgekit.cli import main
from edgekit.errors import InvalidInput, Unsupported

SOURCE = Path(__file__).parents[2] / "examples" / "write_an_extension"
PROMPT = "def fibonacci(n):"

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SOURCE))
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    declare(tmp_path, project["entry-points"], monkeypatch)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_demo(tmp_path_factory.mktemp("extension") / "demo.edgekit")


def typed(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(each) for each in arguments])
    return int(ended.value.code or 0)


@pytest.mark.usefixtures("extension")
def test_its_command_is_one_of_edgekit(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(PROMPT)
    assert typed("tokens", demo, text, "--json") == 0
    with edgekit.open(demo) as runtime:
        count = len(runtime.encode(PROMPT, add_special_tokens=False))
    assert json.loads(capsys.readouterr().out) == {"tokens": count}
    assert typed("--help") == 0
    shown = capsys.readouterr().out
    assert "Of other packages:\n  tokens  Count the tokens of FILE, as ARTIFACT reads it." in shown


@pytest.mark.usefixtures("extension")
def test_its_drafter_changes_no_text_and_its_proposals_are_accepted(demo: Path, tmp_path: Path) -> None:
    with edgekit.open(demo, exact=True) as runtime:
        plain = runtime.generate(PROMPT, max_tokens=64, temperature=0)
    phrases = tmp_path / "phrases.txt"
    phrases.write_text("\n".join(line.strip() for line in plain.text.splitlines()))
    with edgekit.open(demo, exact=True, draft=f"phrases:{phrases}") as runtime:
        drafted = runtime.generate(PROMPT, max_tokens=64, temperature=0)
    assert drafted.text == plain.text
    assert drafted.timings.proposed > 0 and drafted.timings.accepted > 0


@pytest.mark.usefixtures("extension")
def test_a_wrong_argument_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="draft phrases:: is no file; give phrases:FILE with one phrase a line"):
        edgekit.open(tmp_path / "nothing", draft="phrases")
    with pytest.raises(InvalidInput, match="or ngram, early-exit, head, phrases, auto or off"):
        edgekit.open(tmp_path / "nothing", draft="phrase")


@pytest.mark.usefixtures("extension")
def test_its_scorer_keeps_tokens_of_a_window(demo: Path) -> None:
    prompt = (SOURCE / "edgekit_extras/phrases.py").read_text()
    texts = {}
    for keep in ("loud", "newest"):
        with edgekit.open(demo, window=128, sinks=4, keep=keep) as runtime:
            texts[keep] = runtime.generate(prompt, max_tokens=64, temperature=0).text
    assert texts["loud"] and texts["loud"] != texts["newest"]


@pytest.mark.usefixtures("extension")
def test_its_method_chooses_other_integers_than_rounding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ["--calibrate", "default"]
    asked = ["quantize", "demo-draft", "-r", "s4-g64", "--store", tmp_path / "store"]
    assert typed(*asked, "--method", "weighted", *text, "-o", tmp_path / "weighted") == 0
    assert typed(*asked, "--method", "rtn", "-o", tmp_path / "nearest") == 0
    weighted, nearest = (edgekit.NeutralWeights.open(tmp_path / name) for name in ("weighted", "nearest"))
    assert weighted.manifest.method == "weighted"
    assert "as s4-g64 by weighted on" in capsys.readouterr().out
    name = "model.layers.1.mlp.down_proj"
    assert (weighted.integers(name) != nearest.integers(name)).any()
    assert typed(*asked, "--method", "loud", "-o", tmp_path / "unknown") == 2
    assert "--method: 'loud' is not installed; known: awq, gptq, rtn, weighted" in capsys.readouterr().err
    assert typed(*asked, "--method", "weighted", "--effort", "quick", "-o", tmp_path / "quick") == 2
    assert "leave out --method weighted or --effort" in capsys.readouterr().err


def test_what_cannot_be_loaded_is_left_out(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"broken": "nowhere_at_all:THING"}
    groups = {"edgekit.commands": {**broken, "run": "nowhere_at_all:THING"}, "edgekit.kv_scorers": broken}
    declare(tmp_path, groups, monkeypatch)
    with edgekit.open(demo) as runtime:
        assert runtime.generate(PROMPT, max_tokens=4).text
    with pytest.raises(Unsupported, match="cannot keep tokens by broken"):
        edgekit.open(demo, window=128, keep="broken")
    assert typed("broken") == 2
    cannot = "command broken (nowhere_at_all:THING) cannot be loaded: No module named 'nowhere_at_all'"
    assert f"edgekit: {cannot}; reinstall its package\n" in capsys.readouterr().err
    assert typed("--help") == 0 and typed("run", "--help") == 0
    assert cannot in " ".join(capsys.readouterr().out.split())
