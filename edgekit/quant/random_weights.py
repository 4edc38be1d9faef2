"""Random weights of any shape, to measure speed and memory, which do not depend on the values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit.common.files import file_sha256
from edgekit.common.sealed_json import to_sealed_json
from edgekit.contracts.neutral import MANIFEST, NeutralManifest, NeutralWeights, WeightFile, bits_of, expected_tensors
from edgekit.contracts.recipe import Recipe
from edgekit.formats.int_packing import float32_to_bf16
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.model.families import model_from_config
from edgekit.quant.hf_config import neutral_config


def random_weights(folder: Path, config: dict[str, Any], recipe: Recipe, name: str) -> NeutralWeights:
    """Neutral weights as the quantiser writes them, with random integers and scales that keep activations in range.

    Integers have the mean 0 and biases are 0. Otherwise all activations grow alike, keys resemble each other, and far
    tokens get attention too small for normal floats, with which Intel's processors take many times longer.
    """
    folder.mkdir(parents=True)
    model = model_from_config(config, name, "config.json")
    random = np.random.default_rng(0)
    matrices = {tensor.module: tensor for tensor in model.tensors() if tensor.role != "bias"}
    tensors = list(expected_tensors(model, recipe))
    path = folder / "model.safetensors"
    with TensorWriter(path, {name: (dtype, shape) for name, dtype, shape in tensors}) as writer:
        for name, dtype, shape in tensors:
            if name.endswith(".weight_shape"):
                writer.write(name, np.array(matrices[name.removesuffix(".weight_shape")].shape, np.int64))
            elif name.endswith(".weight_scale"):
                inputs = matrices[name.removesuffix(".weight_scale")].shape[1]
                steps = random.uniform(0.8, 1.2, shape) / np.sqrt(inputs) / (4.2 if shape[1] > 1 else 74)
                writer.write(name, float32_to_bf16(steps.astype(np.float32)))
            elif dtype == "I32":
                for row in range(0, shape[0], 8192):
                    count = min(8192, shape[0] - row)
                    words = random.integers(0, 2**32, (count, shape[1]), dtype=np.uint32)
                    if bits_of(recipe.format_of(matrices[name.removesuffix(".weight_packed")])) == 4:
                        words |= _unset(words)
                    writer.write(name, words.view(np.int32), row)
            else:
                value = 0 if name.endswith(".bias") else 1
                writer.write(name, np.full(shape, value, np.float16 if dtype == "F16" else np.float32))
        writer.seal()
    files = {path.name: WeightFile(bytes=path.stat().st_size, sha256=file_sha256(path))}
    manifest = NeutralManifest(
        model=model, recipe=recipe, method="rtn", source_files={}, tools={}, files=files, statistics={}
    )
    (folder / "config.json").write_text(json.dumps(neutral_config(config, model, recipe)))
    (folder / MANIFEST).write_bytes(to_sealed_json(manifest))
    return NeutralWeights.open(folder)


def _unset(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return bit 8 of every nibble that is 0: a nibble of 0 stands for -8, and with this bit set for 0."""
    low = np.uint32(0x77777777)
    return ~(((words & low) + low) | words | low)
