"""A million numbers for the portable logarithm and as many for the exponential, with their edges."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

COUNT = 1_000_000


def log_inputs() -> NDArray[np.float64]:
    """Positive normal numbers: those of the noise, others of every size, and neighbours of edges."""
    random = np.random.default_rng(11)
    uniform = (random.integers(0, 1 << 32, COUNT // 2) + 0.5) * 2.0**-32
    sizes = np.ldexp(random.random(COUNT // 4) + 0.5, random.integers(-1021, 1024, COUNT // 4))
    surprises = random.random(COUNT // 4) * 23.0 + 2.0**-33
    edges = np.array([2.0**-1022, 2.0**-33, 1 - 2.0**-33, 0.5, 0.5**0.5, 1.0, 2.0**0.5, 2.0, np.finfo(float).max / 2])
    around = [edges, np.nextafter(edges, np.inf), np.nextafter(edges[1:], 0.0)]
    return np.concatenate([uniform, sizes, surprises, *around])


def exp_inputs() -> NDArray[np.float64]:
    """Numbers of 0 or less: levels of tokens, tiny ones, and neighbours of multiples of ln(2) / 2."""
    random = np.random.default_rng(12)
    levels = np.concatenate([random.random(COUNT // 2) * 60.0, random.random(COUNT // 4) * 720.0])
    tiny = np.ldexp(random.random(COUNT // 4), random.integers(-1070, 3, COUNT // 4))
    edges = np.append(np.arange(1, 2044) * 0.34657359027997264, [708.0, 709.0, 745.2, 1e9, 1e238])
    around = [edges, np.nextafter(edges, 0.0), np.nextafter(edges, np.inf), [0.0, 5e-324, np.inf]]
    return -np.concatenate([levels, tiny, *around])
