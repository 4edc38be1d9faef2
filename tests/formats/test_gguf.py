"""GGUF: header validation of untrusted files, and dequantisation equal to llama.cpp's tools."""

from __future__ import annotations

import struct
import sys
from collections import Counter
from pathlib import Path

import fuzzing
import gguf_files as files
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from gguf_files import ARRAY, BOOL, F32, F64, I8, I16, I32, I64, STRING, U8, U16, U32, U64, Stored, Value, gguf_bytes
from gguf_mutations import GgufFormat

from edgekit.errors import EdgekitError, InvalidInput, Unsupported
from edgekit.formats import gguf
from edgekit.formats.gguf import GgufFile, GgufStrings
from edgekit.formats.gguf_tensors import GgufTensors, TensorView, open_shards, stem_of
from edgekit.formats.gguf_types import TYPES

FLOATS = np.arange(8, dtype="<f4")
GOOD = {"a": Stored(0, (2, 4), FLOATS.tobytes()), "b": Stored(0, (8,), (FLOATS * 2).tobytes())}
NAME = {"general.name": Value(STRING, "x")}
HUGE = 1 << 62


def raw(count: int, keys: int, rest: bytes) -> bytes:
    """A header whose body is given as bytes."""
    return b"GGUF" + struct.pack("<IQQ", 3, count, keys) + rest


def tensor(name: str, sizes: list[int], type_id: int = 0, offset: int = 0) -> bytes:
    body = files.text(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return body + struct.pack("<IQ", type_id, offset)


KEY = files.text("k")
BROKEN: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "too few"),
    "another format": (b"GGML" + gguf_bytes({}, GOOD)[4:], "begins with b'GGML'"),
    "more tensors than may be": (raw(65_537, 0, b""), "65,537 tensors; at most 65,536"),
    "more keys than may be": (raw(0, 4_097, b""), "4,097 metadata keys; at most 4,096"),
    "2^63 tensors": (raw(1 << 63, 0, b""), "tensors; at most"),
    "a file that ends in its keys": (raw(0, 2, KEY + struct.pack("<IB", U8, 1)), "8 bytes are needed and 0 are left"),
    "a key beyond the file": (raw(0, 1, struct.pack("<Q", 1000) + b"key"), "a text of 1,000 bytes"),
    "a key of 2^63 bytes": (raw(0, 1, struct.pack("<Q", 1 << 63) + b"key"), "a text of"),
    "an empty key": (raw(0, 1, files.text("") + struct.pack("<IB", U8, 1)), "key is empty"),
    "a key that is no UTF-8": (raw(0, 1, files.text(b"\xff\xfe") + struct.pack("<IB", U8, 1)), "not UTF-8"),
    "a key twice": (raw(0, 2, (KEY + struct.pack("<IB", U8, 1)) * 2), "'k' occurs twice"),
    "an unknown type of value": (raw(0, 1, KEY + struct.pack("<IQ", 13, 0)), "unknown type of value 13"),
    "a truth value of 2": (raw(0, 1, KEY + struct.pack("<IB", BOOL, 2)), "2 is not a truth value"),
    "an array of a truth value of 3": (
        raw(0, 1, KEY + struct.pack("<IIQB", ARRAY, BOOL, 1, 3)),
        "an array of truth values holds 3",
    ),
    "a text beyond the file": (raw(0, 1, KEY + struct.pack("<IQ", STRING, 99)), "a text of 99 bytes"),
    "a text above the limit": (gguf_bytes({"k": Value(STRING, "x" * ((1 << 20) + 1))}, {}), "at most 1,048,576"),
    "an array of arrays": (raw(0, 1, KEY + struct.pack("<IIQ", ARRAY, ARRAY, 1)), "arrays inside an array"),
    "an array of nothing known": (raw(0, 1, KEY + struct.pack("<IIQ", ARRAY, 77, 1)), "unknown type of value 77"),
    "an array beyond the file": (
        raw(0, 1, KEY + struct.pack("<IIQ", ARRAY, U64, 1000) + bytes(64)),
        "an array of 1,000 values does not fit the 64 bytes",
    ),
    "an array of 2^62": (raw(0, 1, KEY + struct.pack("<IIQ", ARRAY, U8, HUGE) + bytes(64)), "does not fit"),
    "an array of texts of 2^62": (raw(0, 1, KEY + struct.pack("<IIQ", ARRAY, STRING, HUGE)), "texts does not fit"),
    "an array of texts that ends": (
        raw(0, 1, KEY + struct.pack("<IIQQ", ARRAY, STRING, 2, 4) + b"text\1"),
        "8 bytes are needed and 1 are left|texts does not fit",
    ),
    "a text inside an array beyond the file": (
        raw(0, 1, KEY + struct.pack("<IIQQ", ARRAY, STRING, 1, 50)),
        "text 0 has 50 bytes",
    ),
    "a long text inside an array": (gguf_bytes({"k": files.strings("x" * 4097)}, {}), "text 0 has 4,097 bytes"),
    "an alignment of 0": (gguf_bytes({"general.alignment": Value(U32, 0)}, GOOD), "0 is not a power of two"),
    "an alignment of 24": (gguf_bytes({"general.alignment": Value(U32, 24)}, GOOD), "24 is not a power of two"),
    "an alignment of 8192": (gguf_bytes({"general.alignment": Value(U32, 8192)}, GOOD), "8192 is not a power"),
    "an alignment that is a text": (gguf_bytes({"general.alignment": Value(STRING, "32")}, GOOD), "not a whole number"),
    "a nameless tensor": (raw(1, 0, tensor("", [4])), "name is empty"),
    "a name of 65 bytes": (raw(1, 0, tensor("x" * 65, [4])), "a text of 65 bytes, where at most 64"),
    "a tensor twice": (raw(2, 0, tensor("a", [4]) * 2), "the tensor 'a' occurs twice"),
    "no dimensions": (raw(1, 0, files.text("a") + struct.pack("<IIQ", 0, 0, 0)), "0 dimensions"),
    "five dimensions": (raw(1, 0, tensor("a", [1] * 5)), "5 dimensions"),
    "2^32 - 1 dimensions": (raw(1, 0, files.text("a") + struct.pack("<I", (1 << 32) - 1)), "4294967295 dimensions"),
    "a dimension of 0": (raw(1, 0, tensor("a", [0, 4])), "is not 1 to"),
    "a dimension of 2^32": (raw(1, 0, tensor("a", [1 << 32])), "is not 1 to"),
    "a product beyond 2^64": (raw(1, 0, tensor("a", [1 << 31] * 4)), "ends at byte .* beyond"),
    "rows that are no whole blocks": (raw(1, 0, tensor("a", [40, 2], 2)), "not whole Q4_0 blocks of 32"),
    "an offset that is not aligned": (raw(1, 0, tensor("a", [4], offset=4)), "offset 4 is not a multiple of 32"),
    "a gap": (gguf_bytes({}, GOOD | {"b": GOOD["b"]._replace(offset=64)}), "'b' at offset 64 leaves a gap after 'a'"),
    "an overlap": (gguf_bytes({}, GOOD | {"b": GOOD["b"]._replace(offset=0)}), "'b' at offset 0 overlaps 'a'"),
    "a first tensor that is not first": (gguf_bytes({}, {"a": GOOD["a"]._replace(offset=32)}), "leaves a gap"),
    "an offset of 2^63": (gguf_bytes({}, {"a": GOOD["a"]._replace(offset=1 << 63)}), "leaves a gap"),
    "data cut short": (gguf_bytes({}, GOOD)[:-1], "'b' ends at byte .* beyond"),
    "data after the last tensor": (gguf_bytes({}, GOOD) + bytes(32), "32 bytes stand after the last tensor, 'b'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_with_offset_and_reason(tmp_path: Path, case: str) -> None:
    data, message = BROKEN[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=message) as caught:
        GgufFile.open(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gguf_bytes({}, GOOD, version=1), "version 1"),
        (gguf_bytes({}, GOOD, version=4), "version 4"),
        (gguf_bytes({}, GOOD, version=3 << 24), "big-endian"),
        (raw(1, 0, tensor("a", [256], 16)), "'a' is of type IQ2_XXS, which is not read; read are F32, "),
        (raw(1, 0, tensor("a", [256], 34)), "TQ1_0"),
        (raw(1, 0, tensor("a", [256], 26)), "I32"),
        (raw(1, 0, tensor("a", [256], 99)), "number 99"),
    ],
)
def test_versions_and_types_that_are_not_read_are_refused_by_name(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(Unsupported, match=message):
        GgufFile.open(path)


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf", Path("/dev/zero")):
        with pytest.raises(InvalidInput, match=r"cannot be read|not a regular file"):
            GgufFile.open(path)


@pytest.mark.parametrize("version", [2, 3])
def test_a_valid_file_is_read_back(tmp_path: Path, version: int) -> None:
    metadata = {
        "u8": Value(U8, 200), "i8": Value(I8, -3), "u16": Value(U16, 60_000), "i16": Value(I16, -9),
        "u32": Value(U32, 1 << 31), "i32": Value(I32, -5), "u64": Value(U64, 1 << 63), "i64": Value(I64, -(1 << 62)),
        "f64": Value(F64, 0.1),
        "f32": Value(F32, 1e-5), "bool": Value(BOOL, True), "text": Value(STRING, "żółć"),
        "texts": files.strings("a", "", b"\xff", "dd"), "bools": Value(ARRAY, [True, False], BOOL),
        "floats": Value(ARRAY, [0.5, -1.0], F32), "none": Value(ARRAY, [], I32),
    }  # fmt: skip
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata, GOOD, version=version))
    with GgufFile.open(path) as file:
        read = file.metadata
        for key in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f64", "bool", "text"):
            assert read[key] == metadata[key].value, key
            assert type(read[key]) is type(metadata[key].value)
        assert read["f32"] == 1e-5, "a float32 reads as its shortest decimal"
        texts = read["texts"]
        assert isinstance(texts, GgufStrings)
        assert list(texts) == [b"a", b"", b"\xff", b"dd"]
        assert (len(texts), texts[3], texts[-1], texts[1:3]) == (4, b"dd", b"dd", [b"", b"\xff"])
        assert np.asarray(read["bools"]).tolist() == [True, False]
        assert np.asarray(read["floats"]).tolist() == [0.5, -1.0]
        assert np.asarray(read["none"]).tolist() == []
        assert file.tensors["a"].shape == (2, 4)
        assert file.rows("a").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert file.rows("a", slice(1, 2)).tolist() == [[4, 5, 6, 7]]
        assert file.rows("b").tolist() == [[0, 2, 4, 6, 8, 10, 12, 14]]
        file.release("a")
        assert file.rows("a").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]], "pages come back when they are read"


def test_the_header_hash_covers_the_bytes_before_the_data(tmp_path: Path) -> None:
    path, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    path.write_bytes(gguf_bytes(NAME, GOOD))
    other.write_bytes(gguf_bytes(NAME, {"a": GOOD["a"], "b": GOOD["b"]._replace(data=FLOATS.tobytes())}))
    with GgufFile.open(path) as one, GgufFile.open(other) as same_header:
        assert one.header_sha256() == same_header.header_sha256()
    other.write_bytes(gguf_bytes({"general.name": Value(STRING, "y")}, GOOD))
    with GgufFile.open(path) as one, GgufFile.open(other) as another:
        assert one.header_sha256() != another.header_sha256()


def finite_blocks(type_id: int, count: int) -> np.ndarray:
    """Random blocks of a type, without scales that are not finite."""
    kind = TYPES[type_id]
    draw = np.random.default_rng(type_id)
    blocks = draw.integers(0, 256, (count * 4, kind.bytes), dtype=np.uint8)
    values = dequantize(blocks, GGMLQuantizationType(type_id))
    return blocks[np.isfinite(values).all(axis=1)][:count]


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("type_id", [key for key, kind in TYPES.items() if kind.name != "F64"])
def test_every_type_is_dequantised_to_the_bit(tmp_path: Path, type_id: int) -> None:
    """Against the `gguf` package, on random blocks: every bit pattern that a block can hold occurs."""
    kind = TYPES[type_id]
    assert (kind.name, kind.values, kind.bytes) == (GGMLQuantizationType(type_id).name, *GGML_QUANT_SIZES[type_id])
    blocks = finite_blocks(type_id, 3 * 64)
    assert len(blocks) == 3 * 64
    rows = blocks.reshape(64, 3 * kind.bytes)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes({}, {"a": Stored(type_id, (64, 3 * kind.values), rows.tobytes())}))
    expected = dequantize(rows, GGMLQuantizationType(type_id)).astype(np.float32)
    with GgufFile.open(path) as file:
        assert file.rows("a").tobytes() == expected.tobytes()
        assert file.rows("a", slice(7, 12)).tobytes() == expected[7:12].tobytes()
        assert file.rows("a", np.array([9, 2])).tobytes() == expected[[9, 2]].tobytes()


@pytest.mark.parametrize("type_id", [key for key, kind in TYPES.items() if kind.integer_format])
def test_integers_scales_and_minima_give_the_values(tmp_path: Path, type_id: int) -> None:
    """Bit for bit, but for the products of Q4_K, which are rounded to 16 bits."""
    kind = TYPES[type_id]
    blocks = np.random.default_rng(type_id).integers(0, 256, (3 * 64, kind.bytes), dtype=np.uint8)
    blocks[:, :4] = np.random.default_rng(1).uniform(1e-3, 1e-2, (len(blocks), 2)).astype("<f2").view(np.uint8)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes({}, {"a": Stored(type_id, (64, 3 * kind.values), blocks.tobytes())}))
    with GgufFile.open(path) as file:
        found = file.integers("a", slice(5, 60))
        np.testing.assert_allclose(found.dequantised(), file.rows("a")[5:60], 0, 5e-3 if kind.name == "Q4_K" else 0)
    assert (found.minima is None) is (kind.name in ("Q4_0", "Q8_0"))


def test_doubles_are_read_as_float32(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes({}, {"a": Stored(28, (3,), np.array([0.1, -2.0, 1e300]).tobytes())}))
    with GgufFile.open(path) as file, pytest.raises(InvalidInput, match="not finite"):
        file.rows("a")
    path.write_bytes(gguf_bytes({}, {"a": Stored(28, (2,), np.array([0.1, -2.0]).tobytes())}))
    with GgufFile.open(path) as file:
        assert file.rows("a").tolist() == [[np.float32(0.1), -2.0]]


@pytest.mark.parametrize("type_id", [0, 1, 2, 12, 14, 30])
@pytest.mark.parametrize("bits", [0x7C00, 0x7E00, 0xFC00])
def test_scales_that_are_not_finite_are_refused(tmp_path: Path, type_id: int, bits: int) -> None:
    kind = TYPES[type_id]
    block = np.zeros(kind.bytes, np.uint8)
    scale = {0: np.float32(np.inf if bits == 0x7C00 else np.nan).tobytes(), 30: b"\x80\x7f"}.get(
        type_id, struct.pack("<H", bits)
    )
    at = kind.bytes - 2 if kind.name == "Q6_K" else 0
    block[at : at + len(scale)] = np.frombuffer(scale, np.uint8)
    block[8:8] = 0
    if kind.values > 1:
        block[4:-2] = 0x11  # integers and inner scales that are not zero
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes({}, {"a": Stored(type_id, (kind.values,), block.tobytes())}))
    with GgufFile.open(path) as file, pytest.raises(InvalidInput, match=r"'a' \(.*holds a .* that is not finite"):
        file.rows("a")


def test_views_undo_llama_cpps_conversions(tmp_path: Path) -> None:
    """The rows of each head, biases included, are reordered to halves, and one is subtracted from norms."""
    heads, size = 3, 8
    matrix = np.random.default_rng(1).standard_normal((heads * size, 32)).astype(np.float32)
    bias = np.arange(heads * size, dtype=np.float32)

    def pairs(values: np.ndarray) -> bytes:
        halves = values.reshape(heads, 2, size // 2, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).astype("<f4").tobytes()

    stored = {
        "q": Stored(0, matrix.shape, pairs(matrix)),
        "bias": Stored(0, bias.shape, pairs(bias)),
        "norm": Stored(0, (8,), (FLOATS / 8 + 1).tobytes()),
        "fused": Stored(0, (2, 3, 4), np.arange(24, dtype="<f4").tobytes()),
    }
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes({}, stored))
    views = {
        "q": TensorView("q", heads=heads),
        "bias": TensorView("bias", heads=heads),
        "norm": TensorView("norm", offset=-1.0),
        "fused": TensorView("fused"),
    }
    with GgufTensors(open_shards(path), views) as tensors:
        assert np.array_equal(tensors.floats("q"), matrix)
        assert np.array_equal(tensors.floats("q", slice(5, 19)), matrix[5:19])
        assert np.array_equal(tensors.floats("bias"), bias)
        assert np.array_equal(tensors.floats("bias", slice(2, 7)), bias[2:7])
        assert np.array_equal(tensors.floats("norm"), FLOATS / 8)
        assert tensors.floats("fused", slice(1, 2)).tolist() == [np.arange(12, 24).reshape(3, 4).tolist()]
        assert tensors.entry("q").shape == matrix.shape
        assert tensors.files == {"model.gguf": path}
        tensors.release("q")
        with pytest.raises(InvalidInput, match="tensor 'k' is missing"):
            tensors.entry("k")


def split(folder: Path, **changed: object) -> Path:
    """Two parts; returns the first."""
    for number, name in enumerate(("a", "b")):
        keys = {"split.no": Value(U16, number), "split.count": Value(U16, 2), "split.tensors.count": Value(I32, 2)}
        if number == 0:
            keys |= NAME
        data = gguf_bytes(keys | (changed if number == 1 else {}), {name: GOOD[name]})  # type: ignore[operator]
        (folder / f"model-{number + 1:05d}-of-00002.gguf").write_bytes(data)
    return folder / "model-00001-of-00002.gguf"


def test_all_parts_of_a_split_model_are_read(tmp_path: Path) -> None:
    first = split(tmp_path)
    shards = open_shards(first)
    with GgufTensors(shards, {"a": TensorView("a"), "b": TensorView("b")}) as tensors:
        assert tensors.floats("b").tolist() == (FLOATS * 2).tolist()
        assert list(tensors.files) == ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"]
    assert stem_of(first) == "model"
    assert stem_of(Path("a/b.Q4_1.gguf")) == "b.Q4_1"


def test_split_models_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    first = split(tmp_path)
    second = first.with_name("model-00002-of-00002.gguf")
    with pytest.raises(InvalidInput, match=r"is part 00002 of 2; give the first, …-00001-of-00002\.gguf"):
        open_shards(second)
    renamed = first.rename(tmp_path / "model.gguf")
    with pytest.raises(InvalidInput, match="is one of 2 parts and is not named like one"):
        open_shards(renamed)
    renamed.rename(first)
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(InvalidInput, match=r"model-00002-of-00002\.gguf: is missing"):
        open_shards(first)
    second.write_bytes(first.read_bytes())
    with pytest.raises(InvalidInput, match="says that it is part 0 of 2"):
        open_shards(first)
    second.write_bytes(kept)
    assert len(open_shards(first)) == 2
    keys = {"split.no": Value(U16, 1), "split.count": Value(U16, 2)}
    second.write_bytes(gguf_bytes(keys, {"a": GOOD["a"]}))
    with pytest.raises(InvalidInput, match=r"tensor 'a' is in model-00001-of-00002\.gguf too"):
        open_shards(first)
    second.write_bytes(gguf_bytes(keys, {}))
    with pytest.raises(InvalidInput, match="2 tensors are stated and 1 are there"):
        open_shards(first)
    split(tmp_path, **{"split.no": Value(STRING, "1")})
    with pytest.raises(InvalidInput, match=r"split\.no: '1' is not a whole number"):
        open_shards(first)


def test_a_mutated_file_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    seen = Counter(fuzzing.outcomes(GgufFormat(tmp_path), 2_000, seed=0, kept=tmp_path))
    assert sum(seen.values()) == 2_000
    assert seen["InvalidInput"] > 1_000
    assert seen["Unsupported"] > 10
    assert seen["read"] > 50, "some changes do no harm"


@pytest.mark.skipif(sys.platform != "linux", reason="counts mapped memory in /proc")
def test_a_header_of_many_texts_takes_little_memory(tmp_path: Path) -> None:
    """Two million empty strings, the limit, take 20 MB; one more is refused before any is read."""
    path = tmp_path / "model.gguf"
    many = struct.pack("<IIQ", ARRAY, STRING, gguf.MAX_TEXTS) + bytes(8 * gguf.MAX_TEXTS)
    path.write_bytes(raw(0, 1, KEY + many))
    before = fuzzing.mapped_bytes()
    with GgufFile.open(path) as file:
        assert fuzzing.mapped_bytes() - before < path.stat().st_size + 64_000_000
        assert len(file.metadata["k"]) == gguf.MAX_TEXTS  # type: ignore[arg-type]
    path.write_bytes(raw(0, 1, KEY + struct.pack("<IIQ", ARRAY, STRING, gguf.MAX_TEXTS + 1) + bytes(1 << 25)))
    with pytest.raises(EdgekitError, match="at most 2,097,152 are read in all"):
        GgufFile.open(path)
