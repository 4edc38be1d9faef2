"""The names that a package needs to add a quantisation method.

Entry points `edgekit.quant_methods` name its subclasses of `CalibratedMethod`.
"""

from __future__ import annotations

from edgekit.contracts.recipe import Format
from edgekit.model.spec import ModelSpec
from edgekit.quant.folds import Fold, folds_of
from edgekit.quant.hessians import lost_outputs, mean_sizes, output_error, second_moments
from edgekit.quant.methods import Activations, CalibratedMethod, QuantJob
from edgekit.quant.rtn import IntMatrix, dequantise, refuse_unstorable, round_to_nearest
from edgekit.quant.shards import QuantizedPart, WeightPart

__all__ = [
    "Activations",
    "CalibratedMethod",
    "Fold",
    "Format",
    "IntMatrix",
    "ModelSpec",
    "QuantJob",
    "QuantizedPart",
    "WeightPart",
    "dequantise",
    "folds_of",
    "lost_outputs",
    "mean_sizes",
    "output_error",
    "refuse_unstorable",
    "round_to_nearest",
    "second_moments",
]
