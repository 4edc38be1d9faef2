"""Opens graphs with onnxruntime, with the plan's threads, on the requested provider or not at all."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from edgekit.enginekit.spinning import spin_us
from edgekit.errors import TargetFailed, TargetMissing, vendor_errors
from edgekit_onnx.product_kernels import ProductKernels


class Provider(NamedTuple):
    """An execution provider of onnxruntime, and the device of its memory."""

    name: str
    device: str


PROVIDERS = {"cpu": Provider("CPUExecutionProvider", "cpu"), "cuda": Provider("CUDAExecutionProvider", "cuda")}


def arithmetic(kernels: ProductKernels | None = None) -> str:
    """Return onnxruntime's version and the kernels in use, for which exactness and packed weights are valid."""
    import onnxruntime

    return f"{onnxruntime.__version__}{kernels.sha256 if kernels else ''}"


def options(threads: int, packs: bool = True, *, in_order: bool = False, kernels: ProductKernels | None = None) -> Any:
    """Return the session options of every graph."""
    import onnxruntime

    chosen = onnxruntime.SessionOptions()
    chosen.intra_op_num_threads = threads
    chosen.inter_op_num_threads = 1
    chosen.log_severity_level = 3
    if kernels:
        chosen.register_custom_ops_library(str(kernels.library))
    if in_order:
        chosen.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    # One arena for all sessions stores the activations of the largest chunk once. With malloc they took four times as
    # much, and a memory pattern would store them a second time.
    _share_activations()
    chosen.enable_cpu_mem_arena = True
    chosen.enable_mem_pattern = False
    chosen.add_session_config_entry("session.use_env_allocators", "1")
    if not packs:
        chosen.add_session_config_entry("session.disable_prepacking", "1")
    chosen.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    # Arm's kernels for 4-bit weights round activations more coarsely: seven times the KL, and results depend on chunks.
    chosen.add_session_config_entry("mlas.disable_kleidiai", "1")
    # Spin long enough for the gap between two operators, but stop with the call, or one session starves the next.
    spins_for = spin_us()
    chosen.add_session_config_entry("session.intra_op.allow_spinning", str(int(spins_for > 0)))
    if spins_for:
        chosen.add_session_config_entry("session.intra_op.spin_duration_us", str(spins_for))
        chosen.add_session_config_entry("session.force_spinning_stop", "1")
    return chosen


class CallOptions:
    """The options of an engine's calls: to keep the arena of activations, or to return its unused memory."""

    def __init__(self, device: str) -> None:
        import onnxruntime

        self.usual, self.giving_back = onnxruntime.RunOptions(), onnxruntime.RunOptions()
        if device == "cpu":
            self.giving_back.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def terminate(self) -> None:
        """End running calls before their next operator, and later ones at once. Safe from any thread."""
        self.usual.terminate = self.giving_back.terminate = True


@cache
def _share_activations() -> None:
    """Register one arena for all sessions of the process, which grows by the requested sizes."""
    import onnxruntime

    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    as_requested = onnxruntime.OrtArenaCfg({"arena_extend_strategy": 1, "initial_chunk_size_bytes": 1 << 20})
    with suppress(Exception):  # the process already has one, which these sessions then use
        onnxruntime.create_and_register_allocator(memory, as_requested)


def open_session(graph: Path | bytes, provider: Provider, chosen: Any) -> Any:
    """Open a session on `provider`. Raises `TargetFailed` where onnxruntime falls back to the CPU, silently or not."""
    import onnxruntime

    if provider.name not in onnxruntime.get_available_providers():
        raise TargetMissing(
            f"onnx: this onnxruntime has no {provider.name}, only {', '.join(onnxruntime.get_available_providers())}; "
            "pip uninstall onnxruntime, then pip install 'edgekit[cuda]'"
        )
    source = graph if isinstance(graph, bytes) else str(graph)
    with vendor_errors("onnx"):
        session = onnxruntime.InferenceSession(source, chosen, providers=_with_fallback(provider), enable_fallback=0)
    if provider.name not in session.get_providers():
        raise TargetFailed(
            f"onnx: {provider.name} did not start and onnxruntime fell back to {', '.join(session.get_providers())}; "
            "check the driver and the CUDA and cuDNN libraries with `edgekit doctor`"
        )
    return session


def open_graph(folder: Path, data: bytes, provider: Provider, chosen: Any) -> Any:
    """Open a graph from its bytes, with weights in `folder`."""
    chosen.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    return open_session(data, provider, chosen)


def _with_fallback(provider: Provider) -> list[Any]:
    """Allow CUDA, and the CPU for operators that only shape tensors; the caller checks that CUDA started."""
    if provider.device == "cpu":
        return [provider.name]
    return [(provider.name, {"arena_extend_strategy": "kSameAsRequested"}), PROVIDERS["cpu"].name]
