"""edgekit's products and attention: right, on every path the same bits for any rows and threads, never forged."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import onnx
import onnxruntime
from edgekit_onnx import OnnxTarget, product_kernels
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import FAST
from edgekit_onnx.packed_products import packed_scales, packed_values
from edgekit_onnx.product_kernels import ProductKernels, with_gates, with_kernels
from engines import onnx_model
from exported_demo import export_demo
from kept import kept
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import edgekit
from edgekit.artifact.artifact import open_artifact
from edgekit.contracts.feeding import feed
from edgekit.testing import check_engine

pytestmark = pytest.mark.onnx
ROOT = Path(__file__).parents[3]
PATHS = ("plain", "avx2", "avxvnni", "avx512vnni", "avx512amx")
Arrays = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def library() -> Path:
    if shutil.which("make") is None or shutil.which("g++") is None:
        pytest.skip("no compiler here")

    def build(folder: Path) -> None:
        subprocess.run(["make", "-s", "kernels", f"KERNELS_BUILD={folder}"], cwd=ROOT, check=True)

    return kept(build, ("targets/edgekit_onnx/kernels",), "kernels") / "libedgekit_kernels.so"


@pytest.fixture
def kernels(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProductKernels]:
    monkeypatch.setattr(product_kernels, "_LIBRARY", library)
    monkeypatch.setenv(product_kernels.SETTING, "on")
    product_kernels._loaded.cache_clear()
    found = product_kernels.product_kernels()
    if found is None:
        pytest.skip("this processor has no path that is faster than onnxruntime's")
    yield found
    product_kernels._loaded.cache_clear()


@pytest.fixture
def take(library: Path) -> Iterator[Callable[[str], bool]]:
    """Returns a function that takes a path of the library, and says whether this processor has it."""
    path = ctypes.CDLL(str(library)).edgekit_kernels_path
    path.argtypes, path.restype = [ctypes.c_char_p], ctypes.c_char_p
    yield lambda name: path(name.encode()) is not None
    path(b"")


@pytest.fixture
def demo(kernels: ProductKernels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.getbasetemp() / "demo"
    return place if place.exists() else export_demo(place)


def weights(
    outputs: int, inputs: int, bits: int, block: int, *, zeros: bool = False, bias: bool = False, offsets: bool = False
) -> Arrays:
    random, blocks, kind = np.random.default_rng(outputs), -(-inputs // block), "f2" if inputs < 1000 else "f4"
    made: Arrays = {
        "B": random.integers(0, 256, (outputs, blocks, block * bits // 8), np.uint8),
        "scales": (random.random((outputs, blocks)) / 64).astype(kind).astype(np.float32),
    }
    if zeros:
        made["zero_points"] = random.integers(0, 256, (outputs, -(-blocks * bits // 8)), np.uint8)
    if bias:
        made["bias"] = random.standard_normal(outputs, np.float32)
    if offsets:
        made["offsets"] = (random.standard_normal((outputs, blocks)) / 16).astype(np.float16)
    return made


def graph(stored: Arrays, **attributes: int) -> bytes:
    inputs = ("B", "scales", "zero_points", "g_idx", "bias", "offsets")
    names = ["A", *(name if name in stored else "" for name in inputs)]
    node = helper.make_node("MatMulNBits", names, ["Y"], domain="com.microsoft", accuracy_level=4, **attributes)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", None]) for name in ("A", "Y")]
    constants = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    whole = helper.make_graph([node], "g", ends[:1], ends[1:], constants)
    return with_kernels(helper.make_model(whole, opset_imports=opsets, ir_version=10).SerializeToString())


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
    for at in range(blocks if "offsets" in stored else 0):
        most = np.abs(padded[:, at]).max(-1, keepdims=True)
        sums = np.rint(padded[:, at] * (f32(127) / most)).sum(-1, keepdims=True).astype(f32) * (most / f32(127))
        total = (stored["offsets"][:, at].astype(np.float64) * sums + total).astype(f32)
    return total + stored["bias"] if "bias" in stored else total


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_path_has_the_bits_of_the_reference(
    kernels: ProductKernels, take: Callable[[str], bool], bits: int, block: int, zeros: bool
) -> None:
    of_each = ((1, 1, {}), (33, 200, {"bias": True, "offsets": True}), (64, 1152, {"offsets": True}))
    for outputs, inputs, more in of_each:
        stored = weights(outputs, inputs, bits, block, zeros=zeros, **more)
        sizes = {"K": inputs, "N": outputs, "bits": bits, "block_size": block}
        opened = [session(kernels, graph(stored, **sizes))]
        if not zeros:
            scales = packed_scales(stored["scales"]).astype(np.float32 if inputs > 1000 else np.float16)
            ordered = {**stored, "B": packed_values(stored["B"], bits), "scales": scales}
            if more:
                ordered["offsets"] = packed_scales(stored["offsets"])
            opened.append(session(kernels, graph(ordered, packed=1, **sizes)))
        x = np.random.default_rng(bits).standard_normal((45, inputs)).astype(np.float32)
        expected = reference(x, stored, bits, block)
        for path in filter(take, PATHS):
            for each in opened:
                np.testing.assert_array_equal(each.run(None, {"A": x})[0], expected, path)


def test_gates_within_a_product_change_no_bit(kernels: ProductKernels, take: Callable[[str], bool]) -> None:
    data = graph(weights(70, 200, 4, 32, bias=True, offsets=True), K=200, N=70, bits=4, block_size=32)
    model, up = onnx.ModelProto.FromString(data), onnx.ModelProto.FromString(data).graph.node[0]
    model.graph.node[0].output[0], up.output[0] = "gate", "up"
    del up.input[5:]  # the bias
    silu = helper.make_node("QuickGelu", ["gate"], ["silu"], domain="com.microsoft", alpha=1.0)
    model.graph.node.extend([silu, up, helper.make_node("Mul", ["silu", "up"], ["Y"])])
    x = np.random.default_rng(0).standard_normal((45, 200), np.float32)
    expected = session(kernels, model.SerializeToString()).run(None, {"A": x})[0]
    joined = with_gates(model.SerializeToString())
    assert len(onnx.ModelProto.FromString(joined).graph.node) == 1
    for path in filter(take, PATHS):
        np.testing.assert_array_equal(session(kernels, joined).run(None, {"A": x})[0], expected, path)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_same_bits_alone_among_many_and_on_any_threads(kernels: ProductKernels, bits: int) -> None:
    data = graph(weights(200, 320, bits, 32), K=320, N=200, bits=bits, block_size=32)
    x = np.random.default_rng(0).standard_normal((400, 320)).astype(np.float32)
    x[5, 7], x[6, 40], x[7] = np.nan, np.inf, 0
    one, three = session(kernels, data), session(kernels, data, threads=3)
    rows = one.run(None, {"A": x})[0]
    assert np.isnan(rows[5:7]).all() and not rows[7].any() and np.isfinite(rows[8:]).all()
    np.testing.assert_array_equal(three.run(None, {"A": x})[0], rows)
    for count in (1, 2, 5, 6, 7, 13, 16, 39, 64):
        for start in (0, 1, 8, 190):
            np.testing.assert_array_equal(three.run(None, {"A": x[start : start + count]})[0], rows[start:][:count])
    assert one.run(None, {"A": x[:0]})[0].shape == (0, 200)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"K": 0}, "K is 0, it must be 1 to"),
        ({"K": 1 << 40}, "K is 1099511627776, it must be"),
        ({"K": 65}, r"B has the shape \[8, 2, 16\], the attributes ask for \[8, 3, 16\]"),
        ({"bits": 2}, "bits is 2, it must be 4 or 8"),
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


ATTENTIONS: dict[str, tuple[int, int, int, dict[str, Any]]] = {  # heads, shared heads, their size, attributes
    "grouped": (9, 3, 64, {}),
    "a window": (8, 2, 80, {"local_window_size": 50}),
    "a cap, one shared head": (8, 1, 128, {"softcap": 5.0}),
    "sinks, a scale": (6, 2, 256, {"sinks": 1, "scale": 0.3}),
    "alternating pairs": (4, 4, 16, {"rotary_interleaved": 1, "local_window_size": 200}),
}
CAPACITY = 400


def attention(kernels: ProductKernels, case: str, domain: str, kind: int = TensorProto.FLOAT, threads: int = 1) -> Any:
    heads, shared, size, options = ATTENTIONS[case]
    turns = np.arange(CAPACITY)[:, None] * np.random.default_rng(1).random(size // 2)
    stored = {"cos": np.cos(turns), "sin": np.sin(turns)} | {"steps": np.full((shared, 1, size), 0.05)}
    stored |= {"sinks": np.linspace(-2, 2, heads)} if options.get("sinks") else {}
    names = ["query", "", "", "keys", "values", "lengths", "total", "cos", "sin", "", "", "sinks"]
    names = [name if name != "sinks" or name in stored else "" for name in names]
    node = helper.make_node(
        "GroupQueryAttention", names + ["steps"] * 2 * (kind == TensorProto.INT8), ["Y", "new_keys", "new_values"],
        domain=domain, do_rotary=1, num_heads=heads, kv_num_heads=shared,
        **{name: value for name, value in options.items() if name != "sinks"},
    )  # fmt: skip
    kinds = {"query": TensorProto.FLOAT, "keys": kind, "values": kind}
    kinds |= {"lengths": TensorProto.INT32, "total": TensorProto.INT32}
    ends = [helper.make_tensor_value_info(name, each, None) for name, each in kinds.items()]
    made = [helper.make_tensor_value_info(*pair, None) for pair in zip(node.output, kinds.values(), strict=False)]
    constants = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in stored.items()]
    opsets = [helper.make_opsetid(each, version) for each, version in (("", 21), ("com.microsoft", 1), ("edgekit", 1))]
    whole = helper.make_graph([node], "g", ends, made, constants)
    return session(kernels, helper.make_model(whole, opset_imports=opsets, ir_version=10).SerializeToString(), threads)


def attended(opened: Any, case: str, x: NDArray[np.float32], sizes: list[int], kind: Any = np.float32) -> NDArray[Any]:
    """The results for sequences [sequence, token, width] that are fed in pieces of these sizes."""
    _, shared, size, _ = ATTENTIONS[case]
    keys, values = (np.zeros((len(x), shared, CAPACITY, size), kind) for _ in range(2))
    found, fed = [], 0
    for count in sizes:
        piece, fed = np.ascontiguousarray(x[:, fed : fed + count]), fed + count
        lengths = {"lengths": np.full(len(x), fed - 1, np.int32), "total": np.array(fed, np.int32)}
        result, keys, values = opened.run(None, {"query": piece, "keys": keys, "values": values, **lengths})
        found.append(result)
    return np.concatenate(found, axis=1)


def queries(case: str, sequences: int, tokens: int) -> NDArray[np.float32]:
    heads, shared, size, _ = ATTENTIONS[case]
    return np.random.default_rng(2).standard_normal((sequences, tokens, (heads + 2 * shared) * size), np.float32)


@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_is_onnxruntimes_and_a_row_has_the_same_bits_in_any_call(
    kernels: ProductKernels, take: Callable[[str], bool], case: str
) -> None:
    x = queries(case, 2, 300)
    expected = attended(attention(kernels, case, "com.microsoft"), case, x[:1], [300])
    kinds = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16, TensorProto.INT8: np.int8}
    for kind, dtype in kinds.items():
        one, three = (attention(kernels, case, "edgekit", kind, threads) for threads in (1, 3))
        found = attended(one, case, x, [300], dtype)
        np.testing.assert_allclose(found[:1], expected, atol={4: 1e-4, 2: 0.02, 1: 0.5}[np.dtype(dtype).itemsize])
        for sizes in ([256, 44], [7, 1, 200, 90, 1, 1], [*[16] * 18, 12]):
            np.testing.assert_array_equal(attended(three, case, x, sizes, dtype), found)
        np.testing.assert_array_equal(attended(one, case, x[1:], [290, *[1] * 10], dtype), found[1:])
        for path in filter(take, PATHS):
            np.testing.assert_array_equal(attended(one, case, x, [299, 1], dtype), found, path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": [CAPACITY]}, "seqlens_k is 400"),
        ({"lengths": [2]}, "seqlens_k is 2 for 4 tokens"),
        ({"lengths": [-1]}, "seqlens_k is -1"),
        ({"lengths": [3, 3]}, r"seqlens_k has the shape \[2\]"),
        ({"values": (1, 3, 8, 64)}, "past keys and values have"),
        ({"keys": (3, 9, 64)}, "past keys have the shape"),
        ({"query": (1, 4, 900)}, "it must be"),
        ({"keys": (1, 3, 900, 64), "values": (1, 3, 900, 64), "lengths": [500]}, "tables of"),
        ({"keys": (1, 3, 8, 66), "values": (1, 3, 8, 66)}, "heads of 66 numbers"),
    ],
)
def test_attention_refuses_sizes_and_lengths_that_do_not_fit(
    kernels: ProductKernels, changed: dict[str, Any], message: str
) -> None:
    sizes = {"query": (1, 4, 960), "keys": (1, 3, CAPACITY, 64), "values": (1, 3, CAPACITY, 64)}
    fed: Arrays = {name: np.zeros(changed.get(name, shape), np.float32) for name, shape in sizes.items()}
    fed |= {"lengths": np.array(changed.get("lengths", [3]), np.int32), "total": np.array(4, np.int32)}
    with pytest.raises(Exception, match=f"edgekit Attention: .*{message}"):
        attention(kernels, "grouped", "edgekit").run(None, fed)


ALL = {"sequences": 4, "draft": "ngram", "prefixes": 1 << 24}
PROSE = (ROOT / "examples/benchmarks/held_out/prose.txt").read_text()


@pytest.mark.parametrize("of_all", [{}, {"window": 96, "sinks": 4}, {"kv_bits": 8}], ids=str)
def test_texts_are_equal_without_an_option(demo: Path, of_all: dict[str, Any]) -> None:
    """Five prompts, in several ways, and asked again."""
    prompts = [PROSE[300 * index :][: 30 + 60 * index] for index in range(5)]
    expected: list[str] = []
    alone = () if of_all else ({name: value} for name, value in ALL.items())
    for way in ({}, *alone, ALL, {"exact": True}):
        with edgekit.open(demo, **{"prefixes": 0, **way, **of_all}) as runtime:
            assert runtime.engine.capabilities.exact == "always"
            for _ in range(2):
                streams = [runtime.submit(prompt, max_tokens=16) for prompt in prompts]
                texts = ["".join(piece.text for piece in stream) for stream in streams]
                expected = expected or texts
                assert texts == expected, way


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_an_engine_is_exact_where_every_row_is_alone(kernels: ProductKernels, family: str) -> None:
    """Of a mixture of experts, the number of tokens of an expert decides its kernel."""
    made = onnx_model(family, "s4-g32", FAST, exits=(1,) if family == "llama" else ())
    assert made.open().capabilities.exact == ("on_request" if family == "gpt_oss" else "always")
    if family != "gpt_oss":
        check_engine(made.open, exact=True, tolerance=0, sequences=20)


def test_chunks_threads_and_packing_change_no_bit_and_saved_prefixes_name_the_kernels(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, logits, keys = open_artifact(demo), set(), set()
    ids = [(7 + 31 * place) % artifact.plan.model.vocab_size for place in range(600)]
    for chunk, threads, packed in ((16, 1, "1GiB"), (64, 2, "1GiB"), (512, 1, "off"), (512, 2, "1GiB")):
        monkeypatch.setenv("EDGEKIT_PACKED", packed)
        plan = artifact.plan.model_copy(update={"chunk_tokens": chunk, "threads": threads})
        engine = OnnxEngine(plan, artifact.folder)
        assert engine.products.startswith("edgekit") and (engine.capabilities.copied_share == 0) == (packed != "off")
        keys.add(engine.model_key)
        logits.add(feed(engine, engine.start(plan.storage), ids, 100, chunk_tokens=chunk).tobytes())
        engine.close()
    adapted = OnnxTarget().adapt(artifact.plan)
    monkeypatch.setenv("EDGEKIT_KERNELS", "off")
    engine = OnnxEngine(artifact.plan, artifact.folder)
    assert adapted.memory.layout and not OnnxTarget().adapt(adapted).memory.layout
    assert len(logits) == len(keys) == 1 and engine.products == "onnxruntime" and engine.model_key not in keys
    engine.close()
