"""Writes the files of an artifact: one GGUF file with its tokenizer inside, and a Modelfile for Ollama.

Needs no llama.cpp, except for its own formats: its library quantises float weights, weighted by the importance of each
input. Tensors are streamed, so memory does not grow with the model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgekit.common.files import write_file
from edgekit.common.footprint import return_unused
from edgekit.common.progress import Progress
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.errors import InvalidInput, TargetFailed
from edgekit.formats.gguf_types import TYPES
from edgekit.formats.gguf_writer import TYPE_IDS, MetadataValue, write_gguf
from edgekit.model.source_files import copy_companions
from edgekit.quant.calibration import read_calibration
from edgekit.quant.importance import mean_squares
from edgekit.quant.neutral_gguf import model_metadata, written_tensors
from edgekit_llamacpp import library
from edgekit_llamacpp.layout import MODELFILE, WEIGHTS
from edgekit_llamacpp.tokens import stop_texts, tokenizer_metadata

_QUANTISATION = 2  # of GGUF: the layout of blocks since 2023


def export(plan: Plan, weights: NeutralWeights, out: Path, progress: Progress) -> None:
    """Write the artifact's files into the empty directory `out`."""
    own = _quantiser_of(weights, progress) if plan.recipe.is_native() else None
    tensors = written_tensors(weights, plan.context, plan.recipe if own else None, own)
    total, done = len(tensors), 0

    def begun(name: str) -> None:
        nonlocal done
        progress(done, total, name)
        done += 1

    progress(0, total, "tokenizer")
    tokens = tokenizer_metadata(plan.model, weights.folder)
    return_unused()
    metadata: dict[str, MetadataValue] = model_metadata(plan.model, plan.context) | tokens
    if not plan.recipe.is_exact():
        metadata["general.quantization_version"] = _QUANTISATION
    write_gguf(out / WEIGHTS, metadata, tensors, begun)
    copy_companions(weights.folder, out)
    if tokens["tokenizer.ggml.model"] != "none":
        write_file(out / MODELFILE, modelfile(plan, stop_texts(tokens)).encode())
    progress(total, total, "exported")


def modelfile(plan: Plan, stops: list[str]) -> str:
    """Return the Modelfile for `ollama create`: the file, the context, and the texts that end an answer."""
    lines = [f"FROM ./{WEIGHTS}", f"PARAMETER num_ctx {plan.context}"]
    lines += [f'PARAMETER stop "{text}"' for text in stops if '"' not in text and "\n" not in text]
    return "\n".join(lines) + "\n"


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


def _quantiser_of(weights: NeutralWeights, progress: Progress) -> Quantiser:
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
