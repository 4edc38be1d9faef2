"""Weights read back out of an onnx artifact's graphs equal the neutral weights, for every family."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import family_models as models
import measured
from edgekit_onnx import OnnxTarget
from onnx_models import onnx_model
from process_files import open_files

from edgekit.artifact.self_check import self_check

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]


CASES = [(family, "s4-g32") for family in models.EVERY]
CASES += [("llama", "s8"), ("llama", "float32"), ("gemma3", "float16"), ("phi3", "s8")]


def test_damaged_graphs_are_refused_before_reading(tmp_path: Path) -> None:
    plan, *_ = onnx_model("llama").copied(tmp_path)
    (tmp_path / "out/weights.bin").write_bytes(b"")
    assert measured.refused(lambda: list(OnnxTarget().weights(plan, tmp_path / "out")))


@pytest.mark.skipif(sys.platform != "linux", reason="counts the files of this process in /proc")
def test_reading_back_maps_a_file_once_and_keeps_none_open(tmp_path: Path) -> None:
    plan, *_ = onnx_model("llama").copied(tmp_path)
    list(OnnxTarget().weights(plan, tmp_path / "out"))  # what is imported and opened once
    gc.collect()
    gc.disable()  # so that nothing in a cycle is freed by chance
    try:
        before = open_files()
        found = OnnxTarget().weights(plan, tmp_path / "out")
        next(found)
        assert open_files() <= before + 1
        list(found)
        assert open_files() == before
    finally:
        gc.enable()


class Absent(OnnxTarget):
    """A target whose library is not installed."""

    def missing(self) -> str | None:
        return "not installed here"


def test_self_check_without_engine_reads_weights_back(tmp_path: Path) -> None:
    plan, _, weights, _ = onnx_model("llama").copied(tmp_path)
    found = self_check(Absent(), plan, weights, tmp_path / "out", models.quiet).summary
    assert found == "packed-only: 22 quantised matrices read back bit for bit; not installed here"
    data = bytearray((tmp_path / "out/weights.bin").read_bytes())
    data[100] ^= 0x10
    (tmp_path / "out/weights.bin").write_bytes(bytes(data))
    said = measured.refused(lambda: self_check(Absent(), plan, weights, tmp_path / "out", models.quiet))
    assert "was packed wrongly" in said
