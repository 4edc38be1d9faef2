"""Registers ExecuTorch's operators with torch: llama.* (cache, attention) and quantized_decomposed.* (embedding).

Running needs only the kernels. Tracing also needs their descriptions for torch, which take seconds to import.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path

from edgekit.errors import TargetMissing
from edgekit_executorch.quiet import quiet_output

_KERNELS = "executorch.extension.llm.custom_ops", "libcustom_ops_aot_lib"


def register_for_tracing() -> None:
    """Register the operators and their descriptions; takes seconds."""
    with quiet_output():
        for module in (
            "executorch.extension.llm.custom_ops.custom_ops",
            "executorch.kernels.quantized",
            "executorch.exir.passes._quant_patterns_and_replacements",
        ):
            importlib.import_module(module)


def register_for_running() -> None:
    """Register the kernels."""
    import torch

    with quiet_output():
        importlib.import_module("executorch.extension.pybindings.portable_lib")
        torch.ops.load_library(str(_library(*_KERNELS)))  # type: ignore[no-untyped-call]
        importlib.import_module("executorch.kernels.quantized")


def _library(package: str, name: str) -> Path:
    spec = find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        for path in sorted(Path(folder).glob(f"{name}.*")):
            return path
    raise TargetMissing(f"executorch was built without {name}; pip install --force-reinstall 'edgekit[executorch]'")
