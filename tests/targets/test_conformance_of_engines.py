"""The fake engine passes the conformance suite, and the suite fails each engine that breaks one rule."""

from __future__ import annotations

import numpy as np
import pytest

from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.enginekit.kv_segment import KeyValues
from edgekit.errors import InvalidInput
from edgekit.testing import CHECKS, FakeEngine, FakeState, check_engine
from edgekit.testing.judging import Judge, opened

VARIANTS = {
    "as it comes": {},
    "one layer": {"layers": 1},
    "three layers, small chunks": {"layers": 3, "max_chunk_tokens": 3},
    "one state that forgets little": {"max_states": 1, "max_rewind": 2},
    "no eviction, no saving": {"can_evict": False, "can_save": False},
    "never rewinds": {"max_rewind": 0},
    "a recurrent part": {"checkpoint_tokens": 4},
    "a recurrent part, small chunks, sparse checkpoints": {"checkpoint_tokens": 32, "max_chunk_tokens": 3},
    "with threads": {"threads": 4},
    "with hidden states": {"layers": 3, "feature_layers": (1, 3)},
    "no keys and values handed out": {"gives_kv": False},
}


def fake_adapter(place, seed):
    place.mkdir()
    (place / "adapter.json").write_text(f'{{"seed": {seed}}}')
    return place


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_fake_engine_passes_the_suite(options, tmp_path):
    one, two = (fake_adapter(tmp_path / str(seed), seed) for seed in (1, 2))
    sequences = 500 if not options else 100
    memoryless = options.get("layers") == 1
    check_engine(
        lambda: FakeEngine(**options), exact=True, tolerance=0.0, memoryless=memoryless, sequences=sequences,
        adapters=(one, two),
    )  # fmt: skip


class GapLeftOpen(FakeState):
    def _evict(self, spans):
        super()._evict(spans)
        self.values[:, spans[0].start :] = np.roll(self.values[:, spans[0].start :], 1, axis=1)


class ForgetsOneLess(FakeState):
    def rewind(self, count):
        super().rewind(count)
        if count > 2:
            self.values[:, self.length - 1] += 1


class ForgetsPosition(FakeState):
    def restore(self, segment):
        super().restore(segment)
        self.held.position -= 1


class RestoresShifted(FakeState):
    def restore(self, segment):
        arrays = [np.roll(array, 1, axis=2) for array in segment.arrays]
        super().restore(KeyValues(segment.model, segment.form, segment.start, arrays))


class RemembersDrafts(FakeState):
    def rewind(self, count):
        part = self.recurrent
        at, part.position = part.position, 0  # without going back
        super().rewind(count)
        part.position = min(at, self.position)


class ReplaysFromTheStart(FakeState):
    def rewind(self, count):
        self.recurrent._checkpoints = {0: (np.zeros(16, np.float32),)}
        super().rewind(count)


class LosesCheckpoints(FakeState):
    def restore(self, segment):
        super().restore(KeyValues(segment.model, segment.form, segment.start, segment.arrays))


class HandsOutTheTokenBefore(FakeState):
    def cached(self, layer, start, stop):
        return super().cached(layer, max(0, start - 1), stop - (start > 0))


class SavesLate(FakeState):
    def save(self, start, stop):
        return super().save(max(0, start - 1), stop)


class Engine(FakeEngine):
    state_class: type[FakeState] = FakeState

    def _start(self, storage: KVCacheConfig) -> FakeState:
        return self.state_class(self, storage)


class RoundsByChunk(Engine):
    def forward(self, chunks):
        return [
            rows * np.float32(1 + 1e-6 * len(c.tokens)) for rows, c in zip(super().forward(chunks), chunks, strict=True)
        ]


class RoundsByBatch(Engine):
    def forward(self, chunks):
        return [rows * np.float32(1 + 1e-6 * len(chunks)) for rows in super().forward(chunks)]


class MixesUpBatch(Engine):
    def forward(self, chunks):
        found = super().forward(chunks)
        same = len({rows.shape for rows in found}) == 1
        return found[::-1] if same else found


class KeepsDeadStates(Engine):
    def forward(self, chunks):
        try:
            return super().forward(chunks)
        except InvalidInput:
            for chunk in chunks:
                self.states.append(chunk.state)
                chunk.state._engine = self
            raise


class LeaksVendorErrors(Engine):
    def forward(self, chunks):
        if any(token < 0 for chunk in chunks for token in chunk.tokens):
            raise IndexError("negative")
        return super().forward(chunks)


class RoundsByThreads(Engine):
    def __init__(self, **options):
        super().__init__(threads=4, **options)

    def forward(self, chunks):
        return [rows * np.float32(1 + 1e-6 * self.threads) for rows in super().forward(chunks)]


class GivesOneRowTooMany(Engine):
    def forward(self, chunks):
        return super().forward(
            [Chunk(c.state, c.tokens, max(1, c.num_logits) if c.tokens else 0, c.exit_layer) for c in chunks]
        )


class HidesNothing(Engine):
    def forward(self, chunks):
        return super().forward([chunk._replace(hidden=False) for chunk in chunks])


class CannotBeInterrupted(Engine):
    def interrupt(self):
        pass


class LivesOn(Engine):
    def close(self):
        for state in list(self.states):
            state.close()


def with_state(state: type[FakeState]) -> type[Engine]:
    return type(state.__name__, (Engine,), {"state_class": state})


BROKEN = {
    "the gap stays open": (with_state(GapLeftOpen), "evictions_close_the_gap"),
    "rewind leaves a trace": (with_state(ForgetsOneLess), "no_operation_leaves_a_trace"),
    "restore forgets the position": (with_state(ForgetsPosition), "no_operation_leaves_a_trace"),
    "restore shifts": (with_state(RestoresShifted), "segments_survive_the_disk"),
    "save starts early": (with_state(SavesLate), "segments_survive_the_disk"),
    "rounding by chunk": (RoundsByChunk, "chunks_do_not_matter"),
    "rounding by batch": (RoundsByBatch, "batching_does_not_matter"),
    "rounding by threads": (RoundsByThreads, "threads_change_between_calls"),
    "rows of another sequence": (MixesUpBatch, "batching_does_not_matter"),
    "dead states live": (KeepsDeadStates, "limits_are_errors"),
    "dead states keep their room": (KeepsDeadStates, "a_failed_call_closes_only_its_states"),
    "a vendor's error": (LeaksVendorErrors, "limits_are_errors"),
    "a row too many": (GivesOneRowTooMany, "logits_have_the_asked_shape"),
    "a recurrent part that is not rewound": (with_state(RemembersDrafts), "no_operation_leaves_a_trace"),
    "a rewind that replays everything": (with_state(ReplaysFromTheStart), "a_recurrent_part_follows"),
    "a restore that replays everything": (with_state(LosesCheckpoints), "a_recurrent_part_follows"),
    "wrong drafts that leave a trace in a window": (with_state(ForgetsOneLess), "kept_tokens_depend_on_the_text"),
    "logits as hidden states": (HidesNothing, "hidden_states"),
    "keys of the tokens before": (with_state(HandsOutTheTokenBefore), "cached_keys_are_those_of_the_tokens"),
    "deaf to interruptions": (CannotBeInterrupted, "an_interrupted_engine_calls_nothing"),
    "alive after close": (LivesOn, "a_closed_engine_refuses"),
}


@pytest.mark.parametrize(("engine", "check"), BROKEN.values(), ids=BROKEN)
def test_suite_fails_broken_engine(engine, check):
    layers = 1 if check == "evictions_close_the_gap" else 2
    judge = Judge(exact=True, tolerance=0.0, exact_batches=True, sequences=100, memoryless=layers == 1)
    recurrent = {"checkpoint_tokens": 4} if "recurrent" in check or engine.state_class is RemembersDrafts else {}
    with opened(lambda: engine(layers=layers, **recurrent)) as broken, pytest.raises((AssertionError, IndexError)):
        CHECKS[check](broken, judge)


@pytest.mark.parametrize("engine", [RoundsByChunk, RoundsByBatch])
def test_tolerance_covers_rounding_only(engine):
    check_engine(engine, exact=False, tolerance=1e-4, sequences=50)
    with pytest.raises(AssertionError, match="apart"):
        check_engine(MixesUpBatch, exact=False, tolerance=1e-4, sequences=50)


def test_batches_may_round_where_stated():
    check_engine(RoundsByBatch, exact=True, exact_batches=False, tolerance=1e-4, sequences=50)


def test_eviction_in_deep_model_differs_from_never_fed():
    engine = FakeEngine()
    storage = KVCacheConfig(capacity_tokens=32, kv_bits=8)
    evicted, never_fed = engine.start(storage), engine.start(storage)
    engine.forward([Chunk(evicted, [1, 2, 3, 4, 5], 0), Chunk(never_fed, [1, 4, 5], 0)])
    evicted.evict(1, 3)
    found = engine.forward([Chunk(evicted, [6], 1), Chunk(never_fed, [6], 1)])
    assert not np.array_equal(found[0], found[1])
    assert evicted.position == 6 and evicted.length == never_fed.length == 4


def test_cache_widths_hold_equal_values():
    engine = FakeEngine()
    states = [engine.start(KVCacheConfig(capacity_tokens=32, kv_bits=bits)) for bits in (16, 8)]
    first, second = engine.forward([Chunk(state, [7, 8, 9], 3) for state in states])
    assert np.array_equal(first, second)
    assert states[0].bytes == 2 * states[1].bytes
