"""Lowers to Vulkan, for phones' GPUs, in floats, because its passes fail on the neutral integers in this version.

The runtime in ExecuTorch's wheel has no Vulkan, so such programs were lowered but never run.
"""

from __future__ import annotations

from pathlib import Path

from edgekit.common.progress import Progress
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit_executorch.whole import lower_whole


def lower_vulkan(plan: Plan, weights: NeutralWeights, path: Path, progress: Progress) -> None:
    """Write a program of Vulkan parts; operators that Vulkan lacks run on the CPU between them."""
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass

    planning = MemoryPlanningPass(alloc_graph_input=False, share_mutable_buffers=True)
    lower_whole(
        plan,
        weights,
        path,
        progress,
        backend="Vulkan",
        arithmetic="floats",
        partitioner=lambda: VulkanPartitioner({"require_dynamic_shapes": True}),
        config=ExecutorchBackendConfig(memory_planning_pass=planning, do_quant_fusion_and_const_prop=True),
    )
