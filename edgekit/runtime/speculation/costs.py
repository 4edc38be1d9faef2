"""Forward cost: seconds by number of tokens, measured once for an artifact and kept as a machine fact.

Only the ratios are used: the controller learns the current speed of the machine from the steps themselves.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from edgekit.common.base import Frozen
from edgekit.common.bounds import MachineNumber, Tokens
from edgekit.common.machine_facts import read_fact, write_fact
from edgekit.contracts.engine import Chunk
from edgekit.contracts.feeding import feed, probe_tokens
from edgekit.contracts.memory import LONE_VERIFIED_ROWS
from edgekit.errors import Unsupported

if TYPE_CHECKING:
    from edgekit.contracts.engine import Engine
    from edgekit.contracts.kv_policy import KVCacheConfig

CALIBRATED_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, LONE_VERIFIED_ROWS)
_PAST_TOKENS = 32
_FEWEST_ROUNDS, _MOST_ROUNDS = 4, 60
_USUAL_S, _LONGEST_S = 0.4, 2.0  # duration of one calibration; a slow engine gets fewer rounds


class ForwardSeconds(Frozen):
    """The fact of an artifact's forward cost: seconds by tokens."""

    seconds: dict[Tokens, MachineNumber]


class CostShare(Frozen):
    """The fact of a draft's cost of one token over the target's."""

    share: MachineNumber


class Costs:
    """Seconds of a forward, by its number of tokens."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        assert 1 in seconds, seconds
        self._tokens = sorted(seconds)
        # More tokens never cost less; a measurement that says so is noise.
        self._seconds: list[float] = []
        for tokens in self._tokens:
            self._seconds.append(max(seconds[tokens], self._seconds[-1] if self._seconds else 0.0))
        self.one = self._seconds[0]

    def of(self, tokens: float) -> float:
        """Interpolate between measured sizes; beyond the largest, extrapolate the line from the first to it."""
        index = bisect_left(self._tokens, tokens)
        if index < len(self._tokens) and self._tokens[index] == tokens:
            return self._seconds[index]
        left, right = (index - 1, index) if index < len(self._tokens) else (0, len(self._tokens) - 1)
        if left == right:
            return self.one * tokens
        slope = (self._seconds[right] - self._seconds[left]) / (self._tokens[right] - self._tokens[left])
        return self._seconds[right] + slope * (tokens - self._tokens[right])

    @property
    def most(self) -> int:
        """The largest measured number of tokens."""
        return self._tokens[-1]

    def scaled(self, one: float) -> Costs:
        """Return the same ratios with `one` seconds for one token."""
        return Costs({tokens: ratio * one for tokens, ratio in self.ratios().items()})

    def ratios(self) -> dict[int, float]:
        """Return the costs as multiples of one token's."""
        return {tokens: seconds / self.one for tokens, seconds in zip(self._tokens, self._seconds, strict=True)}


def known_costs(engine: Engine, kv_config: KVCacheConfig, artifact_sha256: str | None, *, exact: bool = False) -> Costs:
    """Return the costs of this artifact on this machine, measuring and storing them if they are unknown."""
    name = f"forward-cost{'-exact' if exact else ''}"
    fact = read_fact(artifact_sha256, name, ForwardSeconds) if artifact_sha256 else None
    seconds = fact.seconds if fact else {}
    if 1 not in seconds:
        probe = CostProbe(engine, kv_config)
        try:
            seconds = by_turns({tokens: partial(probe.seconds, tokens) for tokens in probe.sizes})
        finally:
            probe.close()
        if artifact_sha256:
            write_fact(artifact_sha256, name, ForwardSeconds(seconds=seconds))
    return Costs(seconds)


def known_share(name: str, artifact_sha256: str, target: Probe, draft: Probe) -> float:
    """Return the draft's cost of one token over the target's, measuring and storing it if it is unknown."""
    fact = read_fact(artifact_sha256, name, CostShare)
    if fact is None:
        seconds = by_turns({0: lambda: target.seconds(1), 1: lambda: draft.seconds(1)})
        fact = CostShare(share=seconds[1] / seconds[0])
        write_fact(artifact_sha256, name, fact)
    return fact.share


def by_turns(trials: Mapping[int, Callable[[], float]]) -> dict[int, float]:
    """Return each trial's minimum. Every round runs all trials once, so that a disturbance affects them all."""
    for trial in trials.values():
        trial()  # warm up: the engine allocates buffers
    seconds = dict.fromkeys(trials, math.inf)
    started = perf_counter()
    for round_ in range(_MOST_ROUNDS):
        for name, trial in trials.items():
            seconds[name] = min(seconds[name], trial())
        elapsed = perf_counter() - started
        if elapsed > _LONGEST_S or (elapsed > _USUAL_S and round_ + 1 >= _FEWEST_ROUNDS):
            break
    return seconds


class Probe(Protocol):
    """Times an engine, or a drafter."""

    def seconds(self, tokens: int) -> float:
        """Time `tokens` tokens."""


class CostProbe:
    """Time forwards on a state of an engine, and rewind them."""

    def __init__(self, engine: Engine, kv_config: KVCacheConfig) -> None:
        capabilities = engine.capabilities
        past = min(_PAST_TOKENS, kv_config.capacity_tokens // 2)
        most = min(kv_config.capacity_tokens - past, capabilities.max_chunk_tokens)
        if capabilities.max_rewind is not None:
            most = min(most, capabilities.max_rewind)
        if most < 2:
            raise Unsupported(f"draft: this engine can take back {most} tokens of a step; drafting needs two or more")
        self.sizes = [tokens for tokens in CALIBRATED_TOKENS if tokens <= most]
        self._engine = engine
        self._exit: int | None = None
        self._tokens = probe_tokens(max(past, most), capabilities.vocabulary)
        self.state = engine.start(kv_config)
        feed(engine, self.state, self._tokens[:past])

    def at_exit(self, layer: int) -> CostProbe:
        """Return a probe on the same state that stops after `layer`."""
        other = copy(self)
        other._exit = layer
        return other

    def seconds(self, tokens: int) -> float:
        """Time one forward of `tokens` tokens with the logits of all."""
        started = perf_counter()
        self._engine.forward([Chunk(self.state, self._tokens[:tokens], tokens, self._exit)])
        elapsed = perf_counter() - started
        self.state.rewind(tokens)
        return elapsed

    def close(self) -> None:
        self.state.close()
