"""Opens the graphs of an artifact with plain onnxruntime: the right provider or an error, threads from the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgekit.errors import TargetFailed, TargetMissing, vendor_errors

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def options(threads: int, *, spin: bool = False) -> Any:
    """Session options of every graph."""
    import onnxruntime

    chosen = onnxruntime.SessionOptions()
    chosen.intra_op_num_threads = threads
    chosen.inter_op_num_threads = 1
    chosen.log_severity_level = 3
    # Spinning threads starve whatever shares the machine; on a machine of one's own it gains a few percent.
    chosen.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
    return chosen


def open_session(graph: Path | bytes, backend: str, chosen: Any) -> Any:
    """A session on the backend's provider. onnxruntime falls back to the CPU without a word: that is an error here."""
    import onnxruntime

    provider = PROVIDERS[backend]
    if provider not in onnxruntime.get_available_providers():
        raise TargetMissing(
            f"onnx: this onnxruntime has no {provider} (it has {', '.join(onnxruntime.get_available_providers())}); "
            "pip uninstall onnxruntime, then pip install 'edgekit[cuda]'"
        )
    with vendor_errors("onnx"):
        session = onnxruntime.InferenceSession(
            graph if isinstance(graph, bytes) else str(graph), chosen, providers=_wanted(provider)
        )
    if provider not in session.get_providers():
        raise TargetFailed(
            f"onnx: {provider} did not start and onnxruntime fell back to {', '.join(session.get_providers())}; "
            "check the driver and the CUDA and cuDNN libraries with `edgekit doctor`"
        )
    return session


def _wanted(provider: str) -> list[Any]:
    if provider == PROVIDERS["cuda"]:
        return [(provider, {"arena_extend_strategy": "kSameAsRequested"}), PROVIDERS["cpu"]]
    return [provider]
