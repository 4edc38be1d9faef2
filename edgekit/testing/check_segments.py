"""Conformance checks of segments in files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgekit.contracts.feeding import feed
from edgekit.testing.judging import Judge, refused, require, storage_for, words

if TYPE_CHECKING:
    from edgekit.contracts.engine import Engine


def check_segments_survive_the_disk(engine: Engine, judge: Judge) -> None:
    """A written segment reads back and gives the same logits; a damaged one is refused."""
    able = engine.capabilities
    state = engine.start(storage_for(engine))
    tokens = words(engine, np.random.default_rng(6), 10)
    feed(engine, state, tokens, 0)
    if not able.can_save:
        refused(lambda: state.save(0, 4), "save on an engine that says it cannot")
        return
    segment = state.save(3, 8)
    require(segment.tokens == 5 and segment.bytes > 0, "a segment does not know its size")
    expected = feed(engine, state, [1], 1)
    state.close()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "segment"
        segment.write(path)
        again = engine.start(storage_for(engine))
        feed(engine, again, tokens[:3], 0)
        again.restore(engine.read_segment(path))
        judge.same(feed(engine, again, [*tokens[8:], 1], 1), expected, "restored from disk")
        again.close()
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        refused(lambda: engine.read_segment(path), "a segment cut short by a byte")
        path.write_bytes(b"")
        refused(lambda: engine.read_segment(path), "an empty segment")
    small = engine.start(storage_for(engine, 4))
    refused(lambda: small.restore(segment), "a segment larger than the state")
