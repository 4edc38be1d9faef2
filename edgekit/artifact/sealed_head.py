"""Writes a drafting head into a model's artifact, in one layout for all kinds, close to the one of `speculators`.

In an artifact the head is float32, as the drafter runs it, and includes tensors that it shares with the target: the
last norm if it reads normed hidden states, rows of the output head for an MTP part, and the embedding for an EAGLE-3
head if the target cannot look embeddings up. Tables of which few rows are read have 16 bits. EAGLE-3 heads are also
written for servers, as published.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgekit.artifact.artifact import HEAD_FOLDER
from edgekit.common.files import write_file
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.errors import InvalidInput
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.model.head_spec import HEAD, SEALED, TARGET_NORM, HeadSpec
from edgekit.model.heads import CONFIG, EMBEDDING, HeadWeights, read_head
from edgekit.model.spec import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    StoredRows = tuple[str, Callable[[slice], NDArray[Any]]]  # a tensor's type, and a function that returns rows

_ROWS = 4096  # rows per copy


def seal_head(plan: Plan, weights: NeutralWeights, staging: Path) -> Plan:
    """Write the plan's head into `staging`; return the plan with the sealed head's spec."""
    if plan.drafter is None or plan.drafter_source is None:
        return plan
    model = plan.model
    head = read_head(Path(plan.drafter_source), model)
    try:
        if head.spec.model_copy(update={"own_embedding": plan.drafter.own_embedding}) != plan.drafter:
            raise InvalidInput(f"{plan.drafter_source}: is not the head that was planned; plan again")
        targets = head.targets
        if targets is None:
            from edgekit.artifact.draft_vocabulary import draft_tokens  # a runtime that opens a head needs none of it

            targets = draft_tokens(weights.folder, model, head.spec.draft_vocab_size)
        shared = _shared(head, plan.drafter, model, weights, targets)
        folder = staging / HEAD_FOLDER
        folder.mkdir()
        _write(head, model, folder, targets, shared)
    finally:
        head.close()
    sealed = read_head(folder, model)
    sealed.close()
    return plan.model_copy(update={"drafter": sealed.spec})


def _shared(
    head: HeadWeights, planned: HeadSpec, model: ModelSpec, weights: NeutralWeights, tokens: NDArray[np.int64]
) -> dict[str, StoredRows]:
    """Return the tensors that a sealed head takes from the target, and an assistant's rows in the order of `tokens`."""
    shared: dict[str, StoredRows] = {}
    table, kind = f"{model.prefix}embed_tokens", head.spec.kind
    if planned.own_embedding and not head.spec.own_embedding:
        shared[EMBEDDING] = "F16", lambda part: weights.dequantised(table, part).astype(np.float16)
    if kind != "eagle3":
        norm = f"{model.prefix}{model.names.last_norm}.weight"
        shared[TARGET_NORM] = "F32", lambda part: weights.floats(norm, part)
    if kind == "mtp":
        module = table if model.tied else model.head
        shared[HEAD] = "F32", lambda part: weights.dequantised(module, tokens[part])
    elif kind == "assistant":
        stored = np.float16 if head.spec.clusters else np.float32
        shared[HEAD] = head.spec.head_type, lambda part: head.floats(HEAD, tokens[part]).astype(stored)
    return shared


def write_head(source: Path, model: ModelSpec, folder: Path) -> None:
    """Write the EAGLE-3 head in `source` for servers, into the new folder `folder`, in the types as published.

    Servers use the model's embedding for a head that has none.
    """
    head = read_head(source, model)
    try:
        assert head.targets is not None and head.spec.kind == "eagle3", "other heads are not handed over"
        folder.mkdir()
        _write(head, model, folder, head.targets, {}, as_published=True)
    finally:
        head.close()


def _config(head: HeadWeights, model: ModelSpec) -> dict[str, Any]:
    spec = head.spec
    sizes = {"draft_vocab_size": spec.draft_vocab_size, "transformer_layer_config": head.layer_config}
    if spec.kind == "mtp":
        return {SEALED: spec.kind, **sizes}
    if spec.kind == "assistant":
        return {
            SEALED: spec.kind,
            "draft_vocab_size": spec.draft_vocab_size,
            "text_config": head.layer_config,
            "backbone_hidden_size": spec.target_hidden_size,
            "use_ordered_embeddings": spec.clusters is not None,
            "num_centroids": spec.clusters,
            "centroid_intermediate_top_k": spec.active_clusters,
        }
    return {
        "architectures": ["Eagle3Speculator"],
        "model_type": "eagle3",
        "speculators_model_type": "eagle3",
        **sizes,
        "target_hidden_size": spec.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(spec.hidden_layers),
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.norm_output,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": model.name, "architectures": []},
        },
    }


def _write(
    head: HeadWeights,
    model: ModelSpec,
    folder: Path,
    targets: NDArray[np.int64],
    shared: Mapping[str, StoredRows],
    *,
    as_published: bool = False,
) -> None:
    """Write config and tensors; `shared` are the target's tensors."""
    write_file(folder / CONFIG, json.dumps(_config(head, model), indent=1).encode())
    spec, vocabulary = head.spec, head.spec.layer.vocab_size
    shapes = dict(spec.tensors())
    if spec.own_embedding or EMBEDDING in shared:
        shapes[EMBEDDING] = vocabulary, spec.layer.hidden_size
    rows = {name: shared.get(name) or _own(head, name, as_published or name == EMBEDDING) for name in shapes}
    layout = {name: (rows[name][0], shape) for name, shape in shapes.items()}
    layout |= {"d2t": ("I64", (len(targets),)), "t2d": ("BOOL", (vocabulary,))}
    with TensorWriter(folder / "model.safetensors", layout) as writer:
        for name, shape in shapes.items():
            for start in range(0, shape[0], _ROWS):
                writer.write(name, rows[name][1](slice(start, min(start + _ROWS, shape[0]))), start)
        writer.write("d2t", targets - np.arange(len(targets)))
        writer.write("t2d", np.isin(np.arange(vocabulary), targets))
        writer.seal()


def _own(head: HeadWeights, name: str, as_published: bool) -> StoredRows:
    """Return a tensor of the head's files, as published or in float32."""
    stored = head.stored[name]
    if as_published:
        return head.tensors.entry(stored).dtype, lambda part: head.tensors.array(stored, part)
    return "F32", lambda part: head.tensors.floats(stored, part)
