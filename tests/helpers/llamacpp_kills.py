"""Calls that llama.cpp would end the process for, one after the other: each must be a typed error before.

The suite of engines has the calls that every engine must refuse.

    python tests/helpers/llamacpp_kills.py PLAN.json FILES SCRATCH fast|exact

A case prints its name when it begins, so that the name of one that ends the process is its last word.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from edgekit_llamacpp import LlamaCppTarget
from forged_models import say

from edgekit.contracts.engine import Chunk, Engine, State
from edgekit.contracts.feeding import feed
from edgekit.contracts.kv_policy import Eviction
from edgekit.contracts.plan import Plan
from edgekit.enginekit.kv_segment import KeyValues
from edgekit.errors import EdgekitError
from edgekit.testing import write_adapter


class Opened(NamedTuple):
    """An artifact with room for 3 sequences of 256 tokens and for adapters."""

    plan: Plan
    files: Path
    scratch: Path
    exact: bool

    def engine(self, **changes: object) -> Engine:
        return LlamaCppTarget().open(self.plan.model_copy(update=changes), self.files, exact=self.exact)

    def started(self, tokens: int = 0) -> tuple[Engine, State]:
        engine = self.engine()
        state = engine.start(self.plan.storage)
        if tokens:
            feed(engine, state, [5] * tokens, 0)
        return engine, state


def feed_chunk(tokens: Sequence[int], rows: int, cached: int = 0) -> Callable[[Opened], object]:
    def case(opened: Opened) -> object:
        engine, state = opened.started(cached)
        return engine.forward([Chunk(state, tokens, rows)])

    return case


def one_state_twice(opened: Opened) -> object:
    engine, state = opened.started()
    return engine.forward([Chunk(state, [1], 1), Chunk(state, [2], 1)])


def a_state_of_another_engine(opened: Opened) -> object:
    return opened.engine().forward([Chunk(opened.started()[1], [1], 1)])


def a_storage(**changes: object) -> Callable[[Opened], object]:
    def case(opened: Opened) -> object:
        return opened.engine().start(opened.plan.storage.model_copy(update=changes))

    return case


def on_state(call: Callable[[State], object]) -> Callable[[Opened], object]:
    """A call of a state with 20 tokens."""
    return lambda opened: call(opened.started(20)[1])


def a_segment(change: Callable[[KeyValues], KeyValues], cached: int = 0) -> Callable[[Opened], object]:
    """Restore a changed segment of 20 tokens into a state that has `cached` ones."""

    def case(opened: Opened) -> object:
        engine, state = opened.started(20)
        segment = state.save(0, 20)
        assert isinstance(segment, KeyValues)
        other = engine.start(opened.plan.storage)
        if cached:
            feed(engine, other, [5] * cached, 0)
        other.restore(change(segment))
        return engine.forward([Chunk(other, [1], 1)])

    return case


def a_damaged_segment_file(opened: Opened) -> object:
    engine, state = opened.started(20)
    path = opened.scratch / "segment"
    state.save(0, 20).write(path)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    return engine.read_segment(path)


def an_adapter_of_other_shapes(opened: Opened) -> object:
    small = opened.plan.model.model_copy(update={"hidden_size": 32})
    return opened.engine().load_adapter("one", write_adapter(opened.scratch / "shapes", small))


def an_adapter_of_too_high_rank(opened: Opened) -> object:
    return opened.engine().load_adapter("one", write_adapter(opened.scratch / "rank", opened.plan.model, rank=9))


def an_adapter_dropped_in_use(opened: Opened) -> object:
    engine = opened.engine()
    engine.load_adapter("one", write_adapter(opened.scratch / "used", opened.plan.model))
    engine.start(opened.plan.storage.model_copy(update={"adapter": "one"}))
    engine.drop_adapter("one")
    return "dropped"


def planned(**changes: object) -> Callable[[Opened], object]:
    return lambda opened: opened.engine(**changes)


def wider_model(opened: Opened) -> object:
    """A plan of another size than the file's."""
    return opened.engine(model=opened.plan.model.model_copy(update={"intermediate_size": 256}))


def flip_number(name: bytes) -> Callable[[bytearray], object]:
    def change(data: bytearray) -> None:
        data[data.index(name) + len(name) + 4] ^= 1

    return change


CASES: dict[str, Callable[[Opened], object]] = {
    # llama_decode
    "more tokens than a batch": feed_chunk([1] * 65, 1),
    "a full cache": feed_chunk([1], 1, cached=256),
    "more tokens than the cache has left": feed_chunk([1] * 17, 1, cached=240),
    "one state twice": one_state_twice,
    "a state of another engine": a_state_of_another_engine,
    # llama_init_from_model, llama_set_n_threads
    "a cache wider than planned": a_storage(capacity_tokens=257),
    "a cache of 8 bits with narrow heads": a_storage(kv_bits=8),
    "a cache of 7 bits": a_storage(kv_bits=7),
    "257 sequences": planned(sequences=257),
    # llama_memory_seq_rm, llama_memory_seq_add
    "evicting backwards": on_state(lambda state: state.evict(5, 4)),
    "evicting spans that overlap": on_state(lambda state: state.evict_spans([Eviction(2, 6), Eviction(5, 8)])),
    # llama_state_seq_get_data, llama_state_seq_set_data
    "saving beyond the end": on_state(lambda state: state.save(0, 21)),
    "saving backwards": on_state(lambda state: state.save(9, 4)),
    "a segment of another model": a_segment(lambda saved: KeyValues("x", saved.form, saved.start, saved.arrays)),
    "a segment of another width": a_segment(lambda saved: KeyValues(saved.model, "q4_0", saved.start, saved.arrays)),
    "a segment that begins elsewhere": a_segment(lambda saved: saved.split(7)[1]),
    "a segment without room": a_segment(
        lambda saved: KeyValues(saved.model, saved.form, 240, saved.arrays), cached=240
    ),
    "a damaged segment file": a_damaged_segment_file,
    # llama_adapter_lora_init, llama_set_adapters_lora, llama_adapter_lora_free
    "an adapter of other shapes": an_adapter_of_other_shapes,
    "an adapter of too high a rank": an_adapter_of_too_high_rank,
    "an adapter dropped while in use": an_adapter_dropped_in_use,
    "an adapter that is not loaded": a_storage(adapter="two"),
    # llama_model_load_from_file
    "a plan of another model": wider_model,
}


def main() -> None:
    plan, files, scratch, mode = sys.argv[1:]
    opened = Opened(Plan.model_validate_json(Path(plan).read_text()), Path(files), Path(scratch), mode == "exact")
    for name, case in CASES.items():
        say(f"{name}: ")
        try:
            found = case(opened)
        except EdgekitError as error:
            say(f"{type(error).__name__} {error}\n")
        else:
            say(f"no error: {type(found).__name__}\n")


if __name__ == "__main__":
    main()
