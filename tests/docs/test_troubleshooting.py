"""The errors on the troubleshooting page are produced here, and their texts compared with the page."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fake_artifacts import install, make_artifact

import edgekit
from edgekit.artifact.artifact import verify
from edgekit.artifact.self_check import CHECKED_TOKENS
from edgekit.common.staging import staging_for
from edgekit.device.load import load_profile
from edgekit.errors import EdgekitError
from edgekit.model.source import open_source
from edgekit.plugins import load_target
from edgekit.quant.pipeline import need_torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
TEXTS = {
    title: text.strip()
    for title, text in re.findall(r"^## ([^\n]+)\n\n```text\n(.*?)\n```", PAGE, re.DOTALL | re.MULTILINE)
}
Producer = Callable[[Path, pytest.MonkeyPatch], object]
PRODUCERS: dict[str, Producer] = {}


def produces(title: str) -> Callable[[Producer], Producer]:
    def register(producer: Producer) -> Producer:
        PRODUCERS[title] = producer
        return producer

    return register


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user, with an artifact of the fake target in it."""
    install(tmp_path / "site", monkeypatch)
    make_artifact(tmp_path / "my.edgekit")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@produces("An artifact is expected, a model was given")
def _(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    return edgekit.open("nothing.edgekit")


@produces("The model is not found")
def _(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    return open_source("./nothing")


@produces("The hub cannot be reached")
def _(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("HF_HOME", str(folder / "hub"))
    return open_source("some/model", offline=True)


@produces("torch is missing")
def _(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("edgekit.quant.pipeline.find_spec", lambda name: None)
    return need_torch()


@produces("onnxruntime is missing")
def _(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr("edgekit_onnx.version_of", lambda name: None)
    raise EdgekitError(load_target("onnx").missing())


@produces("Nothing fits")
def _(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    return edgekit.plan("demo", "this", memory="10MiB")


@produces("The device is not known")
def _(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    return load_profile("pixel9")


@produces("The output exists")
def _(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    return staging_for(Path("my.edgekit"), 0)


@produces("The disk is full")
def _(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    Path("my.edgekit").rename("old.edgekit")
    return staging_for(Path("my.edgekit"), 1 << 60)


@produces("The self-check failed")
def _(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    pytest.importorskip("torch")
    pytest.importorskip("onnxruntime")
    plan = edgekit.plan("demo", "this", target="onnx", recipe="s8")
    random = np.random.default_rng(0).standard_normal((CHECKED_TOKENS, plan.model.vocab_size)).astype(np.float32)
    for module in ("self_check", "checked_reference"):
        monkeypatch.setattr(f"edgekit.artifact.{module}.reference_logits", lambda *_: random)
    return edgekit.export(plan, "new.edgekit")


@produces("The port is in use")
def _(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    pytest.importorskip("uvicorn")
    from edgekit.apps.serve.server import listen
    from edgekit.apps.serve.settings import ServerSettings

    with socket.create_server(("127.0.0.1", 0)) as taken:
        return listen(ServerSettings(port=taken.getsockname()[1]))


@produces("The prompt is too long")
def _(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    with edgekit.open("my.edgekit") as runtime:
        return runtime.generate("the cat " * 2000)


@produces("A file of an artifact has changed")
def _(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    place = folder / "my.edgekit" / "tokenizer.json"
    place.write_bytes(place.read_bytes().replace(b'"', b" ", 1))
    return verify("my.edgekit")


@produces("The checkpoint is a pickle")
def _(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    Path("model").mkdir()
    Path("model/config.json").write_bytes((ROOT / "examples/training/demo/target/config.json").read_bytes())
    Path("model/pytorch_model.bin").write_bytes(b"")
    return open_source("./model", need_weights=True)


@produces("A shape of the answer needs llguidance")
def _(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with edgekit.open("my.edgekit") as runtime:
        return runtime.generate("the cat", schema={"type": "integer"})


@produces("Opening needs more memory than is free")
def _(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    return edgekit.open("my.edgekit", memory="1MiB")


def test_the_page_shows_the_real_errors() -> None:
    assert list(TEXTS) == list(PRODUCERS)


@pytest.mark.parametrize("title", PRODUCERS)
def test_the_error_has_the_text_on_the_page(title: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EdgekitError) as raised:
        PRODUCERS[title](folder, monkeypatch)
    pattern = ".*".join(re.escape(part.strip()) for part in TEXTS[title].split("…"))
    assert re.fullmatch(pattern, " ".join(str(raised.value).split())), f"{raised.value}\nis not\n{TEXTS[title]}"
