"""`edgekit devices` on the command line: lists, filters, shows, and refuses in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from edgekit_executorch import ExecutorchTarget

from edgekit.cli import main
from edgekit.contracts.recipe import RECIPES
from edgekit.device.load import load_profile
from edgekit.model.source import open_source
from edgekit.planner.candidates import PlanSubject
from edgekit.planner.resolver import as_measured

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
    assert "tok/s (" in body["speeds"]["llamacpp metal"]
    assert f"llamacpp metal: {body['speeds']['llamacpp metal']}" in answer.out


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


SHARED = {
    "device": "pixel-9", "processor": "Tensor G4", "os": "Android 16", "day": "2026-11-01",
    "engine": "executorch.xnnpack", "versions": {"executorch": "1.0.0"}, "family": "llama", "parameters": 134_515_008,
    "layers": 30, "hidden_size": 576, "recipe": "s8", "threads": 3, "context": 2048, "kv_bits": 32,
    "private_bytes": 10**8, "peak_bytes": 2 * 10**8, "runtime_bytes": None, "power": "battery", "temperature_c": 31.5,
    "others_share": 0.01, "cases": [],
}  # fmt: skip
CASE = {"prompt_tokens": 64, "depth_tokens": 0, "step_bytes": 140_000_000, "decode_tokens_per_s": [80.0, 90.0, 95.0]}


def test_shared_figures_become_a_profile_by_which_plans_predict(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "shared.json"
    ones = []
    for size, layers in ((1_300_000_000, 16), (140_000_000, 30)):
        rates = [share / (size / 30e9 + layers * 0.0002) for share in (0.85, 1, 1.2)]
        ones.append(SHARED | {"layers": layers, "cases": [CASE | {"step_bytes": size, "decode_tokens_per_s": rates}]})
    file.write_text(json.dumps({"version": 1, "measurements": ones}))
    said = run("calibrate", str(file))
    assert said.code == 0 and "pixel-9: executorch.xnnpack bandwidth" in said.out and "30 GB/s (25.5 to 36)" in said.out
    figures = json.loads(run("show", "pixel-9", "--json").out)["profile"]["engines"]["executorch.xnnpack"]
    assert figures["layer_ms"]["value"] == pytest.approx(0.2, rel=0.01) and figures["spread"] == [0.85, 1.2]
    assert figures["bandwidth_gb_s"]["source"] == "measured: shared"
    shown = run("show", "pixel-9").out
    assert "(measured on this device with this engine)" in shown and "executorch.xnnpack layer_ms" in shown
    file.write_text(json.dumps({"version": 1, "measurements": [SHARED | {"device": None, "cases": [CASE]}]}))
    assert "name one with --device" in run("calibrate", str(file)).err
    assert "pixel-8: executorch.xnnpack bandwidth" in run("calibrate", str(file), "--device", "pixel-8").out


def test_memory_that_an_app_had_is_learnt_with_the_runtimes(run: Run, tmp_path: Path) -> None:
    for name, more in (("iphone-13-pro", 10), ("raspberry-pi-5-8gb", 1 << 20)):
        before, file = load_profile(name), tmp_path / f"{name}.json"
        used = before.budget().private_bytes + more
        one = {"device": name, "cases": [CASE | {"step_bytes": 1000}], "private_bytes": used, "runtime_bytes": 5 << 20}
        file.write_text(json.dumps({"version": 1, "measurements": [SHARED | one]}))
        said = run("calibrate", str(file)).out
        assert "executorch.xnnpack runtime before any model the target's → 5 MiB" in said
        assert ("one app" if before.app_limits else "kept from apps") in said
        after = load_profile(name)
        assert after.budget().private_bytes == used and after.runtime_base["executorch.xnnpack"].value == 5 << 20
        # What was learnt is what the next plan predicts by, and its source is said.
        target, demo = ExecutorchTarget(), open_source("demo").spec
        offer = target.offer(demo, before, "xnnpack", RECIPES["s8"])
        learnt = as_measured(offer, PlanSubject(demo, "demo", "0" * 64), after).memory
        assert learnt.runtime_bytes == 5 << 20 and f"measured: {name}" in learnt.source


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version 2 of shared measurements, this edgekit reads 1"),
        ({"colour": "red"}, "colour: unknown field"),
        ({"engine": "executorch.vulcan"}, "executorch.vulcan does not run on pixel-9"),
        ({"device": "pixel-99"}, "unknown device 'pixel-99'"),
        ({"processor": "/home/ann"}, "processor"),
        ({"parameters": "1B"}, "parameters"),
        ({"private_bytes": 1 << 45}, "is more than pixel-9 has"),
        ({"decode_tokens_per_s": [80.0, 90.0, 9500.0]}, "GB/s were read, and the memory of pixel-9 gives"),
        ({"decode_tokens_per_s": [95.0, 90.0, 80.0]}, "are not the lowest, the median and the highest"),
        ({"decode_tokens_per_s": "90 tok/s"}, "decode_tokens_per_s"),
        ({"decode_tokens_per_s": [0.0, 90.0, 95.0]}, "decode_tokens_per_s"),
        ({"step_bytes": 1e99}, "step_bytes"),
    ],
    ids=str,
)
def test_a_bad_shared_file_is_one_line_and_changes_nothing(
    run: Run, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    file = tmp_path / "shared.json"
    of_case, of_file = ({key: change[key] for key in change if key in keys} for keys in (CASE, {"version": 1}))
    one = (
        SHARED | {"cases": [CASE | of_case]} | {key: change[key] for key in change if key not in {**of_case, **of_file}}
    )
    file.write_text(json.dumps({"version": 1, "measurements": [one]} | of_file))
    answer = run("calibrate", str(file))
    assert answer.code == 2 and said in answer.err and answer.err.count("\n") == 1
    assert not (tmp_path / "home" / "profiles").exists()


def test_measurements_that_people_gave_are_whole(run: Run) -> None:
    for file in sorted((ROOT / "profiles/shared").glob("*.json")):
        assert run("calibrate", str(file)).code == 0


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
