"""Opens the files of an artifact: audited, then each graph as a session, with packed weights where they can be kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.artifact import MANIFEST
from edgekit.errors import TargetFailed
from edgekit.plan import Plan
from edgekit_onnx.audit import Checked, audit
from edgekit_onnx.data_file import DATA_FILE
from edgekit_onnx.device_memory import DeviceArray, DeviceSlab, HostArray
from edgekit_onnx.packed import Packed, align, answer, find_or_make, saving
from edgekit_onnx.pages import forget_pages
from edgekit_onnx.parts import Part, parts_of
from edgekit_onnx.sessions import Provider, open_session, options
from edgekit_onnx.slab import LayerShape, MappedSlab, Slab

_UNSEALED = "not sealed yet, so its packed weights are not kept"


class Graphs(NamedTuple):
    """The body's graphs, to be opened as they are or with something added."""

    plan: Plan
    provider: Provider
    folder: Path
    names: tuple[str, ...]
    audited: tuple[bytes, ...]  # none where they are opened from packed files
    packs: bool

    @property
    def shares_weights(self) -> bool:
        """Whether a second session maps the same bytes as the first."""
        return not self.audited

    @property
    def weight_bytes(self) -> int:
        return (self.folder / DATA_FILE).stat().st_size

    def read(self) -> list[bytes]:
        return list(self.audited) or [(self.folder / f"{name}.onnx").read_bytes() for name in self.names]

    def open(self, change: Callable[[bytes], bytes] | None = None) -> tuple[tuple[Part, Any], ...]:
        """A session of every part, with the graph that `change` makes of its own."""
        sessions = [
            _open_beside(
                self.folder, change(data) if change else data, self.provider, options(self.plan.threads, self.packs)
            )
            for data in self.read()
        ]
        if not self.audited:
            forget_pages(self.folder)  # onnxruntime looked at the originals; running needs only what is packed
        return tuple(zip(parts_of(self.plan), sessions, strict=True))

    def bound(self, array: NDArray[Any]) -> Any:
        """The values where the provider computes, in memory that they keep alive themselves."""
        import onnxruntime

        return onnxruntime.OrtValue.ortvalue_from_numpy(array, self.provider.device, 0)


class Loaded(NamedTuple):
    """An artifact that can be run, and what the engine needs to know of it."""

    head: Any
    graphs: Graphs
    numbers: np.dtype[Any]
    key: str  # the same for the same bytes
    note: str
    on_device: bool
    device: str

    def slab(self, layers: Sequence[LayerShape], rows: int, capacity: int, dtype: np.dtype[Any]) -> Slab:
        """Memory for keys and values, where the provider computes."""
        if self.on_device:
            return DeviceSlab(layers, rows, capacity, dtype, self.device)
        return MappedSlab(layers, rows, capacity, dtype)

    def array(self, rows: int, width: int) -> DeviceArray | HostArray:
        """Memory for hidden states, there too."""
        return (
            DeviceArray(rows, width, self.numbers, self.device)
            if self.on_device
            else HostArray(rows, width, self.numbers)
        )


def load(plan: Plan, files: Path, provider: Provider, *, packs: bool = True) -> Loaded:
    """Audit every graph that the plan names, and open the head on that provider.

    Without `packs`, weights are used as they lie in the file: slower, and nothing is copied.
    """
    graphs = audit(plan, files)
    key = _key(files, graphs)
    packed = _packed(plan, files, graphs, provider) if packs else Packed(None)
    chosen, head = options(plan.threads, packs), graphs[-1]
    if packed.folder is not None:
        opened = open_session(packed.folder / f"{head.name}.onnx", provider, chosen)
    else:
        opened = _open_plain(files, head, provider, chosen)
    return Loaded(
        head=opened,
        graphs=Graphs(
            plan,
            provider,
            packed.folder or files,
            tuple(graph.name for graph in graphs[:-1]),
            () if packed.folder is not None else tuple(graph.data for graph in graphs[:-1]),
            packs,
        ),
        numbers=np.dtype(np.float16 if plan.backend == "cuda" else np.float32),
        key=key,
        note=packed.note,
        on_device=plan.backend != "cpu",
        device=provider.device,
    )


def _packed(plan: Plan, files: Path, graphs: Sequence[Checked], provider: Provider) -> Packed:
    if plan.backend != "cpu":
        return Packed(None)
    if not (files / MANIFEST).exists():
        return Packed(None, _UNSEALED)

    def save(graph: Checked, folder: Path) -> None:
        plain = answer(_open_plain(files, graph, provider, saving(options(plan.threads), folder, graph.name)))
        align(folder / f"{graph.name}.onnx")
        saved = answer(open_session(folder / f"{graph.name}.onnx", provider, options(plan.threads)))
        if not np.array_equal(plain, saved):
            raise TargetFailed(f"onnx: {graph.name} answers differently once it is packed")

    return find_or_make(_key(files, graphs), graphs, files, save)


def _open_plain(files: Path, graph: Checked, provider: Provider, chosen: Any) -> Any:
    """The very bytes that were audited; their weights come from the artifact's folder."""
    return _open_beside(files, graph.data, provider, chosen)


def _open_beside(folder: Path, data: bytes, provider: Provider, chosen: Any) -> Any:
    chosen.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    return open_session(data, provider, chosen)


def _key(files: Path, graphs: Sequence[Checked]) -> str:
    """The artifact's hash; before it is sealed, that of its graphs."""
    manifest = files / MANIFEST
    digest = hashlib.sha256(manifest.read_bytes() if manifest.exists() else b"")
    for graph in graphs:
        digest.update(graph.data)
    return digest.hexdigest()
