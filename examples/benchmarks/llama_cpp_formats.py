"""Makes GGUF files in llama.cpp's own formats with its own quantiser, and reads their weights back as floats."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import torch

from edgekit.common.content_store import ContentStore
from edgekit.contracts.recipe import named_recipe
from edgekit.model.gguf_source import is_gguf, open_gguf_tensors
from edgekit.model.source import ModelSource
from edgekit.quant.neutral_gguf import write_neutral_gguf
from edgekit.quant.pipeline import neutral_weights

FORMATS = {"Q4_0": 2, "IQ4_XS": 30, "Q4_K_M": 15, "Q5_K_M": 17}  # name → llama_ftype
INSTALL = "pip install cyllama==0.2.18"
_QUANTISE = """
import sys
from cyllama.llama import llama_cpp
asked = llama_cpp.LlamaModelQuantizeParams()
asked.ftype, asked.allow_requantize, asked.nthread = int(sys.argv[3]), True, 1
llama_cpp.model_quantize(sys.argv[1], sys.argv[2], asked)
"""


def quantised_file(source: ModelSource, name: str, python: str, folder: Path) -> Path:
    """The model in the format `name`, without an importance matrix; made once and kept in `folder`."""
    file = folder / f"{source.name}-{name}.gguf"
    if not file.exists():
        part = file.with_suffix(".part")
        words = [python, "-c", _QUANTISE, str(_float_file(source, folder)), str(part), str(FORMATS[name])]
        done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"llama.cpp did not make {name} of {source.name}:\n{done.stderr[-2000:]}")
        part.rename(file)
    return file


def _float_file(source: ModelSource, folder: Path) -> Path:
    """The file to quantise: the source itself if it is GGUF, whatever its types, else its weights in float32."""
    if is_gguf(source.weights):
        return source.weights
    file = folder / f"{source.name}-F32.gguf"
    if not file.exists():
        with tempfile.TemporaryDirectory(dir=folder) as store:
            weights = neutral_weights(source, named_recipe("float32"), store=ContentStore(Path(store)))
            part = file.with_suffix(".part")
            write_neutral_gguf(weights, part, source.spec.max_positions)
        part.rename(file)
    return file


def floats_and_bytes(source: ModelSource, file: Path) -> tuple[dict[str, torch.Tensor], int]:
    """The weights of a file as floats, under the source's names, and the bytes of its tensors."""
    with open_gguf_tensors(file) as stored:
        floats = {tensor.name: torch.from_numpy(stored.floats(tensor.name)) for tensor in source.spec.tensors()}
        return floats, sum(stored.entries[name].bytes for name in floats)
