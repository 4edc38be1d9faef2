"""Lowers to CoreML, for Apple's neural engine and GPU: fp16, or the neutral 4-bit weights with float activations.

The cache is CoreML's own state. It is lowered here and runs only on Apple's devices, so we never ran any of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from edgekit.errors import TargetMissing
from edgekit.interfaces import Progress
from edgekit.plan import Plan
from edgekit.weights.neutral import NeutralWeights
from edgekit_executorch.decoder import Decoder
from edgekit_executorch.hushed import hushed_to_the_bottom
from edgekit_executorch.layout import Sizes, description
from edgekit_executorch.lowering import entries, trace
from edgekit_executorch.operators import register_for_tracing
from edgekit_executorch.parts import has_windows


def lower_coreml(plan: Plan, weights: NeutralWeights, path: Path, progress: Progress) -> None:
    """Write a program whose whole decoder is one CoreML model a method."""
    try:
        import coremltools as ct
    except ImportError as error:
        raise TargetMissing(f"lowering to CoreML needs coremltools ({error}); pip install 'edgekit[coreml]'") from error
    from executorch.backends.apple.coreml.compiler import CoreMLBackend
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    register_for_tracing()
    sizes = Sizes.of(plan)
    decoder = Decoder(
        weights, slots=sizes.slots, positions=sizes.positions, context=plan.context, style="scattered",
        arithmetic="weights",
    )  # fmt: skip
    methods = entries(decoder, sizes, windowed=has_windows(plan.model, sizes.slots))
    progress(0, 3, "tracing")
    exported = {name: trace(entry) for name, entry in methods.items()}
    progress(1, 3, "lowering to CoreML")
    specs = CoreMLBackend.generate_compile_specs(
        compute_precision=ct.precision.FLOAT16, minimum_deployment_target=ct.target.iOS18
    )
    partitioners: dict[str, list[Any]] = {
        name: [CoreMLPartitioner(compile_specs=specs, take_over_mutable_buffer=True)] for name in methods
    }
    with hushed_to_the_bottom():  # coremltools draws progress bars of its own
        lowered = to_edge_transform_and_lower(
            exported,
            partitioner=partitioners,
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
            constant_methods=description(plan),
        )
    progress(2, 3, "writing")
    with torch.no_grad(), path.open("wb") as file:
        lowered.to_executorch().write_to_file(file)
    progress(3, 3, "lowered")
