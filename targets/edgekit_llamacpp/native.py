"""llama.cpp's own formats: quantises float weights with its library, weighted by the importance of each input."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from edgekit.common.progress import Progress
from edgekit.contracts.neutral import NeutralWeights
from edgekit.errors import InvalidInput, TargetFailed
from edgekit.formats.gguf_types import TYPES
from edgekit.formats.gguf_writer import TYPE_IDS
from edgekit.quant.calibration import read_calibration
from edgekit.quant.importance import mean_squares
from edgekit_llamacpp import library


class Quantiser:
    """Quantises rows of a module's matrix. Errors are weighted by the mean square of their input."""

    def __init__(self, importance: Mapping[str, NDArray[np.float32]]) -> None:
        self._library, self._importance = library.load(), importance

    def __call__(self, type_name: str, module: str, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        kind, type_id = TYPES[TYPE_IDS[type_name]], TYPE_IDS[type_name]
        values, weights = np.ascontiguousarray(rows, np.float32), self._importance.get(module)
        if not np.isfinite(values).all():
            raise InvalidInput(f"llamacpp: {module} holds values that are not finite; give a sound model")
        width = values.shape[1]
        if width % kind.values:  # llama.cpp would end the process
            raise InvalidInput(f"llamacpp: {module}: {width} values fill no blocks of {kind.values} for {type_name}")
        if weights is not None and weights.shape != (width,):
            raise InvalidInput(f"llamacpp: {module}: importance of {weights.size} inputs for {width}")
        blocks = np.empty((len(values), width // kind.values * kind.bytes), np.uint8)
        floats = ctypes.POINTER(ctypes.c_float)
        done = self._library.ggml_quantize_chunk(
            type_id,
            values.ctypes.data_as(floats),
            blocks.ctypes.data,
            0,
            len(values),
            width,
            None if weights is None else np.ascontiguousarray(weights, np.float32).ctypes.data_as(floats),
        )
        if done != blocks.nbytes:
            raise TargetFailed(f"llamacpp: {module} gave {done:,} bytes of {type_name}, expected {blocks.nbytes:,}")
        return blocks


def quantiser_of(weights: NeutralWeights, progress: Progress) -> Quantiser:
    """Return the quantiser of these float weights, with importance measured on the bundled calibration text."""
    library.load()
    if not weights.recipe.is_exact():
        raise InvalidInput(
            f"llamacpp: its own formats are quantised from the float model, and these weights are {weights.recipe.name}"
        )
    text = read_calibration(None, weights.folder, vocabulary=weights.model.vocab_size)
    moments = mean_squares(weights.model, text, weights.tensor, progress)
    weights.release()
    return Quantiser(moments)
