"""Pipes and damaged small files in folders of models: refused before anything is opened or written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors_files import entry, write

from edgekit.apps.delivery.transport import Site
from edgekit.common.files import file_sha256
from edgekit.common.parsing import read_bytes
from edgekit.errors import InvalidInput
from edgekit.formats.gguf import GgufFile
from edgekit.formats.safetensors import TensorFolder, read_header
from edgekit.model.source import BUNDLED, open_source

DEMO = Path(open_source("demo").folder)
OPENERS: dict[str, Callable[[Path], object]] = {
    "model.safetensors": read_header,
    "model.gguf": GgufFile.open,
    "config.json": lambda path: read_bytes(path, 100),
    "model.sig": file_sha256,
    "index.json": lambda path: Site(path.parent.as_uri(), allow=("file",)).connect().read_whole(path.name, 100),
}


@pytest.mark.parametrize("name", OPENERS)
def test_a_pipe_is_refused_unopened(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(InvalidInput, match="not a regular file"):
        OPENERS[name](tmp_path / name)


def test_a_pipe_that_takes_the_place_of_an_opened_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {"t": entry("U8", [4], 0, 4)}, b"1234")
    folder = TensorFolder.open(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InvalidInput, match="not a regular file"):
        folder.array("t")


@pytest.mark.parametrize("name", sorted(path.name for path in DEMO.iterdir() if path.name != "training.json"))
def test_every_file_of_a_model_may_be_a_pipe(tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "model")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(InvalidInput, match="regular file"):
        open_source(folder, need_weights=True)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("chat_template.jinja", "{{ messages }}".encode("utf-16"), "is not text in UTF-8"),
        ("chat_template.jinja", b"x" * ((1 << 20) + 1), "is more than the 1 MiB allowed"),
        ("tokenizer_config.json", b"", "not valid JSON"),
        ("tokenizer_config.json", b"[]", "holds list, expected an object"),
    ],
)
def test_small_files_are_read_before_any_work(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "model")
    (folder / name).write_bytes(data)
    with pytest.raises(InvalidInput, match=f"{name}: .*{reason}"):
        open_source(folder)


def test_the_bundled_models_open() -> None:
    assert all(open_source(name, need_weights=True).has_weights for name in BUNDLED)
