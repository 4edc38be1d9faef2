"""Drafted or not, tokens are drawn from the exact law: chi-square over a vocabulary of 16, with fixed seeds.

The engine gives the same logits at every position, so a long text is many draws from one known distribution.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from speculating import SOURCES

from edgekit.contracts.capabilities import Capabilities
from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.runtime.generation.sampling import Sampler, Sampling, filtered
from edgekit.runtime.generation.stopping import Stopping
from edgekit.runtime.request import Request, RequestLimits
from edgekit.runtime.speculation.controller import DrafterFactory

VOCABULARY = 16
DRAWS = 100_000
SAMPLINGS: dict[str, Sampling] = {
    "as it is": Sampling(temperature=1.0, seed=11),
    "filtered": Sampling(temperature=0.8, top_k=12, top_p=0.95, seed=12),
}
RANDOM = np.random.default_rng(5)
LAW = RANDOM.normal(0.0, 1.2, VOCABULARY).astype(np.float32)
NEAR = (LAW + RANDOM.normal(0.0, 0.7, VOCABULARY)).astype(np.float32)  # what a draft, or the first layers, think


class Tabled(Sampler):
    """A sampler with the choices of all positions precomputed, which is a hundred times faster."""

    def __init__(self, sampling: Sampling) -> None:
        super().__init__(sampling, VOCABULARY, [0])
        places = range(1, DRAWS + 32)
        self.tables = {float(law[0]): choices(law, sampling, places) for law in (LAW, NEAR)}

    def choose(self, row: Any, position: int, allowed: Any = None) -> int:
        return self.tables[float(row[0])][position - 1]


def choices(law: np.ndarray, sampling: Sampling, places: range) -> list[int]:
    """The sampler's choices at each place from a distribution."""
    ids, scores = filtered(law, sampling)
    tokens = np.arange(VOCABULARY) if ids is None else ids
    seeds = (blake2b(struct.pack("<QQ", sampling.seed, place), digest_size=12).digest() for place in places)
    stride, start, flip = np.frombuffer(b"".join(seeds), np.uint32).reshape(-1, 3).T[:, :, None]
    bits = tokens.astype(np.uint32)[None] * (stride | np.uint32(1)) + start
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    bits = (bits ^ (bits >> np.uint32(16))) ^ flip
    noise = -np.log(-np.log((bits + 0.5) * 2.0**-32))
    levels = (scores - np.float64(scores.max())) / sampling.temperature
    return tokens[(levels + noise).argmax(axis=1)].tolist()


@pytest.fixture(scope="module")
def samplers() -> dict[str, Tabled]:
    return {name: Tabled(sampling) for name, sampling in SAMPLINGS.items()}


def test_table_has_the_choices_of_the_sampler(samplers: dict[str, Tabled]) -> None:
    for name, sampling in SAMPLINGS.items():
        real = Sampler(sampling, VOCABULARY, [0])
        for law in (LAW, NEAR):
            for place in [*range(1, 500), *range(DRAWS - 50, DRAWS)]:
                assert samplers[name].choose(law, place) == real.choose(law, place)


class Held:
    """A state that only counts."""

    bytes = num_replayed = 0

    def __init__(self) -> None:
        self.position = self.length = 0

    def rewind(self, count: int) -> None:
        self.position -= count
        self.length -= count

    def evict(self, start: int, stop: int) -> None:
        self.length -= stop - start

    def close(self) -> None: ...


class Unchanging:
    """Gives the same logits after every token."""

    def __init__(self, law: np.ndarray, early: np.ndarray) -> None:
        self.laws = {exit_: np.broadcast_to(each, (32, VOCABULARY)) for exit_, each in ((None, law), (1, early))}
        self.capabilities = Capabilities(
            vocabulary=VOCABULARY, max_states=4, max_chunk_tokens=32, kv_bits=(16,), exits=(1,), exact="always"
        )

    def start(self, storage: KVCacheConfig) -> Held:
        return Held()

    def forward(self, chunks: Sequence[Chunk]) -> list[np.ndarray]:
        for chunk in chunks:
            chunk.state.position += len(chunk.tokens)
            chunk.state.length += len(chunk.tokens)
        return [self.laws[chunk.exit_layer][: chunk.num_logits] for chunk in chunks]

    def close(self) -> None: ...


class Silent:
    """Tokens without text."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Verified(Request):
    """A request driven without the scheduler."""

    def run(self, engine: Unchanging, controller: Any) -> list[int]:
        self.start(engine.start(KVCacheConfig(capacity_tokens=64, kv_bits=16)))
        while not self.is_done:
            if controller is not None:
                controller.begin(1)
            chunk = self.next_chunk(64)
            assert chunk is not None
            self.take(engine.forward([chunk])[0])
        return self.tokens[1:]


class Biased(Verified):
    """Accept a wrong proposal at one place in three."""

    def take(self, logits: Any) -> None:
        proposal, sampler = self.decoding.proposal, self.decoding.sampler
        if proposal and len(self.tokens) % 3 == 0:
            sampler.choose = lambda row, position, allowed=None: proposal[0]  # type: ignore[method-assign]
            try:
                super().take(logits[:1])
            finally:
                del sampler.choose
            missing = len(self.tokens) - 1 - self.state.position if self.state else 0
            if self.state and missing < 0:
                self.state.rewind(-missing)
        else:
            super().take(logits)


def drawn(kind: type[Verified], source: DrafterFactory | None, sampler: Tabled, engine: Unchanging) -> list[int]:
    policy = KVEvictionPolicy.of(64, 4)
    limits = RequestLimits(engine.capabilities, policy, KVCacheConfig(capacity_tokens=64, kv_bits=16), 32, frozenset())
    wanted = Stopping(max_tokens=DRAWS)
    sequence = kind(limits, [0], sampler.fork(), wanted, Silent(), drafter_factory=source)  # type: ignore[arg-type]
    return sequence.run(engine, source.controller if source else None)


def exact_law(sampling: Sampling) -> np.ndarray:
    scores = LAW.astype(np.float64) / sampling.temperature
    order = np.argsort(-scores)
    kept = order[: sampling.top_k or VOCABULARY]
    chances = np.exp(scores - scores.max())
    if sampling.top_p is not None:
        share = chances[kept] / chances[kept].sum()
        kept = kept[: int(np.searchsorted(np.cumsum(share), sampling.top_p)) + 1]
    law = np.zeros(VOCABULARY)
    law[kept] = chances[kept] / chances[kept].sum()
    return law


def chance_of(statistic: float, degrees: int) -> float:
    """The probability that a chi-square variable with `degrees` degrees of freedom is at least that large."""
    half = statistic / 2
    if degrees % 2:
        chance, term, start = math.erfc(math.sqrt(half)), math.exp(-half) * math.sqrt(half) / math.gamma(1.5), 3
    else:
        chance, term, start = math.exp(-half), math.exp(-half) * half, 4
    for degree in range(start, degrees + 1, 2):
        chance += term
        term *= half / (degree / 2)
    return chance


def p_value(tokens: Sequence[int], sampling: Sampling) -> float:
    law = exact_law(sampling)
    counts = np.bincount(tokens, minlength=VOCABULARY)
    assert counts[law == 0].sum() == 0
    possible = law > 0
    expected = law[possible] * len(tokens)
    return chance_of(float(((counts[possible] - expected) ** 2 / expected).sum()), int(possible.sum()) - 1)


CASES = [(drafter, "as it is") for drafter in [None, *SOURCES]]
CASES += [(drafter, "filtered") for drafter in (None, "a draft model", "auto")]
BOUND = 0.01 / len(CASES)


@pytest.fixture(scope="module")
def plain(samplers: dict[str, Tabled]) -> dict[str, list[int]]:
    engine = Unchanging(LAW, NEAR)
    return {name: drawn(Verified, None, sampler, engine) for name, sampler in samplers.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "sampling"), CASES, ids=str)
def test_every_drafter_keeps_the_distribution(
    plain: dict[str, list[int]], samplers: dict[str, Tabled], drafter: str | None, sampling: str
) -> None:
    engine, draft = Unchanging(LAW, NEAR), Unchanging(NEAR, NEAR)
    storage = KVCacheConfig(capacity_tokens=64, kv_bits=16)
    source = SOURCES[drafter](engine, draft, storage, plain[sampling][:200]) if drafter else None  # type: ignore[arg-type]
    tokens = drawn(Verified, source, samplers[sampling], engine)
    assert len(tokens) == DRAWS
    assert p_value(tokens, SAMPLINGS[sampling]) > BOUND
    assert tokens == plain[sampling]  # and not only in law


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["a draft model", "early exit"])
def test_biased_verifier_is_detected(samplers: dict[str, Tabled], drafter: str) -> None:
    engine, draft = Unchanging(LAW, NEAR), Unchanging(NEAR, NEAR)
    source = SOURCES[drafter](engine, draft, KVCacheConfig(capacity_tokens=64, kv_bits=16), [])  # type: ignore[arg-type]
    tokens = drawn(Biased, source, samplers["as it is"], engine)
    assert p_value(tokens, SAMPLINGS["as it is"]) < BOUND


def test_chi_square_quantiles_are_correct() -> None:
    known = ((15, 30.578, 0.01), (15, 24.996, 0.05), (10, 23.209, 0.01), (2, 5.991, 0.05), (1, 6.635, 0.01))
    for degrees, statistic, chance in known:
        assert chance_of(statistic, degrees) == pytest.approx(chance, rel=2e-3)
