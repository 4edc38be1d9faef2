"""Opens the files of an artifact: audited, then each graph as a session, with packed weights where they can be kept."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgekit.artifact import MANIFEST
from edgekit.plan import Plan
from edgekit_onnx.audit import Checked, audit
from edgekit_onnx.packed import Packed, find_or_make, saving
from edgekit_onnx.parts import Part, parts_of
from edgekit_onnx.sessions import open_session, options
from edgekit_onnx.slab import LayerShape, MappedSlab, Slab

_UNSEALED = "not sealed yet, so its packed weights are not kept"


class Loaded(NamedTuple):
    """The sessions of an artifact, and what the engine needs to know of them."""

    bodies: tuple[tuple[Part, Any], ...]
    head: Any
    numbers: np.dtype[Any]
    key: str  # the same for the same bytes
    note: str

    def slab(self, layers: Sequence[LayerShape], rows: int, capacity: int, dtype: np.dtype[Any]) -> Slab:
        """Memory for keys and values, where the provider computes."""
        return MappedSlab(layers, rows, capacity, dtype)


def load(plan: Plan, files: Path) -> Loaded:
    """Open every graph that the plan names."""
    graphs = audit(plan, files)
    key = _key(files, graphs)
    packed = _packed(plan, files, graphs)
    sessions = []
    for graph in graphs:
        chosen = options(plan.threads)
        if packed.folder is not None:
            sessions.append(open_session(packed.folder / f"{graph.name}.onnx", plan.backend, chosen))
        else:
            sessions.append(_open_plain(plan, files, graph, chosen))
    numbers = np.dtype(np.float16 if plan.backend == "cuda" else np.float32)
    bodies = tuple(zip(parts_of(plan), sessions[:-1], strict=True))
    return Loaded(bodies, sessions[-1], numbers, key, packed.note)


def _packed(plan: Plan, files: Path, graphs: Sequence[Checked]) -> Packed:
    if plan.backend != "cpu":
        return Packed(None)
    if not (files / MANIFEST).exists():
        return Packed(None, _UNSEALED)

    def open_and_save(graph: Checked, folder: Path) -> None:
        _open_plain(plan, files, graph, saving(options(plan.threads), folder, graph.name))

    return find_or_make(_key(files, graphs), graphs, files, open_and_save)


def _open_plain(plan: Plan, files: Path, graph: Checked, chosen: Any) -> Any:
    """The very bytes that were audited; their weights come from the artifact's folder."""
    chosen.add_session_config_entry("session.model_external_initializers_file_folder_path", str(files.resolve()))
    return open_session(graph.data, plan.backend, chosen)


def _key(files: Path, graphs: Sequence[Checked]) -> str:
    """The artifact's hash; before it is sealed, that of its graphs."""
    manifest = files / MANIFEST
    digest = hashlib.sha256(manifest.read_bytes() if manifest.exists() else b"")
    for graph in graphs:
        digest.update(graph.data)
    return digest.hexdigest()
