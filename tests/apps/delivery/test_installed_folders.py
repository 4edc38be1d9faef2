"""An installation and its updates: folders, the chunks that a change costs, and the whole way of a real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_artifacts import install, make_artifact
from published import device_profile
from site_server import SiteServer, site_server

import edgekit
from edgekit import plugins
from edgekit.apps.delivery import publish, pull
from edgekit.apps.delivery.site_index import manifest_name
from edgekit.artifact.artifact import read_manifest
from edgekit.artifact.sealed_adapters import ADAPTERS_FOLDER
from edgekit.cli import command
from edgekit.contracts.installed import holds_artifact
from edgekit.contracts.neutral import NeutralWeights
from edgekit.model.source import open_source
from edgekit.runtime.speculation.open import drafting_bytes
from edgekit.testing import write_adapter
from examples.benchmarks.delivery_figures import packed, update_of
from examples.small_models import RealModelMissing, smollm2


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "target", monkeypatch)
    publish([make_artifact(tmp_path / "artifact")], tmp_path / "site", release="1")
    pull((tmp_path / "site").as_uri(), tmp_path / "app", device=device_profile(tmp_path), allow=["file"])
    return tmp_path / "app"


@pytest.mark.parametrize("words", [["inspect", "--json"], ["verify", "--json"], ["bom"], ["run", "--json", "a"]])
def test_commands_take_an_installation(app: Path, words: list[str]) -> None:
    name, *options = words
    done = CliRunner().invoke(command, [name, str(app), *options])
    assert done.exit_code == 0, (done.output, done.exception)
    expected = CliRunner().invoke(command, [name, str(read_manifest(app).folder), *options])
    if name != "run":  # its answer has times
        assert json.loads(done.stdout) == json.loads(expected.stdout)


def test_memory_of_a_draft_model_is_counted_for_an_installation(app: Path) -> None:
    plan = read_manifest(app).plan
    counted = [drafting_bytes(path, 256, 1, plan) for path in (app, read_manifest(app).folder)]
    assert counted[0] == counted[1] > 0


def test_an_empty_installation_holds_no_artifact(app: Path, tmp_path: Path) -> None:
    assert holds_artifact(app) and holds_artifact(tmp_path / "artifact")
    assert not holds_artifact(tmp_path) and not holds_artifact(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert not holds_artifact(tmp_path / "empty")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> NeutralWeights:
    folder = tmp_path_factory.mktemp("weights")
    return edgekit.quantize("demo", "s4-g32", folder / "demo", effort="quick", store=folder / "store")


@pytest.mark.quantize
@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [
        pytest.param("onnx", marks=pytest.mark.onnx),  # queries, keys and values are one tensor of its graphs
        pytest.param("mlx", marks=pytest.mark.mlx),
        pytest.param("llamacpp", marks=pytest.mark.llamacpp),
    ],
)
def test_a_changed_linear_costs_at_most_half_more_than_its_bytes(
    weights: NeutralWeights, tmp_path: Path, target: str
) -> None:
    missing = plugins.load_target(target).missing()
    if missing is not None:
        pytest.skip(missing)
    plan = edgekit.plan(weights.folder, target=target, context=512, recipe="s4-g32")
    base = packed(plan, weights, tmp_path / "base")
    for number, name in enumerate(("layers.1.self_attn.k_proj", "layers.1.mlp.gate_proj")):
        update = update_of(name, plan, weights, base, tmp_path / str(number))
        assert update.own_bytes > 20_000, name
        # onnx measures the steps of its 8-bit cache again: a byte each, so 1.7 kB for the demo.
        assert update.own_bytes <= update.fetched_bytes <= update.own_bytes + 2_500, (name, update)
        assert update.times_own <= 1.5, (name, update)


PROMPT = "def add(a, b):"


def typed(*words: object) -> str:
    done = CliRunner().invoke(command, list(map(str, words)))
    assert done.exit_code == 0, (words, done.output, done.exception)
    return done.stdout


def pulled(server: SiteServer, app: Path) -> dict[str, Any]:
    server.asked.clear()
    told = typed("pull", server.url, "-o", app, "--device", "this", "--allow", "http", "--json")
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


@pytest.mark.onnx
@pytest.mark.quantize
@pytest.mark.slow
def test_an_update_with_an_adapter_fetches_only_the_adapter(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    adapter = write_adapter(tmp_path / "tone", open_source("demo-draft").spec, rank=4)
    adapter_bytes = sum(path.stat().st_size for path in adapter.iterdir())
    export = ["export", "demo-draft", "--target", "onnx", "--context", 256, "--adapter-rank", 4, "--effort", "quick"]
    typed(*export, "-o", tmp_path / "base")
    typed(*export, "--adapter", f"tone={adapter}", "-o", tmp_path / "with-tone")
    app = tmp_path / "app"
    with site_server(tmp_path / "site") as server:
        typed("publish", tmp_path / "base", "-o", tmp_path / "site", "--release", "1")
        pulled(server, app)
        typed("publish", tmp_path / "with-tone", "-o", tmp_path / "site", "--release", "2")
        second = pulled(server, app)
        assert second["fetched_bytes"] == adapter_bytes
        assert server.file_bytes == adapter_bytes + (tmp_path / "site" / manifest_name(second["sha256"])).stat().st_size
    assert [name for name in read_manifest(app).manifest.files if name.startswith(ADAPTERS_FOLDER)]
    answers = [
        typed("run", app, PROMPT, "--raw", "--max-tokens", 12, *options)
        for options in ([], ["--adapter", "tone"], ["--adapter", f"tone={adapter}"])
    ]
    assert answers[1] == answers[2] != answers[0]
    refused = CliRunner().invoke(command, ["run", str(app), PROMPT, "--raw", "--adapter", "tune"])
    assert "did you mean tone" in str(refused.exception)
    words = ["export", "demo-draft", "--target", "onnx", "--adapter", f"tone={adapter}", "-o", str(tmp_path / "none")]
    beyond = CliRunner().invoke(command, words)
    assert "export it again with --adapter-rank 4" in str(beyond.exception) and not (tmp_path / "none").exists()


def answer_of(artifact: Path) -> str:
    return typed("run", artifact, "The capital of France is", "--raw", "--temperature", 0, "--max-tokens", 8)


@pytest.mark.onnx
@pytest.mark.quantize
@pytest.mark.slow
@pytest.mark.real
@pytest.mark.long
def test_a_real_model_is_published_pulled_signed_and_run(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("model_signing", reason="the extra `sign` is not installed")
    from certificates import Keys

    try:
        model = smollm2()
    except RealModelMissing as missing:
        pytest.skip(str(missing))
    keys, app, site = Keys(tmp_path), tmp_path / "app", tmp_path / "site"
    artifacts = [tmp_path / "first", tmp_path / "second"]
    for place, recipe in zip(artifacts, ("s4-g32", "s8"), strict=True):
        export = ["--target", "onnx", "--context", 512, "--recipe", recipe, "--effort", "quick", "--with-bom"]
        typed("export", model, *export, "-o", place)
        typed("sign", place, "--key", keys.key)
    with site_server(site) as server:
        device = ["--device", "this", "--allow", "http", "--keys", keys.public]
        answers = {}
        for number, place in enumerate(artifacts, 1):
            typed("publish", place, "-o", site, "--release", number, "--key", keys.key)
            told = typed("pull", server.url, "-o", app, *device)
            assert f"release {number}, " in told
            typed("verify", app, "--signature", keys.public)
            answers[number] = answer_of(app)
            assert "Paris" in answers[number]
            assert answers[number] == answer_of(place)
    typed("rollback", app)
    assert answer_of(app) == answers[1]
    bill = json.loads(typed("bom", app))["metadata"]["component"]
    assert bill["licenses"] == [{"license": {"id": "Apache-2.0"}}]
