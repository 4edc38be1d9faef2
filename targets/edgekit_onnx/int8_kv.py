"""Keys and values in 8 bits: quantisation steps measured at export, and graphs that take them as inputs.

onnxruntime's attention quantises each channel by a fixed step, so the range of a channel must be known beforehand. A
key's channels are rotated in pairs, by its position and by evictions: both channels of a pair have the step for the
largest norm of that pair seen, so rotating never leaves the range. Values beyond `MARGIN` times that range are clipped.
Steps are powers of two with a fraction of an eighth as exponent, one byte each, because an update that changes any
weight measures other steps and fetches all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgekit.contracts.feeding import probe_tokens
from edgekit.errors import DamagedArtifact, InvalidInput
from edgekit.formats.safetensors import TensorFolder
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.model.parts import Layer
from edgekit.model.rope import rotated_pairs
from edgekit.model.spec import ModelSpec
from edgekit_onnx.audit import regular_file
from edgekit_onnx.layout import SINKS, set_cache_type

if TYPE_CHECKING:
    from edgekit.contracts.neutral import NeutralWeights

STEPS_FILE = "kv-steps.safetensors"
BITS = 8
LARGEST = 127
MARGIN = 1.5
SEQUENCES, LENGTH = 2, 128
_STEPS = "steps"  # the tensor: for each layer the bytes of keys, then of values
_EIGHTHS, _LEAST_EXPONENT = 8, -20  # a byte of 0 is the step of a channel that was always zero
_STEP_OF = np.array([2.0 ** (_LEAST_EXPONENT + code / _EIGHTHS) for code in range(256)]).astype(np.float32)

Steps = tuple[tuple[NDArray[np.float32], NDArray[np.float32]], ...]  # by layer, for keys and values: [kv_head, dim]


class KVRange:
    """The largest absolute value of every channel, over all observed tokens."""

    def __init__(self, model: ModelSpec) -> None:
        pairs = {name: rotated_pairs(rope) for name, rope in model.ropes.items()}
        self._pairs = [([], []) if layer.rope is None else pairs[layer.rope] for layer in model.layers]
        self._most = [
            (np.zeros(_shape(layer), np.float32), np.zeros(_shape(layer), np.float32)) for layer in model.layers
        ]

    def observe(self, layer: int, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        """Extend the ranges by keys and values [kv_head, token, dim]."""
        first, second = self._pairs[layer]
        largest = np.abs(keys).max(axis=1)
        largest[:, first] = largest[:, second] = np.hypot(keys[:, :, first], keys[:, :, second]).max(axis=1)
        for most, seen in zip(self._most[layer], (largest, np.abs(values).max(axis=1)), strict=True):
            np.maximum(most, seen, out=most)

    def steps(self) -> Steps:
        """The steps that these ranges need."""
        scale = np.float32(MARGIN / LARGEST)
        return tuple((_STEP_OF[_codes(keys * scale)], _STEP_OF[_codes(values * scale)]) for keys, values in self._most)


def rounded(model: ModelSpec, kv_bits: int, layer: int, kind: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the "keys" or "values" [kv_head, token, dim] of a layer as a cache gives them back.

    The steps of 8 bits are those for the ranges of these tokens, so that steps measured wrongly show.
    """
    if kv_bits != BITS:
        return values.astype(np.float16).astype(np.float32) if kv_bits == 16 else values
    seen = KVRange(model)
    seen.observe(layer, values, values)
    step = seen.steps()[layer][kind == "values"][:, None]
    back: NDArray[np.float32] = np.rint(values / step).clip(-LARGEST - 1, LARGEST) * step
    return back


def typical_tokens(model: ModelSpec, weights: NeutralWeights) -> list[list[int]]:
    """Bundled calibration text by the model's tokenizer; without one, tokens spread over the vocabulary."""
    from edgekit.quant.calibration import read_calibration  # only exports need it

    try:
        sequences = read_calibration(
            None, weights.folder, vocabulary=model.vocab_size, sequences=SEQUENCES, length=LENGTH
        ).sequences
    except InvalidInput:
        spread = probe_tokens(SEQUENCES * LENGTH, model.vocab_size)
        sequences = tuple(tuple(spread[start : start + LENGTH]) for start in range(0, len(spread), LENGTH))
    return [list(sequence) for sequence in sequences]


def write_steps(folder: Path, steps: Steps) -> None:
    """Write the steps to a small file in the folder of the graphs."""
    codes = np.concatenate([_codes(array).ravel() for _, array in _named(steps)])
    with TensorWriter(folder / STEPS_FILE, {_STEPS: ("U8", codes.shape)}) as writer:
        writer.write(_STEPS, codes)
        writer.seal()


def read_steps(folder: Path, model: ModelSpec) -> Steps | None:
    """Read the steps; None where the artifact has none, so that its cache cannot be 8-bit."""
    path = folder / STEPS_FILE
    if not path.exists() and not path.is_symlink():
        return None
    regular_file(path)
    try:
        with TensorFolder.open(path) as tensors:
            return _read_codes(path, tensors, model)
    except InvalidInput as error:
        raise DamagedArtifact(f"{error}; export the artifact again") from error


def _codes(steps: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the byte of the nearest step that can be stored."""
    exponents = np.log2(np.maximum(steps, _STEP_OF[0])) - _LEAST_EXPONENT
    codes: NDArray[np.uint8] = np.rint(_EIGHTHS * exponents).clip(0, 255).astype(np.uint8)
    return codes


def _read_codes(path: Path, tensors: TensorFolder, model: ModelSpec) -> Steps:
    codes, shapes = np.array(tensors.array(_STEPS)), [_shape(layer) for layer in model.layers for _ in range(2)]
    sizes = [heads * dim for heads, dim in shapes]
    if len(tensors.entries) != 1 or codes.dtype != np.uint8 or codes.shape != (sum(sizes),):
        raise DamagedArtifact(f"{path}: holds no {sum(sizes):,} steps of one byte; export the artifact again")
    parts = np.split(_STEP_OF[codes], np.cumsum(sizes)[:-1])
    arrays = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    return tuple(zip(arrays[::2], arrays[1::2], strict=True))


def inputs_of(steps: Steps) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Names and values of the inputs that `with_steps` adds: one step for each channel of each head."""
    for name, array in _named(steps):
        yield f"step.{name}", np.ascontiguousarray(array[:, None, :])


def with_steps(data: bytes) -> bytes:
    """Derive a graph whose cache is 8-bit and whose inputs include the steps of each layer."""
    import onnx
    from onnx import TensorProto, helper

    model = onnx.ModelProto.FromString(data)
    graph = model.graph
    set_cache_type(graph, TensorProto.INT8)
    for node in graph.node:
        if node.op_type != "GroupQueryAttention":
            continue
        key = next(name for name in node.input if name.startswith("past."))
        layer, shape = key.split(".")[1], _dims(graph.input, key)
        names = [f"step.{layer}.{kind}" for kind in ("key", "value")]
        node.input.extend([""] * (SINKS + 1 - len(node.input)) + names)  # the last input before the steps
        kinds = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": BITS}
        others = [each for each in node.attribute if each.name not in kinds]  # a graph saved by onnxruntime has them
        del node.attribute[:]
        node.attribute.extend(others)
        node.attribute.extend(helper.make_attribute(name, kind) for name, kind in kinds.items())
        known = {value.name for value in graph.input}  # several layers may read one cache
        graph.input.extend(
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [shape[1], 1, shape[3]])
            for name in names
            if name not in known
        )
    return bytes(model.SerializeToString())


def _dims(values: Any, name: str) -> list[int]:
    value = next(value for value in values if value.name == name)
    return [dim.dim_value for dim in value.type.tensor_type.shape.dim]


def _named(steps: Steps) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for index, pair in enumerate(steps):
        for kind, array in zip(("key", "value"), pair, strict=True):
            yield f"{index}.{kind}", array


def _shape(layer: Layer) -> tuple[int, int]:
    return layer.kv_heads, layer.head_dim
