"""Peers get the artifact's integers: each writer's file is read back and equals the neutral weights exactly."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import measured
import numpy as np
import pytest
import tiny_models

from edgekit.apps.bench.peers import folders
from edgekit.apps.bench.peers.subjects import PEERS, peer_of, weights_of
from edgekit.apps.bench.run import bench
from edgekit.artifact.artifact import open_artifact
from edgekit.common.content_store import ContentStore
from edgekit.common.progress import no_progress
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.recipe import named_recipe
from edgekit.formats.int_packing import unpack
from edgekit.formats.safetensors import TensorFolder
from edgekit.quant.neutral_gguf import refusal, write_neutral_gguf
from edgekit.quant.pipeline import neutral_weights

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


def neutral(store: Path, recipe: str, **changed: Any) -> NeutralWeights:
    pytest.importorskip("torch")
    name = f"{recipe}-{abs(hash(json.dumps(changed)))}"
    folder = store / name
    if not folder.exists():
        tiny_models.write_tiny(folder, **changed)
    return neutral_weights(folder, named_recipe(recipe), store=ContentStore(store / "made"))


class Gguf:
    """A GGUF file's content, read independently by the specification."""

    def __init__(self, path: Path) -> None:
        self._data, self._at = path.read_bytes(), 4
        assert self._data[:4] == b"GGUF"
        version, tensors, keys = self._take("<IQQ")
        assert version == 3
        self.metadata = dict(self._pair() for _ in range(keys))
        described = [self._described() for _ in range(tensors)]
        begin = -(-self._at // 32) * 32
        self.tensors = {name: (kind, shape, begin + offset) for name, kind, shape, offset in described}

    def _take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

    def _string(self) -> str:
        (length,) = self._take("<Q")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _pair(self) -> tuple[str, Any]:
        key, (kind,) = self._string(), self._take("<I")
        return key, self._string() if kind == 8 else self._take({4: "<I", 6: "<f"}[kind])[0]

    def _described(self) -> tuple[str, int, tuple[int, ...], int]:
        name, (count,) = self._string(), self._take("<I")
        shape = self._take(f"<{count}Q")
        kind, offset = self._take("<IQ")
        return name, kind, tuple(reversed(shape)), offset

    def values(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Dequantised as llama.cpp does: d × (q - 8), the low nibbles first; d × q."""
        kind, shape, start = self.tensors[name]
        count = int(np.prod(shape))
        if kind in (0, 1):
            dtype = np.float32 if kind == 0 else np.float16
            return np.frombuffer(self._data, dtype, count, start).astype(np.float32).reshape(shape)
        size = 18 if kind == 2 else 34
        blocks = np.frombuffer(self._data, np.uint8, count // 32 * size, start).reshape(-1, size)
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        if kind == 2:
            raised = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
            return ((raised.astype(np.float32) - 8) * scales).reshape(shape)
        return (blocks[:, 2:].view(np.int8).astype(np.float32) * scales).reshape(shape)


@pytest.mark.quantize
@pytest.mark.parametrize("recipe", ["s4-g32", "s4-g64", "s8", "float16"])
def test_gguf_holds_the_same_integers_and_scales(store: Path, tmp_path: Path, recipe: str) -> None:
    weights = neutral(store, recipe)
    write_neutral_gguf(weights, tmp_path / "m.gguf", 256)
    found = Gguf(tmp_path / "m.gguf")
    assert found.metadata["llama.block_count"] == 2
    assert found.metadata["llama.rope.freq_base"] == 10000.0
    assert np.array_equal(found.values("token_embd.weight"), weights.tensor("model.embed_tokens.weight"))
    assert np.array_equal(found.values("blk.1.ffn_down.weight"), weights.tensor("model.layers.1.mlp.down_proj.weight"))
    assert np.array_equal(found.values("output_norm.weight"), weights.floats("model.norm.weight"))
    rotated = weights.tensor("model.layers.0.self_attn.q_proj.weight")
    stored = found.values("blk.0.attn_q.weight")
    # llama.cpp's own converter: heads as [2, half] become [half, 2].
    assert np.array_equal(stored, rotated.reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(64, 64))
    assert np.array_equal(found.values("blk.0.attn_v.weight"), weights.tensor("model.layers.0.self_attn.v_proj.weight"))
    assert len(found.tensors) == len(list(weights.model.tensors()))


@pytest.mark.quantize
def test_gguf_stores_rope_scaling(store: Path, tmp_path: Path) -> None:
    weights = neutral(store, "s4-g32", rope_parameters=LLAMA3)
    write_neutral_gguf(weights, tmp_path / "m.gguf", 256)
    factors = Gguf(tmp_path / "m.gguf").values("rope_freqs.weight")
    assert factors[0] == 1.0
    assert factors[-1] == pytest.approx(8.0)


@pytest.mark.quantize
def test_gguf_is_read_by_its_own_library(store: Path, tmp_path: Path) -> None:
    reader = pytest.importorskip("gguf")
    weights = neutral(store, "s4-g32")
    write_neutral_gguf(weights, tmp_path / "m.gguf", 256)
    found = {tensor.name: tensor for tensor in reader.GGUFReader(tmp_path / "m.gguf").tensors}
    stored = found["blk.0.ffn_up.weight"]
    values = reader.quants.dequantize(stored.data, stored.tensor_type)
    assert np.array_equal(values, weights.tensor("model.layers.0.mlp.up_proj.weight"))


@pytest.mark.quantize
def test_unsupported_models_are_refused_by_name(store: Path) -> None:
    spec = neutral(store, "s4-g32").model
    windowed = tuple(layer.model_copy(update={"window": 8}) for layer in spec.layers)
    for changed, reason in (({"family": "gemma4_text"}, "gemma4_text"), ({"layers": windowed}, "window")):
        assert reason in str(refusal(spec.model_copy(update=changed), named_recipe("s4-g32"), 256))


@pytest.mark.quantize
@pytest.mark.parametrize("recipe", ["s4-g32", "s4-g64", "s8"])
def test_the_mlx_folder_holds_the_same_integers_and_scales(store: Path, tmp_path: Path, recipe: str) -> None:
    weights = neutral(store, recipe)
    folders.write_mlx(weights, tmp_path / "mlx")
    config = json.loads((tmp_path / "mlx/config.json").read_text())["quantization"]
    with TensorFolder.open(tmp_path / "mlx") as found:
        for tensor in weights.model.tensors():
            if tensor.module not in weights.modules():
                assert np.array_equal(found.floats(tensor.name), weights.tensor(tensor.name))
                continue
            form = config[tensor.module]
            packed = np.array(found.array(tensor.name)).view(np.uint8)
            zero = 1 << (form["bits"] - 1)
            raised = unpack(packed, form["bits"], tensor.shape[1]).astype(np.float32) + zero
            scales, biases = (
                np.repeat(found.floats(f"{tensor.module}.{kind}"), form["group_size"], axis=1)
                for kind in ("scales", "biases")
            )
            assert np.array_equal(biases, -zero * scales)
            assert np.array_equal(raised * scales + biases, weights.tensor(tensor.name)), tensor.name


@pytest.mark.quantize
def test_the_olive_folder_holds_the_same_integers_and_scales(store: Path, tmp_path: Path) -> None:
    weights = neutral(store, "s4-g32")
    folders.write_olive(weights, tmp_path / "olive")
    config = json.loads((tmp_path / "olive/config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["bits"], config["group_size"]) == ("olive", 4, 32)
    with TensorFolder.open(tmp_path / "olive") as found:
        for tensor in weights.model.tensors():
            if tensor.role != "linear":
                assert np.array_equal(found.floats(tensor.name), weights.tensor(tensor.name))
                continue
            integers = unpack(np.array(found.array(f"{tensor.module}.qweight")), 4, tensor.shape[1])
            scales = np.repeat(found.floats(f"{tensor.module}.scales"), 32, axis=1)
            assert np.array_equal(integers * scales, weights.tensor(tensor.name)), tensor.name
    assert "one 4-bit group" in measured.refused(lambda: folders.write_olive(neutral(store, "s8"), tmp_path / "no"))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx_ir")
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("peers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEKIT_HOME", str(folder / "home"))
        tiny_models.artifact_of(tiny_models.write_tiny(folder / "tiny"), folder / "artifact")
    return folder / "artifact"


def tokens_of(name: str, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the tokens of the artifact and of a peer after the same prompt."""
    from edgekit import OpenOptions
    from edgekit.apps.bench.artifact_subjects import subject_of_artifact
    from edgekit.apps.bench.subject import RunningSubject

    monkeypatch.setenv("EDGEKIT_HOME", str(artifact.parent / "home"))
    opened = open_artifact(artifact)
    prompt = [0, *(20 + 7 * place % 100 for place in range(30))]
    found = []
    for subject in (
        subject_of_artifact(artifact, OpenOptions()),
        peer_of(name, opened, weights_of(opened), context=128),
    ):
        with RunningSubject(subject) as running:
            ((times, written),) = running.run_together([prompt], 16, 6)
            assert times.timed_tokens in (15, 31)
            found.append(written)
            assert running.memory().peak_bytes
    return found


@pytest.mark.slow
@pytest.mark.onnx
@pytest.mark.parametrize(
    ("name", "modules"),
    [
        pytest.param("mlx-lm", ["mlx.core", "mlx_lm"], marks=pytest.mark.mlx),
        ("llama.cpp", ["llama_cpp"]),
    ],
)
def test_a_peer_runs_with_equal_tokens(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, name: str, modules: list[str]
) -> None:
    for module in modules:
        pytest.importorskip(module)
    own, peer = tokens_of(name, artifact, monkeypatch)
    assert own[:2] == peer[:2]


@pytest.mark.slow
@pytest.mark.mlx
@pytest.mark.onnx
def test_a_bench_against_a_peer_names_both_formats(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx_lm")
    monkeypatch.setenv("EDGEKIT_HOME", str(artifact.parent / "home"))
    work = measured.workload(repeats=1, warmups=0)
    own, peer = bench([artifact], work, against=["mlx-lm"], loads=1, progress=no_progress)
    assert peer.status != "failed", peer.why
    assert own.subject.formats.linears == peer.subject.formats.linears == "4-bit symmetric, groups of 32, bf16 scales"
    assert peer.subject.engine_version
    assert peer.subject.weights_sha256 == own.subject.weights_sha256


@pytest.mark.onnx
@pytest.mark.quantize
def test_weights_come_from_the_store_or_are_quantised_again(
    artifact: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(artifact.parent / "home"))
    opened = open_artifact(artifact)
    assert weights_of(opened).sha256 == opened.manifest.weights_sha256
    assert weights_of(opened, store=ContentStore(store / "elsewhere")).sha256 == opened.manifest.weights_sha256


@pytest.mark.onnx
@pytest.mark.quantize
def test_a_peer_is_written_once_and_run_in_the_given_python(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(artifact.parent / "home"))
    opened = open_artifact(artifact)
    weights, kept = weights_of(opened), ContentStore(tmp_path)
    for name in PEERS:
        subject = peer_of(name, opened, weights, context=64, python="/opt/python", store=kept)
        assert subject.command[0] == "/opt/python"
        assert subject.info.formats.bits_per_weight > 4
        again = peer_of(name, opened, weights, context=64, store=kept)
        assert again.opening["files"] == subject.opening["files"]
        assert again.command[0] == sys.executable
