"""The files of an artifact, and the check that its GGUF file is the planned one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgekit.contracts.plan import Plan
from edgekit.errors import DamagedArtifact, EdgekitError, quote_short
from edgekit.formats.gguf import GgufFile
from edgekit.quant.neutral_gguf import model_metadata, stored_types

WEIGHTS, MODELFILE = "model.gguf", "Modelfile"
NO_TOKENIZER = "model.gguf holds no tokenizer, because llama.cpp has none that is equal: other programs cannot open it"
_OWN_KEYS = ("tokenizer.ggml.", "tokenizer.chat_template", "general.quantization_version")


def has_tokenizer(path: Path) -> bool:
    """Return True if the file holds its tokenizer, so that other programs can open it."""
    with GgufFile.open(path) as file:
        return file.metadata.get("tokenizer.ggml.model") != "none"


def check_file(plan: Plan, path: Path) -> None:
    """Raise DamagedArtifact unless the file has exactly the planned keys and tensors.

    llama.cpp trusts what it reads, so the header of every file is compared first.
    """
    try:
        with GgufFile.open(path) as file:
            metadata = dict(file.metadata)
            found = {name: (tensor.type_name, tensor.shape) for name, tensor in file.tensors.items()}
    except EdgekitError as error:
        raise DamagedArtifact(f"{error}; export the artifact again") from error
    for key, value in model_metadata(plan.model, plan.context).items():
        wanted = float(str(np.float32(value))) if isinstance(value, float) else value
        stored = metadata.pop(key, None)
        if type(stored) is not type(wanted) or stored != wanted:
            raise _damaged(path, f"{key} is {quote_short(stored)}, and the plan says {quote_short(wanted)}")
    for key in metadata:
        if not key.startswith(_OWN_KEYS):
            raise _damaged(path, f"the key {quote_short(key)} belongs to no plan")
    for name, (kind, shape) in stored_types(plan.model, plan.recipe, plan.context).items():
        stored_as = found.pop(name, None)
        if stored_as != (kind, shape):
            actual = "is missing" if stored_as is None else f"is {stored_as[0]} {list(stored_as[1])}"
            raise _damaged(path, f"tensor {name} {actual}, expected {kind} {list(shape)}")
    if found:
        raise _damaged(path, f"tensor {quote_short(next(iter(found)))} belongs to no plan")


def _damaged(path: Path, what: str) -> DamagedArtifact:
    return DamagedArtifact(f"{path}: {what}; export the artifact again")
