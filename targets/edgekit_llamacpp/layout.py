"""The files of an artifact, and the check that its GGUF file is the planned one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from edgekit.common.base import Frozen
from edgekit.common.bounds import Sha256
from edgekit.common.files import file_sha256
from edgekit.common.machine_facts import read_fact, write_fact
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import AS_IS
from edgekit.errors import DamagedArtifact, EdgekitError, quote_short
from edgekit.formats.gguf import GgufFile
from edgekit.model.source import open_source
from edgekit.quant import neutral_gguf
from edgekit.quant.neutral_gguf import model_metadata, stored_types
from edgekit.quant.own_integers import as_is

WEIGHTS, MODELFILE = "model.gguf", "Modelfile"
NO_TOKENIZER = "model.gguf holds no tokenizer, because llama.cpp has none that is equal: other programs cannot open it"
_FACT = "checked-gguf"
_OWN_KEYS = ("tokenizer.ggml.", "tokenizer.chat_template", "general.quantization_version", "general.file_type")


class CheckedFile(Frozen):
    """The file and the plan that `stamp` stands for passed the check. Other programs need a tokenizer in the file."""

    stamp: Sha256
    has_tokenizer: bool


def check_file_once(plan: Plan, path: Path, identity: str | None) -> bool:
    """Check a file as `check_file` does, unless an earlier opening has: walking the texts of a vocabulary takes time.

    `identity`: the hash of the artifact, with which its bytes were compared before; None: it is not sealed.
    """
    if identity is None:
        return check_file(plan, path)
    info = path.stat()
    rules = " ".join(file_sha256(Path(each)) for each in (__file__, neutral_gguf.__file__))
    asked = f"{plan.context} {plan.model.model_dump_json()} {plan.recipe.model_dump_json()}"
    place = f"{info.st_dev} {info.st_ino} {info.st_size} {info.st_mtime_ns} {info.st_ctime_ns}"
    stamp = hashlib.sha256(f"{rules} {place} {asked}".encode()).hexdigest()
    known = read_fact(identity, _FACT, CheckedFile)
    if known is None or known.stamp != stamp:
        known = CheckedFile(stamp=stamp, has_tokenizer=check_file(plan, path))
        write_fact(identity, _FACT, known)
    return known.has_tokenizer


def check_file(plan: Plan, path: Path) -> bool:
    """Raise DamagedArtifact unless the file has exactly the planned keys and tensors; return if it has a tokenizer.

    llama.cpp trusts what it reads, so the header of every file is compared first.
    """
    try:
        with GgufFile.open(path) as file:
            metadata = dict(file.metadata)
            has_tokenizer = metadata.get("tokenizer.ggml.model") != "none"
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
    if plan.recipe.name == AS_IS:
        raise _damaged(path, "is an artifact's file, and the plan is of another tool's")
    for name, (kind, shape) in stored_types(plan.model, plan.recipe, plan.context).items():
        stored_as = found.pop(name, None)
        if stored_as != (kind, shape):
            actual = "is missing" if stored_as is None else f"is {stored_as[0]} {list(stored_as[1])}"
            raise _damaged(path, f"tensor {name} {actual}, expected {kind} {list(shape)}")
    if found:
        raise _damaged(path, f"tensor {quote_short(next(iter(found)))} belongs to no plan")
    return has_tokenizer


def check_as_is(plan: Plan, path: Path) -> bool:
    """Raise DamagedArtifact unless a file of another tool still describes the planned model; return True."""
    source = open_source(path)
    if source.spec != plan.model or as_is(source) != plan.recipe:
        raise DamagedArtifact(f"{path}: was changed since it was planned; open it again")
    return True


def _damaged(path: Path, what: str) -> DamagedArtifact:
    return DamagedArtifact(f"{path}: {what}; export the artifact again")
