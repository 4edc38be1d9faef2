"""The names that a package needs to add a quantisation method.

Entry points `edgekit.quant_methods` name its subclasses of `CalibratedMethod`.
"""

from __future__ import annotations

from edgekit.contracts.recipe import Format, Recipe
from edgekit.formats.int_packing import IntegerRows
from edgekit.model.spec import ModelSpec
from edgekit.quant.calibration import Calibration
from edgekit.quant.hessians import lost_outputs, output_error, second_moments
from edgekit.quant.methods import Activations, CalibratedMethod, QuantJob
from edgekit.quant.rtn import IntMatrix, dequantise, refuse_unstorable, round_to_nearest, storable
from edgekit.quant.sensitivity import float_passes
from edgekit.quant.shards import QuantizedPart, ReadRows, WeightPart, parts_of

__all__ = [
    "Activations",
    "CalibratedMethod",
    "Calibration",
    "Format",
    "IntMatrix",
    "IntegerRows",
    "ModelSpec",
    "QuantJob",
    "QuantizedPart",
    "ReadRows",
    "Recipe",
    "WeightPart",
    "dequantise",
    "float_passes",
    "lost_outputs",
    "output_error",
    "parts_of",
    "refuse_unstorable",
    "round_to_nearest",
    "second_moments",
    "storable",
]
