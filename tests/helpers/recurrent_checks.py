"""Checks of models with a recurrent part, the same on every target: texts, drafts, batches, states, prefixes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import family_models as models
import numpy as np
from runtimes import codec
from speculating import check_drafts_change_no_text, check_many_drafted_prompts

from edgekit.common.progress import Progress
from edgekit.contracts import recurrent
from edgekit.contracts.engine import Chunk
from edgekit.contracts.feeding import feed
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.enginekit.base import EngineBase
from edgekit.runtime.memory.budget import MemoryBudget
from edgekit.runtime.prefix_cache.tree import Prefixes, PrefixKey, Reuse

SPACING = 4  # of checkpoints, in tests that set `recurrent.LEAST_TOKENS` to it
TOKENS = [int(token) for token in models.tokens_of(90, seed=3)]
_DIES_AFTER_SAVING = """
import os, pathlib, signal, sys
from edgekit.contracts import recurrent
recurrent.LEAST_TOKENS = int(sys.argv[1])
from edgekit.contracts.feeding import feed
from edgekit.contracts.plan import Plan
from edgekit.plugins import load_target
plan = Plan.model_validate_json(pathlib.Path(sys.argv[2]).read_text())
engine = load_target(plan.target).open(plan, pathlib.Path(sys.argv[3]), exact=True)
state = engine.start(plan.storage)
feed(engine, state, [int(token) for token in sys.argv[5].split()], 0)
state.save(0, state.length).write(pathlib.Path(sys.argv[4]))
os.kill(os.getpid(), signal.SIGKILL)
"""


class RecurrentModel:
    """The exported files of a tiny model, which tests open."""

    def __init__(
        self,
        folder: Path,
        family: str,
        recipe: str,
        target: str,
        export: Callable[[Plan, NeutralWeights, Path, Progress], None],
        engine: Callable[..., Any],
        *,
        vocab_size: int | None = None,
        **plan: Any,
    ) -> None:
        self.folder, self._engine = folder, engine
        kind, config = models.EVERY[family]
        models.write_model(folder / "model", kind, {**config, "vocab_size": vocab_size or config["vocab_size"]})
        self.weights = models.weights_of(folder / "model", recipe, folder / "store")
        chosen = models.plan_for(self.weights.model, self.weights.recipe, chunk_tokens=16, **plan)
        self.plan: Plan = chosen.model_copy(update={"target": target})
        self.files = folder / "out"
        self.files.mkdir()
        export(self.plan, self.weights, self.files, models.quiet)

    @property
    def spacing(self) -> int:
        """The tokens between two checkpoints."""
        found = recurrent.checkpoint_tokens(self.plan.model)
        assert found is not None and found < 10
        return found

    def open(self, *, exact: bool = False) -> EngineBase[Any, Any]:
        engine: EngineBase[Any, Any] = self._engine(self.plan, self.files, exact=exact)
        return engine


MakeModel = Callable[..., RecurrentModel]
"""From a family, a recipe and options of `RecurrentModel`."""


def check_drafts(make: MakeModel, family: str) -> None:
    """Drafts change no text in exact mode."""
    made = make(family, "s4-g32", vocab_size=codec().vocabulary)
    check_drafts_change_no_text(partial(made.open, exact=True))


def check_drafted_prompts(make: MakeModel, family: str, count: int) -> None:
    """Prompts with drafts have the texts that they have without, in exact mode."""
    made = make(family, "s4-g32", vocab_size=codec().vocabulary)
    check_many_drafted_prompts(partial(made.open, exact=True), count)


def check_batch_of_eight(made: Any, tolerance: float, *, exact: bool = False) -> None:
    """Eight in a batch equal eight alone, also after states between them were freed, whose places others take."""
    engine = made.open(exact=exact)
    prompts = [TOKENS[place : place + 5 + place] for place in range(8)]

    def start(prompt: list[int]) -> Any:
        state = engine.start(engine.plan.storage)
        feed(engine, state, prompt)
        return state

    alone = []
    for prompt in prompts:
        state = start(prompt)
        alone.append([engine.forward([Chunk(state, [token], 1)])[0] for token in TOKENS[40:50]])
        state.close()
    states = [start(prompt) for prompt in prompts]
    for place, token in enumerate(TOKENS[40:50]):
        found = engine.forward([Chunk(state, [token], 1) for state in states])
        for index, rows in enumerate(found):
            expected = alone[index][place]
            assert np.abs(rows - expected).max() <= tolerance * np.abs(expected).max(), (place, index)
        if place in (3, 6):
            states.pop(1).close()
            alone.pop(1)
    engine.close()


def check_killed_state(made: RecurrentModel) -> None:
    """A state that a killed process has saved continues bitwise equally in another process."""
    engine, saved = made.open(exact=True), made.folder / "saved-state"
    state = engine.start(engine.plan.storage)
    feed(engine, state, TOKENS[:30])
    expected = feed(engine, state, TOKENS[30:40], 10)
    state.close()
    plan = made.folder / "plan.json"
    plan.write_text(made.plan.to_json())
    words = " ".join(map(str, TOKENS[:30]))
    arguments = [str(recurrent.LEAST_TOKENS), str(plan), str(made.files), str(saved), words]
    killed = subprocess.run(
        [sys.executable, "-c", _DIES_AFTER_SAVING, *arguments], capture_output=True, text=True, check=False
    )
    assert killed.returncode == -9, killed.stderr
    again = engine.start(engine.plan.storage)
    again.restore(engine.read_segment(saved))
    assert again.num_replayed == 0
    np.testing.assert_array_equal(feed(engine, again, TOKENS[30:40], 10), expected)
    engine.close()


def check_prefix_hits(made: RecurrentModel, monkeypatch: Any) -> None:
    """A prefix hit computes the suffix and at most one gap between checkpoints."""
    engine = made.open(exact=True)
    reuse = Reuse(Prefixes(MemoryBudget(None)), PrefixKey("", None, 32))
    first = engine.start(engine.plan.storage)
    feed(engine, first, TOKENS[:50])
    reuse.keep(first, TOKENS[:50])
    first.close()
    computed: list[int] = []
    forward = engine._forward
    monkeypatch.setattr(
        engine,
        "_forward",
        lambda states, chunks: computed.extend(len(chunk.tokens) for chunk in chunks) or forward(states, chunks),
    )
    for shared in (50, 49, 33, 32, 7):
        prompt = [*TOKENS[:shared], *TOKENS[60:75]]
        state = engine.start(engine.plan.storage)
        assert reuse.restore(state, prompt, len(prompt) - 1) == shared
        computed.clear()
        found = feed(engine, state, prompt[shared:], 3)
        assert 15 <= sum(computed) < 15 + made.spacing, (shared, computed)
        plain = engine.start(engine.plan.storage)
        np.testing.assert_array_equal(found, feed(engine, plain, prompt, 3), str(shared))
        reuse.keep(state, prompt)
        state.close()
        plain.close()
    engine.close()
