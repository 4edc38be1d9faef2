"""Opens the files of an artifact: audits every graph, and opens sessions, on packed weights if they can be kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.common.content_store import Hold
from edgekit.common.free_memory import free_memory
from edgekit.common.packed_weights import PACKING_SHARE, PackedFolder, packed_weights
from edgekit.common.units import show_bytes
from edgekit.contracts.manifest import MANIFEST
from edgekit.contracts.plan import Plan
from edgekit.contracts.stored_weights import stored_weight_bytes
from edgekit.errors import DoesNotFit
from edgekit_onnx.audit import CheckedGraph, audit
from edgekit_onnx.data_file import DATA_FILE
from edgekit_onnx.device_kv_arena import DeviceArray, DeviceKVArena, HostArray
from edgekit_onnx.float16_kv import BITS as HALF_BITS, halves_of
from edgekit_onnx.kv_arena import KVArena, LayerShape, MappedKVArena
from edgekit_onnx.layout import COPIED_SHARE, GraphPart, parts_of
from edgekit_onnx.memory import packed_share
from edgekit_onnx.packed_products import pack_products
from edgekit_onnx.pages import forget_pages
from edgekit_onnx.prepacking import pack_apart, refuse_short
from edgekit_onnx.product_kernels import VERSION, ProductKernels, product_kernels, rows_are_alone, with_kernels
from edgekit_onnx.sessions import Provider, arithmetic, open_graph, options

_UNSEALED = "not sealed yet, so its packed weights are not kept; weights are copied instead"


class Graphs(NamedTuple):
    """The exported graphs of the body, which can be changed before they are opened."""

    plan: Plan
    provider: Provider
    folder: Path
    graphs: tuple[CheckedGraph, ...]
    packs: bool
    hold: Hold | None  # keeps packed graphs in the cache; None where these are the exported ones
    kernels: ProductKernels | None  # compute products in place of onnxruntime's

    def open(
        self, change: Callable[[bytes], bytes] | None = None, *, in_order: bool = False, halves: bool = False
    ) -> tuple[tuple[GraphPart, Any], ...]:
        """Open a session for every part, of the graph that `change` derives from its own.

        `halves` opens the graphs that are derived already for a cache of 16 bits.

        `in_order` runs each node as soon as its inputs are there, so that what only outputs need is not kept.
        """
        sessions = []
        for name, given in self.graphs:
            data = (self.folder / halves_of(name)).read_bytes() if halves else change(given) if change else given
            chosen = options(self.plan.threads, self.packs, in_order=in_order, kernels=self.kernels)
            sessions.append(open_graph(self.folder, data, self.provider, chosen))
        if self.hold:
            # onnxruntime read the original weights while opening; running needs only the packed ones.
            forget_pages(self.folder)
        return tuple(zip(parts_of(self.plan), sessions, strict=True))

    def bound(self, array: NDArray[Any]) -> Any:
        """A copy of an array on the provider's device, which owns its memory."""
        import onnxruntime

        return onnxruntime.OrtValue.ortvalue_from_numpy(array, self.provider.device, 0)


class AuditedArtifact(NamedTuple):
    """An audited artifact: the session of its head, and the graphs of its body to be opened."""

    head: Any
    graphs: Graphs
    numbers: np.dtype[Any]  # of activations
    key: str  # a hash of the artifact's bytes
    note: str
    rows_are_alone: bool  # no row of a call changes a bit of another row's results
    on_device: bool
    device: str
    copied_share: float  # private bytes per byte of weights, 0 where they are mapped

    def kv_arena(
        self,
        layers: Sequence[LayerShape],
        slots: int,
        capacity: int,
        dtype: np.dtype[Any],
        recurrent: Sequence[tuple[int, ...]],
    ) -> KVArena:
        """Memory for keys and values, on the provider's device, and for recurrent parts."""
        if self.on_device:
            return DeviceKVArena(layers, slots, capacity, dtype, self.device)
        return MappedKVArena(layers, slots, capacity, dtype, recurrent)

    def array(self, rows: int, width: int) -> DeviceArray | HostArray:
        """Memory for hidden states, on the provider's device."""
        if self.on_device:
            return DeviceArray(rows, width, self.numbers, self.device)
        return HostArray(rows, width, self.numbers)


def load(plan: Plan, files: Path, provider: Provider, *, packs: bool = True) -> AuditedArtifact:
    """Audit every graph that the plan names, and open the head on `provider`.

    Without `packs`, weights are used as the file holds them: slower, and nothing is copied.
    """
    graphs = audit(plan, files)
    manifest = files / MANIFEST
    sealed = manifest.read_bytes() if manifest.exists() else b""
    key = _hash(sealed, graphs)
    kernels = product_kernels() if packs and plan.backend == "cpu" else None
    packed = _packed(plan, files, graphs, sealed, kernels) if packs else PackedFolder(None)
    is_copied = packs and plan.backend == "cpu" and packed.folder is None
    if is_copied:
        _check_memory(plan, packed.note)
    if packed.folder is not None:
        graphs = [CheckedGraph(name, (packed.folder / f"{name}.onnx").read_bytes()) for name, _ in graphs]
    elif kernels:
        graphs = [graph._replace(data=with_kernels(graph.data, gated=not plan.adapter_rank)) for graph in graphs]
    folder, chosen = packed.folder or files, options(plan.threads, packs, kernels=kernels)
    return AuditedArtifact(
        head=open_graph(folder, graphs[-1].data, provider, chosen),
        graphs=Graphs(plan, provider, folder, tuple(graphs[:-1]), packs, packed.hold, kernels),
        numbers=np.dtype(np.float16 if plan.backend == "cuda" else np.float32),
        key=key,
        note=packed.note,
        rows_are_alone=kernels is not None and all(rows_are_alone(graph.data) for graph in graphs),
        on_device=plan.backend != "cpu",
        device=provider.device,
        copied_share=COPIED_SHARE if is_copied else 0.0,
    )


def _check_memory(plan: Plan, note: str) -> None:
    """Raise `DoesNotFit` if copies of the weights would not fit: the system would kill the app."""
    needed = int(stored_weight_bytes(plan.model, plan.recipe, plan.memory) * COPIED_SHARE)
    free = free_memory()
    if free is not None and free.bytes < needed:
        raise DoesNotFit(
            f"onnx: {note}; the copies take {show_bytes(needed)} of private memory and {show_bytes(free.bytes)} are "
            f"free ({free.source}); open it once with more memory, or a smaller model or recipe"
        )


def _packed(
    plan: Plan, files: Path, graphs: Sequence[CheckedGraph], sealed: bytes, kernels: ProductKernels | None
) -> PackedFolder:
    if plan.backend != "cpu":
        return PackedFolder(None)
    if not sealed:
        return PackedFolder(None, _UNSEALED)

    # Only what is packed: an artifact that is exported again, which measures anew, finds what the first one packed.
    data = json.loads(sealed)["files"][DATA_FILE]["sha256"]
    bits = plan.storage.kv_bits
    derived = " with graphs for 16 bits" if bits == HALF_BITS else ""

    def save(folder: Path) -> None:
        if kernels:
            pack_products(files, bits, graphs, folder, gated=not plan.adapter_rank)
        else:
            pack_apart(files, plan.threads, bits, graphs, folder)
        for graph in folder.glob("*.onnx"):
            refuse_short(graph)
        (folder / "model.txt").write_text(f"{plan.model.name} {plan.recipe.name}")  # for `edgekit store ls`

    own = kernels is not None
    how = f"{VERSION}, {'apart' if plan.adapter_rank else 'gated'}" if own else plan.threads  # adapters: apart
    key = _hash(f"{data} {how}{derived} {arithmetic()}".encode(), graphs)
    weights = (files / DATA_FILE).stat().st_size
    return packed_weights(key, weights, packed_share(own), 0.0 if own else PACKING_SHARE, save)


def _hash(first: bytes, graphs: Sequence[CheckedGraph]) -> str:
    digest = hashlib.sha256(first)
    for graph in graphs:
        digest.update(graph.data)
    return digest.hexdigest()
