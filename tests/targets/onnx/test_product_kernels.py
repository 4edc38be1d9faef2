"""edgekit's products: equal to a plain reference on every path, for any rows and threads; forged graphs are refused."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

import onnx
import onnxruntime
from edgekit_onnx import product_kernels
from edgekit_onnx.packed_products import packed_scales, packed_values
from edgekit_onnx.product_kernels import ProductKernels, with_products
from exported_demo import export_demo
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import edgekit

pytestmark = pytest.mark.onnx
ROOT = Path(__file__).parents[3]
PATHS = ("plain", "avx2", "avxvnni", "avx512vnni")
Arrays = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("make") is None or shutil.which("g++") is None:
        pytest.skip("no compiler here")
    folder = tmp_path_factory.mktemp("kernels")
    subprocess.run(["make", "-s", "kernels", f"KERNELS_BUILD={folder}"], cwd=ROOT, check=True)
    return folder / "libedgekit_kernels.so"


@pytest.fixture
def kernels(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProductKernels]:
    monkeypatch.setattr(product_kernels, "_LIBRARY", library)
    product_kernels._loaded.cache_clear()
    found = product_kernels.product_kernels()
    if found is None:
        pytest.skip("this processor has no path that is faster than onnxruntime's")
    yield found
    product_kernels._loaded.cache_clear()


def weights(outputs: int, inputs: int, bits: int, block: int, *, zeros: bool = False, bias: bool = False) -> Arrays:
    random, blocks = np.random.default_rng(outputs), -(-inputs // block)
    made: Arrays = {
        "B": random.integers(0, 256, (outputs, blocks, block * bits // 8), np.uint8),
        "scales": (random.random((outputs, blocks)) / 64).astype(np.float16).astype(np.float32),
    }
    if zeros:
        made["zero_points"] = random.integers(0, 256, (outputs, -(-blocks * bits // 8)), np.uint8)
    if bias:
        made["bias"] = random.standard_normal(outputs, np.float32)
    return made


def graph(stored: Arrays, **attributes: int) -> bytes:
    names = ["A", *(name if name in stored else "" for name in ("B", "scales", "zero_points", "g_idx", "bias"))]
    node = helper.make_node("MatMulNBits", names, ["Y"], domain="com.microsoft", accuracy_level=4, **attributes)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", None]) for name in ("A", "Y")]
    constants = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(
        helper.make_graph([node], "g", ends[:1], ends[1:], constants), opset_imports=opsets, ir_version=10
    )
    return with_products(made.SerializeToString())


def session(kernels: ProductKernels, data: bytes, threads: int = 1) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.register_custom_ops_library(str(kernels.library))
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def unpacked(packed: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    rows = packed.reshape(len(packed), -1)
    return (np.stack([rows & 15, rows >> 4], -1).reshape(len(rows), -1) if bits == 4 else rows).astype(np.int64)


def reference(x: NDArray[np.float32], stored: Arrays, bits: int, block: int) -> NDArray[np.float32]:
    """Round activations for each block, and add the blocks of exact whole numbers one after the other."""
    scales = stored["scales"]
    blocks, f32 = scales.shape[1], np.float32
    values = unpacked(stored["B"], bits).reshape(len(scales), blocks, block)
    middle = np.full((len(scales), blocks), 1 << (bits - 1))
    zeros = unpacked(stored["zero_points"], bits)[:, :blocks] if "zero_points" in stored else middle
    padded = np.pad(x, ((0, 0), (0, blocks * block - x.shape[1]))).reshape(len(x), blocks, block)
    total = np.zeros((len(x), len(scales)), f32)
    for at in range(blocks):
        most = np.abs(padded[:, at]).max(-1, keepdims=True)
        whole = np.rint(padded[:, at] * (f32(127) / most)).astype(np.int64) @ (values[:, at] - zeros[:, at, None]).T
        product = whole.astype(f32) * scales[:, at]
        total = (product.astype(np.float64) * (most / f32(127)) + total).astype(f32)  # one rounding
    return total + stored["bias"] if "bias" in stored else total


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_path_has_the_bits_of_the_reference(
    library: Path, kernels: ProductKernels, bits: int, block: int, zeros: bool
) -> None:
    import ctypes

    take = ctypes.CDLL(str(library)).edgekit_kernels_path
    take.argtypes, take.restype = [ctypes.c_char_p], ctypes.c_char_p
    for outputs, inputs, bias in ((1, 1, False), (33, 200, True), (64, 1152, False)):
        stored = weights(outputs, inputs, bits, block, zeros=zeros, bias=bias)
        sizes = {"K": inputs, "N": outputs, "bits": bits, "block_size": block}
        opened = [session(kernels, graph(stored, **sizes))]
        if not zeros:
            scales = packed_scales(stored["scales"]).astype(np.float16)
            ordered = {**stored, "B": packed_values(stored["B"], bits), "scales": scales}
            opened.append(session(kernels, graph(ordered, packed=1, **sizes)))
        x = np.random.default_rng(bits).standard_normal((9, inputs)).astype(np.float32)
        expected = reference(x, stored, bits, block)
        try:
            for path in (path for path in PATHS if take(path.encode())):
                for each in opened:
                    np.testing.assert_array_equal(each.run(None, {"A": x})[0], expected, path)
        finally:
            take(b"")


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_same_bits_alone_among_many_and_on_any_threads(kernels: ProductKernels, bits: int) -> None:
    data = graph(weights(200, 320, bits, 32), K=320, N=200, bits=bits, block_size=32)
    x = np.random.default_rng(0).standard_normal((400, 320)).astype(np.float32)
    x[5, 7], x[6, 40], x[7] = np.nan, np.inf, 0
    one, three = session(kernels, data), session(kernels, data, threads=3)
    rows = one.run(None, {"A": x})[0]
    assert np.isnan(rows[5:7]).all() and not rows[7].any() and np.isfinite(rows[8:]).all()
    np.testing.assert_array_equal(three.run(None, {"A": x})[0], rows)
    for count in (1, 2, 3, 5, 6, 7, 13, 64):
        for start in (0, 1, 8, 190):
            np.testing.assert_array_equal(three.run(None, {"A": x[start : start + count]})[0], rows[start:][:count])
    assert one.run(None, {"A": x[:0]})[0].shape == (0, 200)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"K": 0}, "K is 0, it must be 1 to"),
        ({"K": 1 << 40}, "K is 1099511627776, it must be"),
        ({"K": 65}, r"B has the shape \[8, 2, 16\], the attributes ask for \[8, 3, 16\]"),
        ({"N": 1 << 20}, r"the attributes ask for \[1048576, 2, 16\]"),
        ({"N": -1}, "N is -1"),
        ({"bits": 2}, "bits is 2, it must be 4 or 8"),
        ({"bits": 8}, r"ask for \[8, 2, 32\]"),
    ],
)
def test_a_product_that_does_not_fit_its_weights_is_refused(
    kernels: ProductKernels, changed: dict[str, int], message: str
) -> None:
    data = graph(weights(8, 64, 4, 32), **{"K": 64, "N": 8, "bits": 4, "block_size": 32, **changed})
    with pytest.raises(Exception, match=f"edgekit Product: .*{message}"):
        session(kernels, data)


def test_forged_inputs_are_refused(kernels: ProductKernels) -> None:
    sizes, stored = {"K": 64, "N": 8, "bits": 4, "block_size": 32}, weights(8, 64, 4, 32, zeros=True, bias=True)
    for name, shape in (("scales", (8, 1)), ("zero_points", (8, 2)), ("bias", (7,))):
        with pytest.raises(Exception, match=f"edgekit Product: {name} has the shape"):
            session(kernels, graph({**stored, name: np.zeros(shape, stored[name].dtype)}, **sizes))
    model = onnx.ModelProto.FromString(graph(stored, **sizes))
    model.graph.node[0].attribute[[a.name for a in model.graph.node[0].attribute].index("block_size")].i = 48
    with pytest.raises(Exception, match="block_size is 48, it must be 16, 32, 64 or 128"):
        session(kernels, model.SerializeToString())
    with pytest.raises(Exception, match=r"A has the shape \[2, 63\], its last size must be K = 64"):
        session(kernels, graph(stored, **sizes)).run(None, {"A": np.zeros((2, 63), np.float32)})
    with pytest.raises(Exception, match="g_idx is not supported"):
        session(kernels, graph({**stored, "g_idx": np.zeros(64, np.int32)}, **sizes))
    for index, name in enumerate(stored):
        model = onnx.ModelProto.FromString(graph(stored, **sizes))
        tensor = model.graph.initializer.pop(index)
        model.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
        with pytest.raises(Exception, match=f"{name} must be a constant of the graph"):
            session(kernels, model.SerializeToString())


def test_an_artifact_runs_on_the_kernels_and_is_exact(
    kernels: ProductKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = export_demo(tmp_path / "demo")
    texts = set()
    for setting, packed in (("on", "1GiB"), ("on", "off"), ("off", "off")):
        monkeypatch.setenv("EDGEKIT_KERNELS", setting)
        monkeypatch.setenv("EDGEKIT_PACKED", packed)
        with edgekit.open(artifact, exact=setting == "on") as runtime:
            assert runtime.engine.products == (f"edgekit, {kernels.path}" if setting == "on" else "onnxruntime")
            assert (runtime.engine.capabilities.copied_share == 0) == (packed != "off")
            texts.add(runtime.generate("The ", max_tokens=8).text)
    assert len(texts) == 1
