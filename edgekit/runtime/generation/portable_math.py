"""Logarithm and exponential with the same bits on every processor and in C++.

Those of C libraries and of numpy differ in their last bits. These are fixed polynomials in float64, one rounded
operation after the other. `portable_math.cpp` of the native library has the same operations in the same order; change
both together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST_EXPONENT: Final = -708.0  # `exp` is 0 below it, where results would be subnormal
_BLOCK = 1 << 13  # values that stay in a processor's cache from operation to operation
_LN2_HIGH: Final = float.fromhex("0x1.62e42fee00000p-1")  # short, so that its products with exponents are exact
_LN2_LOW: Final = float.fromhex("0x1.a39ef35793c76p-33")
_LOG2_E: Final = float.fromhex("0x1.71547652b82fep+0")
_HALF_ROOT: Final = 0x3FE6A09E667F3BCD  # the bits of sqrt(1/2), the smallest mantissa

# (exp(r) - 1 - r) / r^2 for |r| <= ln(2) / 2, and (log((1 + s) / (1 - s)) - 2 s) / s^3 by s^2, highest power first.
_EXP: Final = tuple(
    map(
        float.fromhex,
        (
            "0x1.af856b53ab212p-26", "0x1.28b02b3801726p-22", "0x1.71dddfe00055bp-19", "0x1.a01996b8efba3p-16",
            "0x1.a01a01bad7e7ap-13", "0x1.6c16c1859704ep-10", "0x1.111111110d65ep-7", "0x1.555555555008dp-5",
            "0x1.5555555555561p-3", "0x1.000000000000bp-1",
        ),
    )
)  # fmt: skip
_LOG: Final = tuple(
    map(
        float.fromhex,
        (
            "0x1.2ef13e6271cd0p-3", "0x1.39a3e569166fdp-3", "0x1.7466274c9392fp-3", "0x1.c71c528a116a9p-3",
            "0x1.249249413b384p-2", "0x1.9999999980d1dp-2", "0x1.555555555558fp-1",
        ),
    )
)  # fmt: skip


def log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the natural logarithms of positive numbers that are neither subnormal nor infinite."""
    # value = mantissa * 2^exponent, with a mantissa from sqrt(1/2) to sqrt(2)
    bits = values.view(np.int64)
    exponents = (bits - _HALF_ROOT) >> 52
    mantissas = (bits - (exponents << 52)).view(np.float64)
    scale = exponents.astype(np.float64)
    s = (mantissas - 1.0) / (mantissas + 1.0)
    square = s * s
    rest = _polynomial(_LOG, square)
    rest *= square
    rest *= s
    rest += scale * _LN2_LOW
    rest += s + s
    rest += scale * _LN2_HIGH
    return rest


def exp(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the exponentials of numbers that are 0 or less."""
    result = np.empty_like(values)
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        result[start : start + _BLOCK] = _exp(np.maximum(block, LEAST_EXPONENT))
    result[values < LEAST_EXPONENT] = 0.0
    return result


def total(values: NDArray[np.float64]) -> float:
    """Return the sum in the order of the values, which `sum` of numpy does not keep."""
    return float(np.cumsum(values)[-1])


def _exp(values: NDArray[np.float64]) -> NDArray[np.float64]:
    # exp(value) = 2^power * exp(r)
    powers = np.floor(values * _LOG2_E + 0.5)
    r = values - powers * _LN2_HIGH
    r -= powers * _LN2_LOW
    result = _polynomial(_EXP, r)
    result *= r
    result *= r
    result += r
    result += 1.0
    bits = result.view(np.int64)
    bits += powers.astype(np.int64) << 52
    return result


def _polynomial(coefficients: tuple[float, ...], x: NDArray[np.float64]) -> NDArray[np.float64]:
    result = x * coefficients[0]
    result += coefficients[1]
    for coefficient in coefficients[2:]:
        result *= x
        result += coefficient
    return result
