"""Arguments and files for which llama.cpp would end the process are typed errors, and never a signal.

The suite of engines has the calls that every engine must refuse.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from edgekit_llamacpp import LlamaCppTarget, library
from edgekit_llamacpp.capabilities import capabilities
from edgekit_llamacpp.layout import WEIGHTS
from engines import Model, llamacpp_model

from edgekit.artifact.artifact import open_artifact, seal
from edgekit.contracts.engine import Chunk, Engine, State
from edgekit.contracts.feeding import feed
from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.contracts.recipe import named_recipe
from edgekit.enginekit.kv_segment import KeyValues
from edgekit.errors import DamagedArtifact, EdgekitError, Unsupported
from edgekit.quant.neutral_gguf import refusal
from edgekit.testing import write_adapter

pytestmark = [pytest.mark.llamacpp, pytest.mark.quantize]
runs = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
HELPERS = Path(__file__).parents[2] / "helpers"
Case = Callable[[Engine, Path], object]  # the second is an empty folder


def started(engine: Engine, tokens: int = 0) -> State:
    state = engine.start(engine.plan.storage)  # type: ignore[attr-defined]
    if tokens:
        feed(engine, state, [5] * tokens, 0)
    return state


def fed(tokens: Sequence[int], cached: int) -> Case:
    return lambda engine, _: engine.forward([Chunk(started(engine, cached), tokens, 1)])


def one_state_twice(engine: Engine, _: Path) -> object:
    state = started(engine)
    return engine.forward([Chunk(state, [1], 1), Chunk(state, [2], 1)])


def a_state_of_another_engine(engine: Engine, _: Path) -> object:
    return opened().forward([Chunk(started(engine), [1], 1)])


def stored(**changes: object) -> Case:
    return lambda engine, _: engine.start(engine.plan.storage.model_copy(update=changes))  # type: ignore[attr-defined]


def segment(change: Callable[[KeyValues], KeyValues], cached: int = 0) -> Case:
    """Restore a changed segment of 20 tokens into a state that has `cached` ones."""

    def case(engine: Engine, _: Path) -> object:
        saved = started(engine, 20).save(0, 20)
        assert isinstance(saved, KeyValues)
        other = started(engine, cached)
        other.restore(change(saved))
        return engine.forward([Chunk(other, [1], 1)])

    return case


def damaged_segment_file(engine: Engine, folder: Path) -> object:
    path = folder / "segment"
    started(engine, 20).save(0, 20).write(path)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    return engine.read_segment(path)


def adapter(rank: int = 8, **changes: object) -> Case:
    def case(engine: Engine, folder: Path) -> object:
        model = engine.plan.model.model_copy(update=changes)  # type: ignore[attr-defined]
        return engine.load_adapter("one", write_adapter(folder / "adapter", model, rank=rank))

    return case


CASES: dict[str, Case] = {
    # llama_decode
    "more tokens than a batch": fed([1] * 65, 0),
    "more tokens than the cache has left": fed([1] * 17, 240),
    "one state twice": one_state_twice,
    "a state of another engine": a_state_of_another_engine,
    # llama_init_from_model
    "a cache wider than planned": stored(capacity_tokens=257),
    "a cache of 8 bits with narrow heads": stored(kv_bits=8),
    # llama_memory_seq_rm, llama_memory_seq_add
    "evicting backwards": lambda engine, _: started(engine, 20).evict(5, 4),
    # llama_state_seq_get_data, llama_state_seq_set_data
    "saving beyond the end": lambda engine, _: started(engine, 20).save(0, 21),
    "saving backwards": lambda engine, _: started(engine, 20).save(9, 4),
    "a segment of another model": segment(lambda saved: KeyValues("x", saved.form, saved.start, saved.arrays)),
    "a segment of another width": segment(lambda saved: KeyValues(saved.model, "q4_0", saved.start, saved.arrays)),
    "a segment that begins elsewhere": segment(lambda saved: saved.split(7)[1]),
    "a segment without room": segment(lambda saved: KeyValues(saved.model, saved.form, 240, saved.arrays), cached=240),
    "a damaged segment file": damaged_segment_file,
    # llama_adapter_lora_init
    "an adapter of other shapes": adapter(hidden_size=32),
    "an adapter of too high a rank": adapter(rank=9),
}


def opened(exact: bool = False, **changes: object) -> Engine:
    """An engine with room for 3 sequences of 256 tokens and for adapters."""
    made: Model = llamacpp_model("llama", context=256, sequences=3, adapter_rank=8)
    return LlamaCppTarget().open(made.plan.model_copy(update=changes), made.files, exact=exact)


@runs
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_call_that_would_end_the_process_is_a_typed_error(case: Case, exact: bool, tmp_path: Path) -> None:
    engine = opened(exact)
    with pytest.raises(EdgekitError):
        case(engine, tmp_path)
    engine.close()


@runs
@pytest.mark.parametrize("changes", [{"sequences": 257}, {"intermediate_size": 256}], ids=str)
def test_a_plan_that_the_library_or_the_file_cannot_follow_is_a_typed_error(changes: dict[str, Any]) -> None:
    model = llamacpp_model("llama").plan.model
    asked = changes if "sequences" in changes else {"model": model.model_copy(update=changes)}
    with pytest.raises(EdgekitError):
        opened(**asked)


@runs
def test_forged_artifacts_that_agree_with_their_plans_never_end_the_process(tmp_path: Path) -> None:
    """They run in a process of their own, which may take 4 GiB; its exit status says whether the library ended it."""
    command = [sys.executable, HELPERS / "forged_models.py", "--count", "150"]
    known = {**os.environ, "EDGEKIT_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=known)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-200:]} {done.stderr[-1000:]}"
    ran = [line for line in done.stdout.splitlines() if line.endswith(": ran")]
    assert len(ran) > 20  # the others were refused by name


@runs
def test_an_artifact_that_is_sealed_anew_must_still_agree_with_its_plan(tmp_path: Path) -> None:
    """Other weights under the same header open: a seal proves integrity, not origin."""
    made = llamacpp_model("llama")
    data, key = (made.files / WEIGHTS).read_bytes(), b"llama.attention.head_count_kv"
    for name, place in {"header": data.index(key) + len(key) + 4, "weights": len(data) - 1}.items():
        changed = bytearray(data)
        changed[place] ^= 1
        (tmp_path / "staging").mkdir()
        (tmp_path / "staging" / WEIGHTS).write_bytes(changed)
        seal(tmp_path / "staging", tmp_path / name, made.plan, weights_sha256="0" * 64, tools={}, self_check="none")
    forged = open_artifact(tmp_path / "header")
    forged.check_hashes()
    with pytest.raises(DamagedArtifact, match=r"head_count_kv is 3, and the plan says 2"):
        forged.working_target().open(forged.plan, forged.folder)
    other = open_artifact(tmp_path / "weights")
    other.working_target().open(other.plan, other.folder).close()


def test_evictions_are_refused_where_all_layers_have_windows() -> None:
    plan = llamacpp_model("gemma3").plan
    windowed = plan.model.model_copy(update={"layers": plan.model.layers[:5]})
    able, unable = (capabilities(model, plan.recipe, "cpu", 128) for model in (plan.model, windowed))
    assert able.can_evict and not unable.can_evict
    asked = plan.model_copy(update={"model": windowed, "cache": KVEvictionPolicy.of(64, 4)})
    with pytest.raises(Unsupported, match="if all layers have windows"):
        LlamaCppTarget().check(asked)


def test_a_model_without_positions_is_refused() -> None:
    model = llamacpp_model("smollm3").plan.model
    layers = tuple(layer.model_copy(update={"rope": None}) for layer in model.layers)
    found = refusal(model.model_copy(update={"layers": layers}), named_recipe("s4-g32"), 128)
    assert found is not None and "none of its layers has positions" in found
