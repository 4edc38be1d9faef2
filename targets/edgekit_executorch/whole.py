"""Lowers a whole program for one backend: CoreML or Vulkan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from edgekit.common.progress import Progress
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.errors import TargetMissing
from edgekit_executorch.decoder import ExecutorchDecoder
from edgekit_executorch.layer_tensors import has_windows
from edgekit_executorch.layout import Sizes, description
from edgekit_executorch.linears import Arithmetic
from edgekit_executorch.lowering import entries, trace
from edgekit_executorch.operators import register_for_tracing
from edgekit_executorch.quiet import quiet_stderr


class WholeBackend(NamedTuple):
    """What lowers whole methods."""

    title: str
    arithmetic: Arithmetic
    partitioner: Callable[[], Any]
    config: Any = None  # ExecuTorch's; None: its default


def _coreml() -> WholeBackend:
    """Return CoreML, for Apple's neural engine and GPU: fp16, or the neutral 4-bit weights with float activations.

    The cache is a CoreML state. Such programs run only on Apple's devices; edgekit has lowered them but never run them.
    """
    try:
        import coremltools as ct
    except ImportError as error:
        raise TargetMissing(f"lowering to CoreML needs coremltools ({error}); pip install 'edgekit[coreml]'") from error
    from executorch.backends.apple.coreml.compiler import CoreMLBackend
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner

    specs = CoreMLBackend.generate_compile_specs(
        compute_precision=ct.precision.FLOAT16, minimum_deployment_target=ct.target.iOS18
    )
    partitioner = partial(CoreMLPartitioner, compile_specs=specs, take_over_mutable_buffer=True)
    return WholeBackend("CoreML", "weights", partitioner)


def _vulkan() -> WholeBackend:
    """Return Vulkan, for phones' GPUs, in floats, because its passes fail on the neutral integers in this version.

    Operators that Vulkan lacks run on the CPU between its parts. The runtime in ExecuTorch's wheel has no Vulkan, so
    such programs were lowered but never run.
    """
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass

    planning = MemoryPlanningPass(alloc_graph_input=False, share_mutable_buffers=True)
    config = ExecutorchBackendConfig(memory_planning_pass=planning, do_quant_fusion_and_const_prop=True)
    return WholeBackend("Vulkan", "floats", partial(VulkanPartitioner, {"require_dynamic_shapes": True}), config)


def lower_whole(plan: Plan, weights: NeutralWeights, path: Path, progress: Progress) -> None:
    """Write a program whose methods are delegated to the plan's backend."""
    backend = _coreml() if plan.backend == "coreml" else _vulkan()
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    register_for_tracing()
    sizes = Sizes.of(plan)
    decoder = ExecutorchDecoder(
        weights, slots=sizes.slots, context=plan.context, style="scattered", arithmetic=backend.arithmetic
    )
    methods = entries(decoder, sizes, windowed=has_windows(plan.model, sizes.slots))
    progress(0, 3, "tracing")
    exported = {name: trace(entry) for name, entry in methods.items()}
    progress(1, 3, f"lowering to {backend.title}")
    with quiet_stderr():  # coremltools draws progress bars
        lowered = to_edge_transform_and_lower(
            exported,
            partitioner={name: [backend.partitioner()] for name in methods},
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
            constant_methods=description(plan),
        )
    progress(2, 3, "writing")
    with torch.no_grad(), path.open("wb") as file:
        lowered.to_executorch(backend.config).write_to_file(file)
    progress(3, 3, "lowered")
