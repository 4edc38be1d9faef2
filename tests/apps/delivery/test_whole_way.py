"""From a model to an answer on the device, with the commands of a user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from site_server import SiteServer, site_server

from edgekit.apps.delivery.site_index import manifest_name
from edgekit.artifact.artifact import read_manifest
from edgekit.artifact.sealed_adapters import ADAPTERS_FOLDER
from edgekit.cli import command
from edgekit.model.source import open_source
from edgekit.testing import write_adapter
from examples.small_models import RealModelMissing, smollm2

pytestmark = [pytest.mark.onnx, pytest.mark.quantize, pytest.mark.slow]
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


def test_an_update_with_an_adapter_fetches_only_the_adapter(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    adapter = write_adapter(tmp_path / "tone", open_source("demo").spec, rank=4)
    adapter_bytes = sum(path.stat().st_size for path in adapter.iterdir())
    export = ["export", "demo", "--target", "onnx", "--context", 256, "--adapter-rank", 4, "--effort", "quick"]
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
    beyond = CliRunner().invoke(
        command, ["export", "demo", "--target", "onnx", "--adapter", f"tone={adapter}", "-o", str(tmp_path / "none")]
    )
    assert "export it again with --adapter-rank 4" in str(beyond.exception) and not (tmp_path / "none").exists()


def answer_of(artifact: Path) -> str:
    return typed("run", artifact, "The capital of France is", "--raw", "--temperature", 0, "--max-tokens", 8)


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
