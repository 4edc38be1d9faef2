"""The native sampler is Python's to the bit: logarithms, exponentials, filters and choices."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from portable_values import exp_inputs, log_inputs

from edgekit.apps.native.build import SOURCES, missing
from edgekit.runtime.generation import portable_math
from edgekit.runtime.generation.sampling import Sampler, Sampling

Program = Callable[..., bytes]
PARTS = ("portable_math", "sampler", "filters", "noise", "blake2b", "half")
SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"] if "NATIVE_SANITIZE" in os.environ else []
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-k 40": {"top_k": 40},
    "top-k 5000": {"top_k": 5000},
    "top-p 0.9": {"top_p": 0.9},
    "top-p nearly all": {"top_p": 1 - 2.0**-53},
    "top-p nearly none": {"top_p": 1e-12},
    "min-p 0.05": {"min_p": 0.05},
    "min-p 1": {"min_p": 1.0},
    "typical 0.2": {"typical_p": 0.2},
    "typical 0.95": {"typical_p": 0.95},
    "typical nearly all": {"typical_p": 1 - 2.0**-53},
    "all of them": {"top_k": 997, "top_p": 0.95, "min_p": 0.001, "typical_p": 0.9},
}
TEMPERATURES = (5e-324, 1e-20, 1e-3, 0.7, 1.0, 2.5, 100.0)


BUILT = pytest.param(["-O3"], id="as the library is built")
HERE = pytest.param(["-O3", "-march=native"], id="for this processor", marks=pytest.mark.long)


@pytest.fixture(scope="module", params=[BUILT, HERE])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Compiled with the processor's own instructions too, which have the fused additions that change last bits."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    if request.param[-1] == "-march=native" and (SANITIZED or platform.machine() != "x86_64"):
        pytest.skip("once is enough with sanitizers, and not every compiler knows -march=native elsewhere")
    folder = tmp_path_factory.mktemp("sampler")
    sources = [SOURCES / "src" / f"{part}.cpp" for part in PARTS]
    command = [
        os.environ.get("CXX", "c++"),
        "-std=c++17",
        *request.param,
        *SANITIZED,
        "-ffp-contract=off",
        "-I",
        SOURCES / "src",
    ]
    command += [Path(__file__).with_name("sampler_program.cpp"), *sources, "-o", folder / "program"]
    subprocess.run(list(map(str, command)), check=True)

    def run(task: str, values: NDArray[Any], *more: object) -> bytes:
        values.tofile(folder / "values")
        words = [folder / "program", task, folder / "values", *more]
        return subprocess.run(list(map(str, words)), check=True, capture_output=True).stdout

    return run


def test_logarithms_and_exponentials_are_those_of_python(program: Program) -> None:
    assert program("log", log_inputs()) == portable_math.log(log_inputs()).tobytes()
    assert program("exp", exp_inputs()) == portable_math.exp(exp_inputs()).tobytes()


def test_halves_are_those_of_numpy(program: Program) -> None:
    """All halves, the numbers between neighbours, and their neighbours in float32."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    wide = halves.view(np.float16).astype(np.float32)
    assert np.array_equal(np.frombuffer(program("widen", halves), np.float32), wide, equal_nan=True)
    finite = np.sort(wide[np.isfinite(wide)])
    middle = (finite[1:] + finite[:-1]) / 2
    near = [np.nextafter(middle, np.float32(side)) for side in (-np.inf, np.inf)]
    limits = np.float32([65519.996, 65520, 65536, 1e38, np.inf, 1e-8, 2e-8, 3e-8, 5e-8, 1e-45, 0.0])
    values = np.concatenate([finite, middle, *near, limits, -limits])
    with np.errstate(over="ignore"):
        assert program("halve", values) == values.astype(np.float16).tobytes()
    assert np.isnan(np.frombuffer(program("halve", np.float32([np.nan])), np.float16)).all()


def rows_of(vocabulary: int) -> NDArray[np.float32]:
    """Usual logits, flat and peaked ones, many equal ones, impossible ones, huge and tiny ones."""
    random = np.random.default_rng(vocabulary)
    usual = random.standard_normal((8, vocabulary))
    usual *= np.array([3.0, 0.01, 8.0, 1.0, 2.0, 1e37, 1e-41, 4.0])[:, None]
    usual[3] = np.round(usual[3] * 2)
    usual[4, random.random(vocabulary) < 0.5] = -np.inf
    usual[7] += 16_000_000
    return usual.astype(np.float32)


@pytest.mark.parametrize("vocabulary", [50, 4999, 50_000])
@pytest.mark.parametrize("name", FILTERS, ids=str)
def test_choices_are_those_of_python(program: Program, name: str, vocabulary: int) -> None:
    rows, options = rows_of(vocabulary), FILTERS[name]
    for seed, temperature in enumerate(TEMPERATURES if vocabulary < 50_000 else TEMPERATURES[3:5]):
        sampler = Sampler(Sampling(temperature=temperature, seed=seed, **options), vocabulary)
        filters = [options.get(each, plain) for each, plain in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))]
        native = program(
            "choose",
            rows,
            vocabulary,
            repr(temperature),
            *map(repr, filters),
            repr(options.get("typical_p", 1.0)),
            seed,
        )
        python = [sampler.choose(row, place) for place, row in enumerate(rows)]
        assert np.frombuffer(native, np.int32).tolist() == python, temperature
