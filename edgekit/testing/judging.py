"""Tolerances and assertions that the checks of engines share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edgekit.contracts.engine import Engine
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.errors import EdgekitError

if TYPE_CHECKING:
    from edgekit.contracts.engine import Logits

MakeEngine = Callable[[], Engine]

CAPACITY = 48


class Judge(NamedTuple):
    """The required equality of logits: bitwise if `exact`, else within `tolerance` of the largest logit."""

    exact: bool
    tolerance: float
    exact_batches: bool
    sequences: int
    memoryless: bool
    adapters: tuple[Path, Path] | None = None  # two different adapters that the engine can load

    def same(self, found: Logits, expected: Logits, what: str, *, batched: bool = False) -> None:
        require(found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}")
        if self.exact and (self.exact_batches or not batched):
            require(np.array_equal(found, expected), f"{what}: not bitwise equal, {gap(found, expected)}")
        else:
            apart = gap(found, expected)
            require(
                apart <= self.tolerance, f"{what}: {apart:.3g} of the largest logit apart, allowed {self.tolerance:g}"
            )


@contextmanager
def opened(make_engine: MakeEngine) -> Iterator[Engine]:
    """Open an engine for the block. Closes it twice, which engines must allow."""
    engine = make_engine()
    try:
        yield engine
    finally:
        engine.close()
        engine.close()


def require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def refused(action: Callable[[], object], what: str) -> None:
    """Require that `action` raises an `EdgekitError` with a message."""
    try:
        action()
    except EdgekitError as error:
        require(bool(str(error)), f"{what}: was refused without a message")
    else:
        raise AssertionError(f"{what}: was accepted")


def storage_for(engine: Engine, capacity: int = CAPACITY) -> KVCacheConfig:
    return KVCacheConfig(capacity_tokens=capacity, kv_bits=engine.capabilities.kv_bits[0])


def words(engine: Engine, random: np.random.Generator, count: int) -> list[int]:
    return [int(token) for token in random.integers(0, engine.capabilities.vocabulary, count)]


def gap(found: Logits, expected: Logits) -> float:
    if found.size == 0:
        return 0.0
    return float(np.max(np.abs(found - expected)) / max(1e-6, float(np.max(np.abs(expected)))))
