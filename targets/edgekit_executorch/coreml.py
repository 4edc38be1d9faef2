"""Lowers to CoreML, for Apple's neural engine and GPU: in fp16, or the neutral 4-bit weights with float activations.

The cache is a CoreML state. Such programs run only on Apple's devices; edgekit has lowered them but never run them.
"""

from __future__ import annotations

from pathlib import Path

from edgekit.common.progress import Progress
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.errors import TargetMissing
from edgekit_executorch.whole import lower_whole


def lower_coreml(plan: Plan, weights: NeutralWeights, path: Path, progress: Progress) -> None:
    """Write a program in which each method is one CoreML model."""
    try:
        import coremltools as ct
    except ImportError as error:
        raise TargetMissing(f"lowering to CoreML needs coremltools ({error}); pip install 'edgekit[coreml]'") from error
    from executorch.backends.apple.coreml.compiler import CoreMLBackend
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner

    specs = CoreMLBackend.generate_compile_specs(
        compute_precision=ct.precision.FLOAT16, minimum_deployment_target=ct.target.iOS18
    )
    lower_whole(
        plan,
        weights,
        path,
        progress,
        backend="CoreML",
        arithmetic="weights",
        partitioner=lambda: CoreMLPartitioner(compile_specs=specs, take_over_mutable_buffer=True),
    )
