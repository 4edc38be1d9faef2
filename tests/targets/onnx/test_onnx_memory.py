"""Keys and values take memory for each token; packed weights are mapped from a cache, whose failures are harmless."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import family_models as models
import tiny_models
from edgekit_onnx import prepacking
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import FAST, export
from edgekit_onnx.kv_arena import KEY, VALUE, LayerShape, MappedKVArena
from edgekit_onnx.memory import packed_share
from edgekit_onnx.unpacked import weights
from engines import Model, onnx_model

import edgekit
from edgekit.common import packed_weights as packed
from edgekit.common.content_store import IN_USE, ContentStore
from edgekit.common.file_lock import file_lock
from edgekit.common.free_memory import Free
from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.errors import DoesNotFit

pytestmark = [pytest.mark.onnx, pytest.mark.quantize, pytest.mark.usefixtures("own_operators")]

apart = pytest.mark.usefixtures("child_processes")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and only Linux gives single pages back")
MIB = 1 << 20


def anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def sealed_model(folder: Path, *, config: dict[str, Any] | None = None, **plan: Any) -> Model:
    model = {"recipe": "s4-g32", "family": "llama", "exits": (1,), "chunk_tokens": 64, **plan}
    return onnx_model(level=FAST, config=config, **model).sealed(folder)


def say(made: Model) -> tuple[np.ndarray[Any, Any], tuple[str, ...]]:
    """Some logits, and the engine's notes."""
    engine = made.open()
    state = engine.start(made.plan.storage)
    found = engine.forward([Chunk(state, list(models.tokens_of(20)), 20)])[0]
    engine.close()
    return found, engine.notes


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return sealed_model(tmp_path_factory.mktemp("sealed"))


def kept(home: Path) -> list[Path]:
    return sorted((home / "packed").iterdir())


@linux
def test_arena_takes_memory_for_its_tokens_only() -> None:
    """64 tokens in one slot; their memory is returned when the state closes."""
    layers = [LayerShape(8, 64)] * 24
    slab = MappedKVArena(layers, 4, 16_384, np.float32)
    before = anonymous_bytes()
    for layer in range(24):
        for kind in (KEY, VALUE):
            with slab.edit(layer, kind, 1) as row:
                row[:, :64] = 1.0
    held = anonymous_bytes() - before
    tokens = 64 * 24 * 2 * 8 * 64 * 4
    assert tokens <= held < 1.2 * tokens + 4 * MIB
    slab.trim(1, 0)
    assert anonymous_bytes() - before < 3 * MIB
    slab.close()


@linux
def test_eviction_returns_memory() -> None:
    slab = MappedKVArena([LayerShape(4, 64)] * 8, 2, 8192, np.float32)
    before = anonymous_bytes()
    for layer in range(8):
        for kind in (KEY, VALUE):
            with slab.edit(layer, kind, 0) as row:
                row[:] = 1.0
    full = anonymous_bytes() - before
    slab.trim(0, 2048)
    left = anonymous_bytes() - before
    assert left < full * 0.27
    assert float(slab.read(0, KEY, 0)[3, 2047, 63]) == 1.0
    slab.close()


@linux
@pytest.mark.parametrize("bits", [32, 16])
def test_each_step_of_a_long_text_reuses_the_buffers_of_the_last(tmp_path: Path, bits: int) -> None:
    """Attention in float16 requests a larger buffer at each step: 700 KB here, for each thread."""
    long = {"head_dim": 256, "num_hidden_layers": 2, "max_position_embeddings": 1024}
    made = sealed_model(tmp_path, config=long, context=1024)
    engine = OnnxEngine(made.plan, made.files)
    state = engine.start(KVCacheConfig(capacity_tokens=1024, kv_bits=bits))
    tokens = list(models.tokens_of(800))
    for start in range(0, 608, 32):
        engine.forward([Chunk(state, tokens[start : start + 32], 1)])
    before = anonymous_bytes()
    for token in tokens[608:]:
        engine.forward([Chunk(state, [token], 1)])
    cached = 192 * 2 * 2 * 2 * 256 * bits // 8
    assert anonymous_bytes() - before < cached + 16 * MIB
    engine.close()


def test_spinning_changes_no_bit_and_is_noted(sealed: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    briefly, quiet_notes = say(sealed)
    monkeypatch.setenv("EDGEKIT_SPIN", "off")
    asleep, _ = say(sealed)
    monkeypatch.setenv("EDGEKIT_SPIN", "on")
    spinning, notes = say(sealed)
    assert np.array_equal(asleep, briefly) and not any("EDGEKIT_SPIN" in note for note in quiet_notes)
    assert np.array_equal(asleep, spinning) and any("EDGEKIT_SPIN=on" in note for note in notes)


@pytest.mark.parametrize(
    "model",
    [
        *({"recipe": recipe, "config": {"attention_bias": True}} for recipe in ("s4-g32", "s4-g128", "s8", "float32")),
        *({"family": family} for family in ("qwen3", "gemma3")),
        {"config": {"vocab_size": 163}},
    ],
    ids=str,
)
def test_packed_weights_are_built_once_and_agree(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    """Also scales so small that onnxruntime would keep them in the graph, and weights that shapes misalign."""
    sealed = sealed_model(tmp_path, **model)
    first, notes = say(sealed)
    assert notes == () and len(kept(home)) == 1
    made = {path.name: path.stat().st_mtime_ns for path in kept(home)[0].iterdir()}
    monkeypatch.delattr(packed, "file_sha256")  # later openings compare times and sizes, which takes half the time
    second, _ = say(sealed)
    assert {path.name: path.stat().st_mtime_ns for path in kept(home)[0].iterdir()} == made
    monkeypatch.setenv("EDGEKIT_PACKED", "off")
    plain, said = say(sealed)
    assert "turned off" in said[0]
    np.testing.assert_array_equal(first, plain)
    np.testing.assert_array_equal(second, plain)


@pytest.mark.parametrize("damage", ["short", "flipped", "missing", "no manifest"])
def test_damaged_packed_weights_are_rebuilt(sealed: Model, home: Path, damage: str) -> None:
    expected, _ = say(sealed)
    victim = kept(home)[0] / ("packed.json" if damage == "no manifest" else "head.bin")
    if damage == "short":
        os.truncate(victim, victim.stat().st_size - 1)
    elif damage == "flipped":
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 255
        victim.write_bytes(bytes(data))
    else:
        victim.unlink()
    found, notes = say(sealed)
    np.testing.assert_array_equal(found, expected)
    assert notes == ()
    packed.check_whole(kept(home)[0])


@pytest.mark.parametrize("recipe", ["s4-g32", "s8", "float32"])
def test_a_large_head_is_opened_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    whole = onnx_model("llama", recipe, FAST, config={"tie_word_embeddings": False}, chunk_tokens=64)
    monkeypatch.setattr("edgekit_onnx.packing.SLICE_BYTES", 1)
    export(whole.plan, whole.weights, tmp_path, lambda done, total, what: None)
    sliced = whole._replace(files=tmp_path)
    assert b"head.joined" in (tmp_path / "head.onnx").read_bytes()
    np.testing.assert_array_equal(say(sliced)[0], say(whole)[0])
    stored = (dict(weights(each.plan, each.files)) for each in (sliced, whole))
    np.testing.assert_array_equal(*(each["lm_head.weight"] for each in stored))


def test_differing_packed_weights_are_not_used(sealed: Model, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed here, as in an app that has no Python to start."""
    answers = iter(range(100))
    monkeypatch.setattr("edgekit_onnx.prepacking.probe", lambda session: np.array(next(answers)))
    monkeypatch.setattr("sys.executable", "")
    _, notes = say(sealed)
    assert "gives other logits once its weights are packed" in notes[0] and kept(home) == []


def test_packed_graphs_do_not_convert_a_cache_of_16_bits(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An artifact that is exported for such a cache agrees too, and its packed graph has no casts for every step."""
    import onnx

    sealed = sealed_model(tmp_path, kv_bits=16)
    packed_logits, notes = say(sealed)
    assert notes == ()
    for path in kept(home)[0].glob("body-*.onnx"):
        graph = onnx.load(path, load_external_data=False).graph
        assert "Cast" not in {node.op_type for node in graph.node}
    monkeypatch.setenv("EDGEKIT_PACKED", "off")
    np.testing.assert_array_equal(packed_logits, say(sealed)[0])


@apart
@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("kill -9 $$", "was ended by signal 9; is there too little memory?"),
        ("exec sleep 600", "was ended after 1 s; EDGEKIT_PACKED=off"),
    ],
)
def test_a_packing_process_that_dies_or_hangs_is_reported(
    sealed: Model, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, does: str, said: str
) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\n{does}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr("edgekit_onnx.prepacking.time_limit_s", lambda weights: 1)
    assert said in say(sealed)[1][0] and kept(home) == []


@apart
def test_weights_are_packed_in_another_process(sealed: Model, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("edgekit_onnx.prepacking.pack")  # it is not called in this process
    _, notes = say(sealed)
    assert notes == () and len(kept(home)) == 1


def test_read_only_disk_falls_back_with_a_note(sealed: Model, home: Path) -> None:
    home.write_text("a file where the folder should be")
    _, notes = say(sealed)
    assert "cannot be kept" in notes[0] and "weights are copied instead" in notes[0]


def test_without_memory_to_pack_weights_are_copied_and_without_memory_to_copy_nothing_is_opened(
    sealed: Model, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = (sealed.files / "weights.bin").stat().st_size
    free = weights * 2
    monkeypatch.setattr(packed, "free_memory", lambda: Free(bytes=free, source="a limit"))
    monkeypatch.setattr("edgekit_onnx.loading.free_memory", lambda: Free(bytes=free, source="a limit"))
    _, notes = say(sealed)
    assert "packing the weights takes" in notes[0] and "are free (a limit); weights are copied" in notes[0]
    assert kept(home) == []
    free = weights
    with pytest.raises(DoesNotFit, match=r"the copies take .* are free \(a limit\); open it once with more memory"):
        say(sealed)


def test_copied_weights_count_as_private_memory(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = tiny_models.artifact_of(tiny_models.write_tiny(tmp_path / "tiny"), tmp_path / "tiny.edgekit")
    weights = (artifact / "weights.bin").stat().st_size
    with edgekit.open(artifact) as runtime:
        mapped = runtime.memory().predicted
    monkeypatch.setenv("EDGEKIT_PACKED", "off")
    with edgekit.open(artifact) as runtime:
        copied = runtime.memory().predicted
    assert mapped.private_weights_bytes == 0 and 1.2 < copied.private_weights_bytes / weights < 1.8
    assert copied.private_bytes - mapped.private_bytes == copied.private_weights_bytes
    with pytest.raises(DoesNotFit, match=r"of private memory are needed.*packed weights are turned off"):
        edgekit.open(artifact, memory=copied.private_bytes - 1, on_pressure="refuse")


def test_full_disk_falls_back_with_a_note(sealed: Model, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "free_bytes", lambda path: 1000)
    _, notes = say(sealed)
    assert "0.977 KiB are free" in notes[0]
    assert kept(home) == []


def test_disk_full_while_saving_leaves_nothing(sealed: Model, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = prepacking.refuse_short

    def cut(path: Path) -> None:
        if path.name == "head.onnx":
            os.truncate(path.with_suffix(".bin"), 100)
        real(path)

    monkeypatch.setattr("edgekit_onnx.loading.refuse_short", cut)
    _, notes = say(sealed)
    assert "is the disk full?" in notes[0] and kept(home) == []


def test_cache_drops_least_recently_used(sealed: Model, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(sealed)
    size = sum(path.stat().st_size for path in kept(home)[0].iterdir())
    old, older = home / "packed" / f"{'a' * 64}", home / "packed" / f"{'b' * 64}"
    for place, age in ((old, 100), (older, 200)):
        shutil.copytree(kept(home)[-1] if place is old else old, place)
        os.utime(place, (time.time() - age, time.time() - age))
    needed = int((sealed.files / "weights.bin").stat().st_size * packed_share(own=False))
    shutil.rmtree(next(place for place in kept(home) if place not in (old, older)))
    monkeypatch.setenv("EDGEKIT_PACKED", str(needed + size + 100))
    say(sealed)
    assert old in kept(home) and older not in kept(home) and len(kept(home)) == 2
    monkeypatch.setenv("EDGEKIT_PACKED", "1000")
    shutil.rmtree(home / "packed")
    _, notes = say(sealed)
    assert "EDGEKIT_PACKED allows 0.977 KiB" in notes[0]


def test_leftovers_of_killed_process_are_removed(sealed: Model, home: Path) -> None:
    say(sealed)
    (whole,) = kept(home)
    left, held, own = (home / "packed" / f".{key}.part" for key in ("a" * 64, "b" * 64, whole.name))
    for folder in (left, held):
        folder.mkdir()
    whole.rename(own)
    (own / "left").write_bytes(b"by the same process")
    with file_lock(home / "packed" / f".{'b' * 64}.lock", None, ""):
        say(sealed)
    assert not left.exists() and held.exists() and not own.exists()
    packed.check_whole(whole)
    assert not (whole / "left").exists()


def test_packed_weights_are_held_while_an_engine_is_open(sealed: Model, home: Path) -> None:
    engine = OnnxEngine(sealed.plan, sealed.files)
    store, (folder,) = ContentStore(home / "packed"), kept(home)
    assert store.drop(folder) == IN_USE
    engine.close()
    del engine
    gc.collect()
    assert store.drop(folder) == "" and kept(home) == []


def test_each_artifact_has_its_packed_weights(sealed: Model, home: Path, tmp_path: Path) -> None:
    say(sealed)
    say(sealed_model(tmp_path, config={"num_hidden_layers": 2}))
    assert len(kept(home)) == 2


@linux
@apart
@pytest.mark.parametrize("worth", [0, 1 << 40], ids=["given back", "kept"])
def test_memory_of_long_prefill_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worth: int) -> None:
    """Memory is returned with the last chunk, not with every chunk; without the option it would stay."""
    monkeypatch.setattr("edgekit_onnx.engine.RETURNED_BYTES", 0)
    config = {"hidden_size": 512, "intermediate_size": 2048}
    engine = onnx_model("llama", level=FAST, config=config, context=2048, chunk_tokens=1024).open()
    state = engine.start(engine.plan.storage)
    engine.forward([Chunk(state, list(models.tokens_of(64)), 1)])  # what others left in the process's arena goes
    state.rewind(64)
    monkeypatch.setattr("edgekit_onnx.engine.RETURNED_BYTES", worth)
    engine.forward([Chunk(state, [1, 2], 1)])
    before = anonymous_bytes() - 2 * state.bytes // 2048
    engine.forward([Chunk(state, list(models.tokens_of(1000)), 0)])
    between = anonymous_bytes() - before - state.length * state.bytes // 2048
    engine.forward([Chunk(state, [3, 4, 5], 1)])
    after = anonymous_bytes() - before - state.length * state.bytes // 2048
    engine.close()
    assert between > 12 * MIB
    assert after < 4 * MIB if worth == 0 else after > 12 * MIB


def test_only_the_first_opening_with_16_bits_derives_graphs(tmp_path: Path, home: Path) -> None:
    """Importing onnx, with which they are derived, takes 0.06 s and 4 MiB."""
    sealed = sealed_model(tmp_path, kv_bits=16)
    first, _ = say(sealed)
    assert len(list(kept(home)[0].glob("half-body-*.onnx"))) == 2
    program = (
        "import json, sys; from pathlib import Path; from edgekit_onnx.engine import OnnxEngine; "
        "from edgekit.contracts.plan import Plan; from edgekit.contracts.engine import Chunk; "
        "plan = Plan.model_validate_json(Path(sys.argv[1]).read_text()); "
        "engine = OnnxEngine(plan, Path(sys.argv[2])); state = engine.start(plan.storage); "
        "found = engine.forward([Chunk(state, json.loads(sys.argv[3]), 20)])[0]; "
        "print(json.dumps(['onnx' in sys.modules, found.tolist()]))"
    )
    place = tmp_path / "plan.json"
    place.write_text(sealed.plan.to_json())
    tokens = json.dumps(list(map(int, models.tokens_of(20))))
    done = subprocess.run(
        [sys.executable, "-c", program, str(place), str(sealed.files), tokens],
        capture_output=True,
        text=True,
        check=True,
    )
    has_onnx, found = json.loads(done.stdout.splitlines()[-1])
    assert not has_onnx
    np.testing.assert_array_equal(np.array(found, np.float32), first)


@pytest.mark.parametrize(("size", "name"), [(0, "edgekit.slow"), (1 << 40, "edgekit")])
def test_packing_says_what_it_does_once_and_commands_show_what_is_large(
    sealed: Model, home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, size: int, name: str
) -> None:
    monkeypatch.setattr(packed, "_SAID_BYTES", size)
    caplog.set_level("INFO", logger="edgekit")
    say(sealed)
    say(sealed)
    ((line, logger),) = [(each.getMessage(), each.name) for each in caplog.records if "packing" in each.getMessage()]
    assert logger == name
    assert "of weights for this processor, once; later openings map them" in line
