"""Compares logits of a GGUF that edgekit reads with those of llama.cpp, both in float32: mean KL and equal top tokens.

    pip install --target /tmp/llama xllamacpp==2026.10.11549
    python -m examples.benchmarks.gguf_against_llama MODEL.gguf --library /tmp/llama/xllamacpp/xllamacpp.abi3.so

llama.cpp rounds activations to 8 bits where weights are quantised. So it gets a copy of the file whose values are
float32, as edgekit dequantised them, which leaves tensor names, permutations, ropes and norms to be compared. The copy
takes four bytes a parameter. The structs of llama.cpp's C API are those of build 11549; any other library is refused.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit.common.divergence import Pair, divergence_of
from edgekit.formats.gguf import DEFAULT_ALIGNMENT, GgufFile
from edgekit.model.source import open_source, open_tensors
from edgekit.runtime.generation.tokenizer import read_codec

HELD_OUT = Path(__file__).parent / "held_out"
KINDS = ("code", "prose")
ROWS = 4096
# Sizes of the structs, and places of the fields that are read or set, in build 11549.
_MODEL_PARAMS, _CONTEXT_PARAMS = ctypes.c_byte * 80, ctypes.c_byte * 168
_N_CTX, _N_BATCH, _N_UBATCH, _FLASH, _TYPE_K, _TYPE_V = 0, 4, 8, 52, 104, 108
_DEFAULTS = ((_N_CTX, 512), (_N_BATCH, 2048), (_N_UBATCH, 512), (_TYPE_K, 1), (_TYPE_V, 1))


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


class _ModelParams(ctypes.Structure):
    _fields_ = (("raw", _MODEL_PARAMS),)


class _ContextParams(ctypes.Structure):
    _fields_ = (("raw", _CONTEXT_PARAMS),)


def write_float32(source: Path, out: Path) -> None:
    """Copy a GGUF file with its metadata as they are and every tensor as float32."""
    with GgufFile.open(source) as file, out.open("wb") as copy:
        data = source.read_bytes()
        (count,) = struct.unpack_from("<Q", data, 8)
        first = min(data.index(_text(name) + struct.pack("<I", len(each.shape))) for name, each in file.tensors.items())
        copy.write(data[:first])
        offset = 0
        for name, tensor in file.tensors.items():
            copy.write(_text(name) + struct.pack("<I", len(tensor.shape)))
            copy.write(struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape)))
            copy.write(struct.pack("<IQ", 0, offset))
            offset += -(-int(np.prod(tensor.shape)) * 4 // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
        assert count == len(file.tensors)
        copy.write(bytes(-copy.tell() % DEFAULT_ALIGNMENT))
        for name, tensor in file.tensors.items():
            rows = int(np.prod(tensor.shape[:-1])) if len(tensor.shape) > 1 else 1
            for start in range(0, rows, ROWS):
                copy.write(np.ascontiguousarray(file.rows(name, slice(start, min(rows, start + ROWS)))).data)
            copy.write(bytes(-copy.tell() % DEFAULT_ALIGNMENT))


def _text(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


def llama_logits(library: Path, model: Path, tokens: list[int]) -> NDArray[np.float32]:
    """Logits after every token, without flash attention, cache in float32. Runs in a process of its own."""
    api = ctypes.CDLL(str(library))
    api.llama_model_default_params.restype = _ModelParams
    api.llama_context_default_params.restype = _ContextParams
    settings = api.llama_context_default_params()
    for place, expected in _DEFAULTS:
        if (found := ctypes.c_int32.from_buffer(settings, place).value) != expected:
            raise SystemExit(f"{library}: not build 11549: {found} at byte {place} of the defaults, not {expected}")
    for place, value in ((_N_CTX, 512), (_N_BATCH, 512), (_N_UBATCH, 512), (_FLASH, 0), (_TYPE_K, 0), (_TYPE_V, 0)):
        ctypes.c_int32.from_buffer(settings, place).value = value
    api.llama_model_load_from_file.argtypes = (ctypes.c_char_p, _ModelParams)
    api.llama_model_load_from_file.restype = ctypes.c_void_p
    api.llama_init_from_model.argtypes = (ctypes.c_void_p, _ContextParams)
    api.llama_init_from_model.restype = ctypes.c_void_p
    api.llama_batch_init.restype = _Batch
    api.llama_decode.argtypes = (ctypes.c_void_p, _Batch)
    api.llama_get_logits_ith.argtypes = (ctypes.c_void_p, ctypes.c_int32)
    api.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    api.llama_model_get_vocab.argtypes, api.llama_model_get_vocab.restype = (ctypes.c_void_p,), ctypes.c_void_p
    api.llama_vocab_n_tokens.argtypes = (ctypes.c_void_p,)
    api.llama_backend_init()
    loaded = api.llama_model_load_from_file(str(model).encode(), api.llama_model_default_params())
    context = api.llama_init_from_model(loaded, settings)
    if not loaded or not context:
        raise SystemExit(f"{model}: llama.cpp could not open it")
    batch = api.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for place, token in enumerate(tokens):
        batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, place, 1
        batch.seq_id[place][0], batch.logits[place] = 0, 1
    if code := api.llama_decode(context, batch):
        raise SystemExit(f"{model}: llama.cpp refused the tokens with {code}")
    width = api.llama_vocab_n_tokens(api.llama_model_get_vocab(loaded))
    return np.stack([np.ctypeslib.as_array(api.llama_get_logits_ith(context, i), (width,)) for i in range(len(tokens))])


def own_logits(model: Path, texts: list[list[int]]) -> list[NDArray[np.float32]]:
    import torch

    from edgekit.quant.reference_decoder import logits
    from edgekit.quant.shards import reader

    source = open_source(model, need_weights=True)
    with torch.inference_mode(), open_tensors(source.weights) as tensors:
        read = reader(tensors, source.spec)
        return [logits(source.spec, read, tokens).numpy() for tokens in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=256, help="of held-out code, and as many of prose; at most 512")
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        tokens, out = options.child
        np.save(out, llama_logits(options.library, options.model, json.loads(tokens.read_text())))
        return
    codec = read_codec(open_source(options.model).folder)
    words = [(HELD_OUT / f"{kind}.txt").read_text() for kind in KINDS]
    texts = [codec.encode(text, add_special_tokens=True)[: options.tokens] for text in words]
    with tempfile.TemporaryDirectory() as folder:
        float32 = Path(folder) / options.model.name
        write_float32(options.model, float32)
        theirs = [asked(options.library, float32, tokens, Path(folder)) for tokens in texts]
    ours = own_logits(options.model, texts)
    for kind, tokens, expected, found in zip(KINDS, texts, theirs, ours, strict=True):
        distance = divergence_of([Pair(tuple(tokens), expected, found)])
        row: dict[str, Any] = {"model": options.model.name, "text": kind}
        kept = ("tokens", "kl_mean", "kl_max", "same_top")
        print(json.dumps(row | {name: getattr(distance, name) for name in kept}), flush=True)


def asked(library: Path, model: Path, tokens: list[int], folder: Path) -> NDArray[np.float32]:
    (folder / "tokens.json").write_text(json.dumps(tokens))
    command = [sys.executable, "-m", "examples.benchmarks.gguf_against_llama", str(model), "--library", str(library)]
    command += ["--child", str(folder / "tokens.json"), str(folder / "logits.npy")]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    logits: NDArray[np.float32] = np.load(folder / "logits.npy")
    return logits


if __name__ == "__main__":
    main()
