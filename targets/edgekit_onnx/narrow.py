"""Keys and values in 8 bits: the steps that they are rounded to, measured at export, and the graphs that take them.

onnxruntime's attention rounds each channel to a fixed step, so how far a channel reaches must be known before. A key's
channels are turned in pairs, by its position and by evictions: both of a pair have the step that fits the longest pair
seen, so that turning never leaves the range. What reaches further than `MARGIN` times all that was seen is cut off.
Knows nothing of sessions or slabs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgekit.errors import DamagedArtifact, InvalidInput
from edgekit.model import Layer, ModelSpec
from edgekit.rope import frequencies
from edgekit.weights.calibration import read_calibration
from edgekit.weights.safetensors import TensorFolder
from edgekit.weights.writing import TensorWriter
from edgekit_onnx.audit import refuse_link

if TYPE_CHECKING:
    from edgekit.weights.neutral import NeutralWeights

STEPS_FILE = "cache-steps.safetensors"
BITS = 8
LARGEST = 127
MARGIN = 1.5
SEQUENCES, LENGTH = 2, 128
_LEAST = 1e-6  # of a channel that was never anything but zero

Steps = tuple[tuple[NDArray[np.float32], NDArray[np.float32]], ...]  # by layer, for keys and values: [kv_head, dim]


class Reach:
    """The furthest that every channel went, over all that was looked at."""

    def __init__(self, model: ModelSpec, context: int) -> None:
        widths = {name: 2 * len(frequencies(rope, context)[0]) for name, rope in model.ropes.items()}
        self._turned = [0 if layer.rope is None else widths[layer.rope] for layer in model.layers]
        self._most = [
            (np.zeros(_shape(layer), np.float32), np.zeros(_shape(layer), np.float32)) for layer in model.layers
        ]

    def look(self, layer: int, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        """[kv_head, token, dim] of some tokens."""
        turned = self._turned[layer]
        reached = np.abs(keys).max(axis=1)
        pairs = np.hypot(keys[:, :, : turned // 2], keys[:, :, turned // 2 : turned]).max(axis=1)
        reached[:, :turned] = np.concatenate([pairs, pairs], axis=1)
        for most, found in zip(self._most[layer], (reached, np.abs(values).max(axis=1)), strict=True):
            np.maximum(most, found, out=most)

    def steps(self) -> Steps:
        scale = np.float32(MARGIN / LARGEST)
        return tuple(
            (np.maximum(keys, _LEAST) * scale, np.maximum(values, _LEAST) * scale) for keys, values in self._most
        )


def typical_tokens(model: ModelSpec, weights: NeutralWeights) -> list[list[int]]:
    """Text that comes with edgekit, by the model's own tokenizer; without one, tokens from all over the vocabulary."""
    try:
        found = read_calibration(
            None, weights.folder, vocabulary=model.vocab_size, sequences=SEQUENCES, length=LENGTH
        ).sequences
    except InvalidInput:
        spread = [(7 + index * 2_654_435_761) % model.vocab_size for index in range(SEQUENCES * LENGTH)]
        found = tuple(tuple(spread[start : start + LENGTH]) for start in range(0, len(spread), LENGTH))
    return [list(sequence) for sequence in found]


def write_steps(folder: Path, steps: Steps) -> None:
    """One small file beside the graphs."""
    arrays = dict(_named(steps))
    with TensorWriter(folder / STEPS_FILE, {name: ("F32", array.shape) for name, array in arrays.items()}) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
        writer.seal()


def read_steps(folder: Path, model: ModelSpec) -> Steps | None:
    """None where the artifact has none: its cache is never narrow."""
    path = folder / STEPS_FILE
    if not path.exists() and not path.is_symlink():
        return None
    refuse_link(path)
    try:
        with TensorFolder.open(path) as tensors:
            if len(tensors.entries) != 2 * len(model.layers):
                raise DamagedArtifact(f"{path}: has {len(tensors.entries)} tensors for {len(model.layers)} layers")
            return tuple(_read_layer(path, tensors, index, layer) for index, layer in enumerate(model.layers))
    except InvalidInput as error:
        raise DamagedArtifact(f"{error}; export the artifact again") from error


def _read_layer(path: Path, tensors: TensorFolder, index: int, layer: Layer) -> tuple[Any, Any]:
    found = []
    for kind in ("key", "value"):
        array = np.array(tensors.array(f"{index}.{kind}"))
        if array.dtype != np.float32 or array.shape != _shape(layer) or not (0 < array.min() <= array.max() < np.inf):
            raise DamagedArtifact(
                f"{path}: {index}.{kind} holds no steps of {_shape(layer)}; export the artifact again"
            )
        found.append(array)
    return found[0], found[1]


def inputs_of(steps: Steps) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """What the inputs of `with_steps` are bound to: one step for each channel of each head."""
    for name, array in _named(steps):
        yield f"step.{name}", np.ascontiguousarray(array[:, None, :])


def with_steps(data: bytes) -> bytes:
    """The same graph with its cache in 8 bits, and the steps of each layer as inputs."""
    import onnx
    from onnx import TensorProto, helper

    model = onnx.ModelProto.FromString(data)
    graph = model.graph
    for value in (*graph.input, *graph.output):
        if value.name.startswith(("past.", "present.")):
            value.type.tensor_type.elem_type = TensorProto.INT8
    for node in graph.node:
        if node.op_type != "GroupQueryAttention":
            continue
        key = next(name for name in node.input if name.startswith("past."))
        layer, shape = key.split(".")[1], _dims(graph.input, key)
        names = [f"step.{layer}.{kind}" for kind in ("key", "value")]
        # In front of the steps stand position ids, a bias and a sink, which no graph of ours has.
        node.input.extend([""] * (12 - len(node.input)) + names)
        kinds = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": BITS}
        others = [attribute for attribute in node.attribute if attribute.name not in kinds]  # a saved graph has them
        del node.attribute[:]
        node.attribute.extend(others)
        node.attribute.extend(helper.make_attribute(name, kind) for name, kind in kinds.items())
        graph.input.extend(
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [shape[1], 1, shape[3]]) for name in names
        )
    found: bytes = model.SerializeToString()
    return found


def _dims(values: Any, name: str) -> list[int]:
    value = next(value for value in values if value.name == name)
    return [dim.dim_value for dim in value.type.tensor_type.shape.dim]


def _named(steps: Steps) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for index, pair in enumerate(steps):
        for kind, array in zip(("key", "value"), pair, strict=True):
            yield f"{index}.{kind}", array


def _shape(layer: Layer) -> tuple[int, int]:
    return layer.kv_heads, layer.head_dim
