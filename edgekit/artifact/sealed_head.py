"""Writes an EAGLE-3 drafting head beside a model in the layout of `speculators`.

Sealed with an artifact it is in float32, as the drafter runs it, with the target's embedding; for servers as published.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgekit.common.files import write_file
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.errors import DamagedArtifact, InvalidInput
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.model.eagle3 import CONFIG, EMBEDDING, Eagle3Weights, read_eagle3
from edgekit.model.spec import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    EmbeddingRows = tuple[str, Callable[[slice], NDArray[Any]]]  # its type, and a function that returns rows

HEAD_FOLDER = "drafter"
_ROWS = 4096  # rows of the embedding per copy


def seal_head(plan: Plan, weights: NeutralWeights, staging: Path) -> Plan:
    """Write the plan's head into `staging`; return the plan with the sealed head's spec."""
    if plan.drafter is None or plan.drafter_source is None:
        return plan
    head = read_eagle3(Path(plan.drafter_source), plan.model)
    try:
        if head.spec != plan.drafter:
            raise InvalidInput(f"{plan.drafter_source}: is not the head that was planned; plan again")
        table = f"{plan.model.prefix}embed_tokens"
        embedding = _own_embedding(head) or ("F16", lambda part: weights.dequantised(table, part).astype(np.float16))
        folder = staging / HEAD_FOLDER
        folder.mkdir()
        _write(head, plan.model, folder, embedding)
    finally:
        head.close()
    sealed = read_eagle3(folder, plan.model)
    sealed.close()
    return plan.model_copy(update={"drafter": sealed.spec})


def hand_over_head(source: Path, model: ModelSpec, folder: Path) -> None:
    """Write the head in `source` into the new folder `folder`, its tensors in the types in which they are published.

    Servers use the model's embedding for a head that has none.
    """
    head = read_eagle3(source, model)
    try:
        folder.mkdir()
        _write(head, model, folder, _own_embedding(head), as_published=True)
    finally:
        head.close()


def open_head(plan: Plan, artifact: Path) -> Eagle3Weights:
    """Open the sealed head of the artifact in folder `artifact`. Raises `DamagedArtifact`."""
    head = read_eagle3(artifact / HEAD_FOLDER, plan.model)
    if head.spec != plan.drafter:
        head.close()
        raise DamagedArtifact(f"{artifact / HEAD_FOLDER}: is not the head of the artifact's plan; export it again")
    return head


def _own_embedding(head: Eagle3Weights) -> EmbeddingRows | None:
    if not head.spec.own_embedding:
        return None
    name = head.stored[EMBEDDING]
    return head.tensors.entry(name).dtype, lambda part: head.tensors.array(name, part)


def _config(head: Eagle3Weights, model: ModelSpec) -> dict[str, Any]:
    spec = head.spec
    return {
        "architectures": ["Eagle3Speculator"],
        "model_type": "eagle3",
        "speculators_model_type": "eagle3",
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": spec.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(spec.hidden_layers),
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.norm_output,
        "transformer_layer_config": head.layer_config,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": model.name, "architectures": []},
        },
    }


def _write(
    head: Eagle3Weights,
    model: ModelSpec,
    folder: Path,
    embedding: EmbeddingRows | None,
    *,
    as_published: bool = False,
) -> None:
    """Write config and tensors."""
    write_file(folder / CONFIG, json.dumps(_config(head, model), indent=1).encode())
    spec, vocabulary = head.spec, head.spec.layer.vocab_size
    count = spec.draft_vocab_size
    kinds = {name: head.tensors.entry(head.stored[name]).dtype if as_published else "F32" for name, _ in spec.tensors()}
    layout: dict[str, tuple[str, tuple[int, ...]]] = {name: (kinds[name], shape) for name, shape in spec.tensors()}
    if embedding is not None:
        layout[EMBEDDING] = (embedding[0], (vocabulary, spec.layer.hidden_size))
    layout |= {"d2t": ("I64", (count,)), "t2d": ("BOOL", (vocabulary,))}
    with TensorWriter(folder / "model.safetensors", layout) as writer:
        for name, _ in spec.tensors():
            writer.write(name, head.tensors.array(head.stored[name]) if as_published else head.floats(name))
        if embedding is not None:
            for start in range(0, vocabulary, _ROWS):
                writer.write(EMBEDDING, embedding[1](slice(start, min(start + _ROWS, vocabulary))), start)
        writer.write("d2t", head.targets - np.arange(count))
        writer.write("t2d", np.isin(np.arange(vocabulary), head.targets))
        writer.seal()
