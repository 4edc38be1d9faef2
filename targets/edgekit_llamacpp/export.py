"""Writes the files of an artifact: one GGUF file with its tokenizer inside, and a Modelfile for Ollama.

Needs no llama.cpp, except for its own formats. Tensors are streamed, so memory does not grow with the model.
"""

from __future__ import annotations

from pathlib import Path

from edgekit.common.files import write_file
from edgekit.common.footprint import return_unused
from edgekit.common.progress import Progress
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.formats.gguf_writer import MetadataValue, write_gguf
from edgekit.quant.neutral_gguf import model_metadata, written_tensors
from edgekit.quant.source_files import copy_companions
from edgekit_llamacpp.layout import MODELFILE, WEIGHTS
from edgekit_llamacpp.native import quantiser_of
from edgekit_llamacpp.tokens import stop_texts, tokenizer_metadata

_QUANTISATION = 2  # of GGUF: the layout of blocks since 2023


def export(plan: Plan, weights: NeutralWeights, out: Path, progress: Progress) -> None:
    """Write the artifact's files into the empty directory `out`."""
    own = quantiser_of(weights, progress) if plan.recipe.is_native() else None
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
