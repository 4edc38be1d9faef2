"""The names that a package needs to add a quantisation method.

Entry points `edgekit.quant_methods` name its subclasses of `CalibratedMethod`.
"""

from __future__ import annotations

from edgekit.contracts.recipe import Format
from edgekit.formats.int_packing import IntegerRows
from edgekit.model.spec import ModelSpec
from edgekit.quant.backward import TwoPasses, capped, head_blocks, head_name, sequences_at_once
from edgekit.quant.folds import Fold, folds_of
from edgekit.quant.hessians import lost_outputs, mean_sizes, output_error, second_moments
from edgekit.quant.methods import Activations, CalibratedMethod, QuantJob
from edgekit.quant.reference_decoder import final_norm, last_norm
from edgekit.quant.rtn import IntMatrix, dequantise, refuse_unstorable, round_to_nearest, storable
from edgekit.quant.shards import QuantizedPart, ReadRows, WeightPart, parts_of

__all__ = [
    "Activations",
    "CalibratedMethod",
    "Fold",
    "Format",
    "IntMatrix",
    "IntegerRows",
    "ModelSpec",
    "QuantJob",
    "QuantizedPart",
    "ReadRows",
    "TwoPasses",
    "WeightPart",
    "capped",
    "dequantise",
    "final_norm",
    "folds_of",
    "head_blocks",
    "head_name",
    "last_norm",
    "lost_outputs",
    "mean_sizes",
    "output_error",
    "parts_of",
    "refuse_unstorable",
    "round_to_nearest",
    "second_moments",
    "sequences_at_once",
    "storable",
]
