"""Lowers a whole program for one backend: CoreML or Vulkan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from edgekit.common.progress import Progress
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit_executorch.decoder import ExecutorchDecoder
from edgekit_executorch.layer_tensors import has_windows
from edgekit_executorch.layout import Sizes, description
from edgekit_executorch.linears import Arithmetic
from edgekit_executorch.lowering import entries, trace
from edgekit_executorch.operators import register_for_tracing
from edgekit_executorch.quiet import quiet_stderr


def lower_whole(
    plan: Plan,
    weights: NeutralWeights,
    path: Path,
    progress: Progress,
    *,
    backend: str,
    arithmetic: Arithmetic,
    partitioner: Callable[[], Any],
    config: Any = None,
) -> None:
    """Write a program whose methods `partitioner` delegates; `config` is ExecuTorch's, or None for its default."""
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    register_for_tracing()
    sizes = Sizes.of(plan)
    decoder = ExecutorchDecoder(
        weights, slots=sizes.slots, positions=sizes.positions, context=plan.context, style="scattered",
        arithmetic=arithmetic,
    )  # fmt: skip
    methods = entries(decoder, sizes, windowed=has_windows(plan.model, sizes.slots))
    progress(0, 3, "tracing")
    exported = {name: trace(entry) for name, entry in methods.items()}
    progress(1, 3, f"lowering to {backend}")
    with quiet_stderr():  # coremltools draws progress bars
        lowered = to_edge_transform_and_lower(
            exported,
            partitioner={name: [partitioner()] for name in methods},
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
            constant_methods=description(plan),
        )
    progress(2, 3, "writing")
    with torch.no_grad(), path.open("wb") as file:
        lowered.to_executorch(config).write_to_file(file)
    progress(3, 3, "lowered")
