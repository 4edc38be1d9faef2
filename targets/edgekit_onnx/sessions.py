"""Opens the graphs of an artifact with plain onnxruntime: the right provider or an error, threads from the plan."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from edgekit.errors import InvalidInput, TargetFailed, TargetMissing, vendor_errors

SPINNING = "idle threads spin between operators, as EDGEKIT_SPIN=on says"


class Provider(NamedTuple):
    """What runs a graph, and where its memory is."""

    name: str
    device: str


PROVIDERS = {
    "cpu": Provider("CPUExecutionProvider", "cpu"),
    "cuda": Provider("CUDAExecutionProvider", "cuda"),
}


def version() -> str:
    """onnxruntime's."""
    import onnxruntime

    return str(onnxruntime.__version__)


def threads_spin() -> bool:
    """Whether idle threads spin between the operators of a call: off, unless `EDGEKIT_SPIN` says otherwise."""
    said = os.environ.get("EDGEKIT_SPIN", "off").strip().lower()
    if said not in ("on", "off", ""):
        raise InvalidInput(f"EDGEKIT_SPIN={said}: say on or off")
    return said == "on"


def options(threads: int, packs: bool = True) -> Any:
    """Session options of every graph."""
    import onnxruntime

    chosen = onnxruntime.SessionOptions()
    chosen.intra_op_num_threads = threads
    chosen.inter_op_num_threads = 1
    chosen.log_severity_level = 3
    # One arena for all sessions keeps the largest chunk's activations, once: malloc's heap took four times as much and
    # never the same. A memory pattern would hold them a second time.
    _share_activations()
    chosen.enable_cpu_mem_arena = True
    chosen.enable_mem_pattern = False
    chosen.add_session_config_entry("session.use_env_allocators", "1")
    if not packs:
        chosen.add_session_config_entry("session.disable_prepacking", "1")
    chosen.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    # Spinning saves a tenth of a decode step on a machine of one's own, and costs a third beside one busy process.
    spins = threads_spin()
    chosen.add_session_config_entry("session.intra_op.allow_spinning", "1" if spins else "0")
    if spins:
        # Long enough for the gap between two operators; it ends with the call, or one session starves the next.
        chosen.add_session_config_entry("session.intra_op.spin_duration_us", "1000")
        chosen.add_session_config_entry("session.force_spinning_stop", "1")
    return chosen


def giving_back() -> Any:
    """Options of a call with whose end the arena gives back what nothing lies in."""
    import onnxruntime

    chosen = onnxruntime.RunOptions()
    chosen.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return chosen


@cache
def _share_activations() -> None:
    """Once a process: the arena that all sessions allocate from, which grows by what is asked for."""
    import onnxruntime

    where = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    as_requested = onnxruntime.OrtArenaCfg({"arena_extend_strategy": 1, "initial_chunk_size_bytes": 1 << 20})
    with suppress(Exception):  # the program that we are a part of has one already, which then serves us too
        onnxruntime.create_and_register_allocator(where, as_requested)


def open_session(graph: Path | bytes, provider: Provider, chosen: Any) -> Any:
    """A session on that provider. onnxruntime falls back to the CPU without a word: that is an error here."""
    import onnxruntime

    if provider.name not in onnxruntime.get_available_providers():
        raise TargetMissing(
            f"onnx: this onnxruntime has no {provider.name}, only {', '.join(onnxruntime.get_available_providers())}; "
            "pip uninstall onnxruntime, then pip install 'edgekit[cuda]'"
        )
    source = graph if isinstance(graph, bytes) else str(graph)
    with vendor_errors("onnx"):
        session = onnxruntime.InferenceSession(source, chosen, providers=_with_fallback(provider))
    if provider.name not in session.get_providers():
        raise TargetFailed(
            f"onnx: {provider.name} did not start and onnxruntime fell back to {', '.join(session.get_providers())}; "
            "check the driver and the CUDA and cuDNN libraries with `edgekit doctor`"
        )
    return session


def _with_fallback(provider: Provider) -> list[Any]:
    """The CPU stays behind CUDA for what only shapes tensors; that the provider itself started is checked."""
    if provider.device == "cpu":
        return [provider.name]
    return [(provider.name, {"arena_extend_strategy": "kSameAsRequested"}), PROVIDERS["cpu"].name]
