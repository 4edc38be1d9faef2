"""The logarithm and the exponential that decide choices: right, and with the same bits on every machine."""

from __future__ import annotations

import math
from hashlib import sha256

import numpy as np
from portable_values import exp_inputs, log_inputs

from edgekit.runtime.generation import portable_math
from edgekit.runtime.generation.sampling import gumbel

SAME_EVERYWHERE = {
    "log": "65eb5d0f81e4584c",
    "exp": "d3e67359df7efe2b",
    "gumbel": "ef9d8f6fa5a765fc",
}


def units_in_the_last_place(found: np.ndarray, right: np.ndarray) -> float:
    return float((np.abs(found - right) / np.spacing(np.abs(right))).max())


def test_bits_are_the_same_on_every_machine() -> None:
    """The digests are those of x86-64 and of arm64."""
    bits = np.random.default_rng(1).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    found = {
        "log": portable_math.log(log_inputs()),
        "exp": portable_math.exp(exp_inputs()),
        "gumbel": gumbel(np.append(bits, np.array([0, 1, 2**32 - 2, 2**32 - 1], np.uint32))),
    }
    assert {name: sha256(values.tobytes()).hexdigest()[:16] for name, values in found.items()} == SAME_EVERYWHERE


def test_logarithms_are_right_to_two_units_in_the_last_place() -> None:
    values = log_inputs()
    found = portable_math.log(values)
    right = np.array([math.log(value) for value in values.tolist()])
    assert (found[values == 1.0] == 0.0).all()
    assert units_in_the_last_place(found[values != 1.0], right[values != 1.0]) <= 3.0  # one of them the C library's


def test_exponentials_are_right_to_one_unit_in_the_last_place() -> None:
    values = exp_inputs()
    found = portable_math.exp(values)
    normal = values >= portable_math.LEAST_EXPONENT
    right = np.array([math.exp(value) for value in values[normal].tolist()])
    assert units_in_the_last_place(found[normal], right) <= 2.0  # one of them the C library's
    assert (found[~normal] == 0.0).all()
    assert portable_math.exp(np.array([0.0, -0.0])).tolist() == [1.0, 1.0]
