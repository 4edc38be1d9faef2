"""The check of engines that change their number of threads between two calls."""

from __future__ import annotations

import numpy as np

from edgekit.contracts.engine import Engine
from edgekit.contracts.feeding import feed
from edgekit.testing.judging import Judge, refused, require, storage_for, words


def check_threads_change_between_calls(engine: Engine, judge: Judge) -> None:
    """Fewer threads give the same logits, and states stay valid; an engine that cannot change threads refuses."""
    most = engine.abilities.threads
    if most is None:
        refused(lambda: engine.use_threads(1), "use_threads without the ability")
        return
    require(most >= 1, f"abilities.threads is {most}")
    refused(lambda: engine.use_threads(0), "no threads")
    refused(lambda: engine.use_threads(most + 1), "more threads than abilities.threads")
    tokens = words(engine, np.random.default_rng(15), 12)
    state = engine.start(storage_for(engine))
    expected = [feed(engine, state, part, 1) for part in (tokens[:8], tokens[8:])]
    state.close()
    state = engine.start(storage_for(engine))
    found = [feed(engine, state, tokens[:8], 1)]
    engine.use_threads(1)
    found.append(feed(engine, state, tokens[8:], 1))
    engine.use_threads(most)
    for rows, others in zip(found, expected, strict=True):
        judge.same(rows, others, "with other threads")
    state.close()
