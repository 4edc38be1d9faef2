"""Lowers to Vulkan, for phones' GPUs, in floats: its passes fail on the neutral integers in this version.

It is lowered here; the runtime of this wheel has no Vulkan, so we never ran any of it.
"""

from __future__ import annotations

from pathlib import Path

from edgekit.interfaces import Progress
from edgekit.plan import Plan
from edgekit.weights.neutral import NeutralWeights
from edgekit_executorch.decoder import Decoder
from edgekit_executorch.layout import Sizes, description
from edgekit_executorch.lowering import entries, trace
from edgekit_executorch.operators import register_for_tracing
from edgekit_executorch.parts import has_windows


def lower_vulkan(plan: Plan, weights: NeutralWeights, path: Path, progress: Progress) -> None:
    """Write a program of Vulkan parts; what Vulkan does not know runs on the CPU between them."""
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes import MemoryPlanningPass

    register_for_tracing()
    sizes = Sizes.of(plan)
    decoder = Decoder(
        weights, slots=sizes.slots, positions=sizes.positions, context=plan.context, style="scattered",
        arithmetic="floats",
    )  # fmt: skip
    methods = entries(decoder, sizes, windowed=has_windows(plan.model, sizes.slots))
    progress(0, 3, "tracing")
    exported = {name: trace(entry) for name, entry in methods.items()}
    progress(1, 3, "lowering to Vulkan")
    lowered = to_edge_transform_and_lower(
        exported,
        partitioner={name: [VulkanPartitioner({"require_dynamic_shapes": True})] for name in methods},
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
        constant_methods=description(plan),
    )
    progress(2, 3, "writing")
    planning = MemoryPlanningPass(alloc_graph_input=False, share_mutable_buffers=True)
    config = ExecutorchBackendConfig(memory_planning_pass=planning, do_quant_fusion_and_const_prop=True)
    with path.open("wb") as file:
        lowered.to_executorch(config).write_to_file(file)
    progress(3, 3, "lowered")
