"""The devices that the opened library can compute with, and how many of a plan's layers run on a GPU here."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from edgekit.common.units import show_bytes
from edgekit.contracts.plan import Plan
from edgekit_llamacpp.library import Library

_KINDS = ("CPU", "GPU", "GPU in host memory", "accelerator next to the CPU")  # GGML_BACKEND_DEVICE_TYPE_*
_GPUS = (1, 2)
_BACKENDS = {"cuda": "CUDA", "metal": "MTL", "vulkan": "Vulkan"}  # backend of a plan → how its devices are named
NEVER_RUN = "layers on it were never run by us"


class LibraryDevice(NamedTuple):
    """One device as the library describes it."""

    pointer: int
    kind: int
    name: str  # e.g. Vulkan0
    description: str
    free_bytes: int
    total_bytes: int

    @property
    def is_gpu(self) -> bool:
        return self.kind in _GPUS

    def describe(self) -> str:
        """One line: name, processor, kind and, of a GPU, its memory."""
        kind = _KINDS[self.kind] if self.kind < len(_KINDS) else "another kind"
        holds = f", {show_bytes(self.free_bytes)} of {show_bytes(self.total_bytes)} free" if self.is_gpu else ""
        return f"{self.name} ({self.description}; {kind}{holds})"


def devices_of(library: Library) -> list[LibraryDevice]:
    """Return every device of the library, in its order."""
    found = []
    for index in range(int(library.ggml_backend_dev_count())):
        pointer = library.ggml_backend_dev_get(index)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        library.ggml_backend_dev_memory(pointer, ctypes.byref(free), ctypes.byref(total))
        name, description = (
            (ask(pointer) or b"").decode(errors="replace")
            for ask in (library.ggml_backend_dev_name, library.ggml_backend_dev_description)
        )
        kind = int(library.ggml_backend_dev_type(pointer))
        found.append(LibraryDevice(int(pointer), kind, name, description.strip(), free.value, total.value))
    return found


def gpu_for(library: Library, backend: str) -> LibraryDevice | None:
    """Return the GPU to use: one of the planned backend, else the library's first; None if it has none."""
    if not library.llama_supports_gpu_offload():
        return None
    gpus = [device for device in devices_of(library) if device.is_gpu]
    planned = [device for device in gpus if device.name.startswith(_BACKENDS.get(backend, backend))]
    return next(iter([*planned, *gpus]), None)


def on_this_machine(library: Library, plan: Plan) -> tuple[Plan, LibraryDevice | None, str]:
    """Return the plan with the layers that run on a GPU here, that GPU, and a note where that differs or is untried."""
    if not plan.gpu_layers:
        return plan, None, ""
    gpu = gpu_for(library, plan.backend)
    if gpu is None:
        note = (
            f"{plan.gpu_layers} layers were planned on a GPU, and {library.version} knows none here: all run on the CPU"
        )
        return plan.model_copy(update={"gpu_layers": 0}), None, note
    # The detected device decides where its layers lie, not the device that the profile named.
    kind = "mapped" if gpu.name.startswith(_BACKENDS["metal"]) else "own" if gpu.kind == _GPUS[0] else "shared"
    plan = plan.model_copy(update={"memory": plan.memory.model_copy(update={"gpu_memory": kind})})
    return plan, gpu, f"{plan.gpu_layers} layers run on {gpu.describe()}; {NEVER_RUN}"


def described(library: Library) -> list[str]:
    """Describe every device of the library, and say of GPUs that they were never tried."""
    found = devices_of(library)
    gpus = any(device.is_gpu for device in found) and library.llama_supports_gpu_offload()
    return [*(device.describe() for device in found), NEVER_RUN if gpus else "no GPU"]
