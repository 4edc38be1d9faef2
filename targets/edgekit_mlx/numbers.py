"""Converts float32 to the float types of an MLX file, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit.formats.int_packing import bf16_to_float32, float32_to_bf16
from edgekit_mlx.layout import FloatType


def as_stored(values: NDArray[np.float32], floats: FloatType) -> NDArray[Any]:
    """Round float32 to `floats`; bfloat16 is returned as its bits."""
    if floats == "BF16":
        return float32_to_bf16(values)
    if floats == "F32":
        return values
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def as_read(stored: NDArray[Any], floats: FloatType) -> NDArray[np.float32]:
    """Return the exact float32 values of numbers from `as_stored`."""
    return bf16_to_float32(stored) if floats == "BF16" else stored.astype(np.float32)
