"""The native library generates Python's texts from the same artifact, and refuses what Python refuses."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_artifacts import make_artifact
from forged_graphs import ATTACKS, rewrite
from manifests import change_manifest
from native_answers import REPEATED, tokens_of, with_plan

import edgekit
from edgekit.apps.native.build import SOURCES, run
from edgekit.apps.native.library import NativeLibrary, NativeModel, onnxruntime_library
from edgekit.artifact.artifact import open_artifact
from edgekit.common.files import file_sha256
from edgekit.common.footprint import footprint
from edgekit.errors import EdgekitError, InvalidInput

pytestmark = [pytest.mark.onnx, pytest.mark.quantize, pytest.mark.slow]
PROMPTS = ("import numpy as np", "def main():\n", "class Größe 🙂:", "for index in range(10):\n    ", "x")
SAMPLED: tuple[dict[str, float], ...] = (
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 1.0, "typical_p": 0.9},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {
        "temperature": 0.7, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.97,
        "repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2,
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def exact_model(library: NativeLibrary, demo_artifact: Path, exact_runtime: edgekit.Runtime) -> Iterator[NativeModel]:
    opened = library.open(demo_artifact, exact=True)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def exact_runtime(demo_artifact: Path, open_exact: Callable[[Path], edgekit.Runtime]) -> Iterator[edgekit.Runtime]:
    with open_exact(demo_artifact) as opened:
        yield opened


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")
def test_threads_stay_within_the_cores_of_the_process(library: NativeLibrary, demo_artifact: Path) -> None:
    assert open_artifact(demo_artifact).plan.threads > 1
    allowed, started = os.sched_getaffinity(0), []
    for cores in ({min(allowed)}, allowed):
        os.sched_setaffinity(0, cores)
        try:
            before = len(list(Path("/proc/self/task").iterdir()))
            opened = library.open(demo_artifact)
            started.append(len(list(Path("/proc/self/task").iterdir())) - before)
            opened.close()
        finally:
            os.sched_setaffinity(0, allowed)
    assert started[0] == 0
    assert started[1] > 0 or len(allowed) == 1


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_texts_are_those_of_python(model: NativeModel, runtime: edgekit.Runtime, prompt: str) -> None:
    native = model.generate(tokens_of(model, prompt), max_tokens=48)
    python = runtime.generate(prompt, max_tokens=48, temperature=0)
    assert (native.text, native.tokens, native.finish_reason) == (python.text, python.tokens, python.finish_reason)
    assert native.prompt_tokens == len(tokens_of(model, prompt))
    assert native.prefill_s > 0 and native.decode_s > 0


@pytest.mark.parametrize("options", SAMPLED, ids=lambda options: " ".join(options))
def test_sampled_texts_are_those_of_python(
    model: NativeModel, runtime: edgekit.Runtime, options: dict[str, float]
) -> None:
    for seed, prompt in enumerate(PROMPTS):
        native = model.generate(tokens_of(model, prompt), max_tokens=24, seed=seed * 10**15 + 7, **options)
        python = runtime.generate(prompt, max_tokens=24, **{"seed": seed * 10**15 + 7, "temperature": 0.0, **options})
        assert (native.text, native.finish_reason) == (python.text, python.finish_reason)


def test_a_prompt_of_several_chunks_is_fed_as_python_feeds_it(
    model: NativeModel, runtime: edgekit.Runtime, demo_artifact: Path
) -> None:
    prompt = "\n".join(f"value_{number} = {number * number}" for number in range(80))
    assert open_artifact(demo_artifact).plan.chunk_tokens < len(tokens_of(model, prompt)) < 1000
    native = model.generate(tokens_of(model, prompt), max_tokens=16)
    assert native.text == runtime.generate(prompt, max_tokens=16, temperature=0).text


def test_chat_answers_are_those_of_python(model: NativeModel, runtime: edgekit.Runtime) -> None:
    messages = [{"role": "user", "content": "Write a function that adds two numbers."}]
    rendered = model.tokenizer.encode(model.template.render(messages))
    native = model.generate(rendered, max_tokens=40, begins_text=True)
    assert native.text == runtime.chat(messages, max_tokens=40, temperature=0).text


@pytest.mark.parametrize("stop", [("\n\n",), ("import pytest",), ("pandas as", "pandas"), ("nowhere", "é")])
def test_stop_strings_end_an_answer_where_python_ends_it(
    model: NativeModel, runtime: edgekit.Runtime, stop: tuple[str, ...]
) -> None:
    pieces: list[str] = []
    native = model.generate(tokens_of(model, PROMPTS[0]), max_tokens=40, stop=stop, on_text=pieces.append)
    python = runtime.generate(PROMPTS[0], max_tokens=40, temperature=0, stop=stop)
    assert (native.text, native.finish_reason) == (python.text, python.finish_reason)
    assert "".join(pieces) == native.text


def test_limits_and_ends_are_those_of_python(model: NativeModel, runtime: edgekit.Runtime) -> None:
    tokens = tokens_of(model, PROMPTS[0])
    nothing = model.generate(tokens, max_tokens=0)
    assert (nothing.text, nothing.tokens, nothing.finish_reason) == ("", (), "length")
    for ignores in (False, True):
        native = model.generate(tokens, max_tokens=60, temperature=2.0, seed=5, ignores_ends=ignores)
        python = runtime.generate(PROMPTS[0], max_tokens=60, temperature=2.0, seed=5, ignore_eos=ignores)
        assert (native.text, native.finish_reason) == (python.text, python.finish_reason)


def test_an_answer_can_be_cancelled(model: NativeModel) -> None:
    pieces: list[str] = []

    def cancel(text: str) -> None:
        pieces.append(text)
        model.cancel()

    answer = model.generate(tokens_of(model, PROMPTS[0]), max_tokens=50, on_text=cancel)
    assert answer.finish_reason == "cancelled"
    assert answer.text == "".join(pieces) and len(answer.tokens) < 10
    assert model.generate(tokens_of(model, PROMPTS[0]), max_tokens=3).finish_reason == "length"


def test_exact_texts_are_those_of_python_with_drafts_and_prefixes_in_both(
    exact_model: NativeModel, exact_runtime: edgekit.Runtime
) -> None:
    """Cached prefixes, chunks and drafts do not change a text."""
    for seed, prompt in enumerate((*PROMPTS, PROMPTS[0] + "\nimport", REPEATED)):
        tokens = tokens_of(exact_model, prompt)
        for options in ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95}):
            python = exact_runtime.generate(prompt, max_tokens=24, seed=seed, **options)
            for more in ({}, {"reuses_prefix": 1}, {"draft_tokens": 5}, {"reuses_prefix": 1, "draft_tokens": 3}):
                native = exact_model.generate(tokens, max_tokens=24, seed=seed, **options, **more)
                assert (native.text, native.tokens) == (python.text, python.tokens), (prompt, options, more)
                assert (native.cached_tokens > 0) is ("reuses_prefix" in more and len(tokens) > 1)


def test_drafts_of_a_repetitive_text_are_accepted(exact_model: NativeModel) -> None:
    answer = exact_model.generate(tokens_of(exact_model, REPEATED), max_tokens=40, draft_tokens=6)
    assert 0 < answer.accepted_tokens <= answer.drafted_tokens
    assert len(answer.tokens) == 40


def test_drafts_end_at_the_limits_of_an_answer(exact_model: NativeModel) -> None:
    """At `max_tokens`, at a stop string in the middle of accepted drafts, and at the end of the context."""
    tokens = tokens_of(exact_model, REPEATED)
    for most in (1, 2, 3, 7):
        plain = exact_model.generate(tokens, max_tokens=most)
        assert exact_model.generate(tokens, max_tokens=most, draft_tokens=6).tokens == plain.tokens
    plain = exact_model.generate(tokens, max_tokens=40, stop=["= 3"])
    assert exact_model.generate(tokens, max_tokens=40, stop=["= 3"], draft_tokens=6).text == plain.text
    long = (tokens * 200)[:1000]
    plain = exact_model.generate(long, ignores_ends=True)
    assert len(plain.tokens) == 24 and plain.finish_reason == "length"
    assert exact_model.generate(long, ignores_ends=True, draft_tokens=6).tokens == plain.tokens


@pytest.mark.parametrize(
    ("tokens", "options", "reason"),
    [
        ([], {}, "the prompt has no tokens"),
        ([-1], {}, "holds the token -1, outside the vocabulary"),
        ([5] * 1024, {}, "the prompt has 1024 tokens, the context holds 1023"),
        ([5], {"temperature": -1.0}, "temperature: -1"),
        ([5], {"top_p": 0.0}, "top_p: 0"),
        ([5], {"top_k": -1}, "top_k: -1"),
        ([5], {"seed": 2**63}, "seed: 9223372036854775808"),
        ([5], {"draft_tokens": 65}, "draft_tokens: 65"),
    ],
)
def test_options_out_of_bounds_are_refused(
    model: NativeModel, tokens: list[int], options: dict[str, float], reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason):
        model.generate(tokens, **options)


@pytest.mark.parametrize("stop", [[""], ["a"] * 17, ["x" * 5000]])
def test_stop_strings_out_of_bounds_are_refused(model: NativeModel, stop: list[str]) -> None:
    with pytest.raises(InvalidInput, match="stop"):
        model.generate([5], stop=stop)


def test_a_library_that_is_none_is_refused(library: NativeLibrary, demo_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.so").write_bytes(b"")
    for path in (tmp_path / "absent.so", tmp_path / "empty.so"):
        with pytest.raises(InvalidInput, match="cannot be loaded"):
            library.open(demo_artifact, runtime=path)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def renamed(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda value: value["files"].update({name: value["files"].pop("head.onnx")})


def chunked(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], None]:
    """Change the chunks of the weights in the manifest."""
    return lambda folder: change_manifest(
        folder / "manifest.json", lambda value: change(value["files"]["weights.bin"]["chunks"])
    )


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a changed weight": lambda folder: flip(folder / "weights.bin", 1000),
    "a changed graph": lambda folder: flip(folder / "head.onnx", 100),
    "a changed manifest": lambda folder: flip(folder / "manifest.json", 300),
    "a changed seal": lambda folder: flip(folder / "manifest.json", -10),
    "a file too short": lambda folder: os.truncate(folder / "weights.bin", 1000),
    "a missing file": lambda folder: (folder / "head.onnx").unlink(),
    "a further file": lambda folder: (folder / "more.txt").write_text(""),
    "a hard link": lambda folder: os.link(folder / "head.onnx", folder.parent / "again"),
    "a link": lambda folder: (folder / "head.onnx").symlink_to((folder / "head.onnx").rename(folder.parent / "h")),
    "a pipe": lambda folder: os.mkfifo(folder / "pipe"),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "a manifest of the future": lambda folder: change_manifest(
        folder / "manifest.json", lambda value: value.update(version=99)
    ),
    "no version": lambda folder: change_manifest(folder / "manifest.json", lambda value: value.pop("version")),
    "a name outside": lambda folder: change_manifest(folder / "manifest.json", renamed("../head.onnx")),
    "an absolute name": lambda folder: change_manifest(folder / "manifest.json", renamed("/etc/passwd")),
    "a name with a hidden word": lambda folder: change_manifest(folder / "manifest.json", renamed("a/.b")),
    "chunks that leave a gap": chunked(lambda chunks: chunks.pop(1)),
    "chunks of other sizes": chunked(lambda chunks: chunks[0].update(bytes=chunks[0]["bytes"] + 1)),
    "an empty chunk": chunked(lambda chunks: chunks.append({"bytes": 0, "sha256": "0" * 64})),
    "chunks that are null": lambda folder: change_manifest(
        folder / "manifest.json", lambda value: value["files"]["weights.bin"].update(chunks=None)
    ),
    "a chunk without a hash": chunked(lambda chunks: chunks[0].pop("sha256")),
    "a chunk with an unknown member": chunked(lambda chunks: chunks[0].update(url="x")),
    "a file with an unknown member": lambda folder: change_manifest(
        folder / "manifest.json", lambda value: value["files"]["head.onnx"].update(url="x")
    ),
    "an unknown member": lambda folder: change_manifest(folder / "manifest.json", lambda value: value.update(more=1)),
    "the manifest itself": lambda folder: change_manifest(folder / "manifest.json", renamed("manifest.json")),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_artifact_is_refused_as_python_refuses_it(
    library: NativeLibrary, demo_artifact: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(demo_artifact, folder)
    library.open(folder).close()
    DAMAGE[name](folder)
    for opened in (open_artifact, library.open, library.verify):
        with pytest.raises(EdgekitError) as caught:
            opened(folder)
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith(str(folder))


# The shapes that a graph states are compared by onnxruntime, with tensors that the library makes from the plan.
@pytest.mark.parametrize("attack", [each for each in ATTACKS if each != "keys of another shape"])
def test_a_bad_graph_is_refused(library: NativeLibrary, demo_artifact: Path, tmp_path: Path, attack: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(demo_artifact, folder)
    path = next(folder.glob("body-*.onnx"))
    rewrite(folder, ATTACKS[attack], path.name)
    fact = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    change_manifest(folder / "manifest.json", lambda value: value["files"].update({path.name: fact}))
    with pytest.raises(InvalidInput, match=r"by this exporter|link|in the manifest|regular files") as caught:
        library.open(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_an_artifact_of_any_target_is_verified(library: NativeLibrary, tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "artifact")
    library.verify(folder)
    with pytest.raises(InvalidInput, match="the artifact is for 'fake'"):
        library.open(folder)
    flip(folder / "fake.json", 1)
    with pytest.raises(InvalidInput, match=r"fake\.json: its bytes are not those that were sealed"):
        library.verify(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda plan: plan.update(target="executorch"), "for 'executorch'; export it for onnx"),
        (lambda plan: plan.update(backend="cuda"), "on 'cuda'"),
        (lambda plan: plan["storage"].update(kv_bits=4), "a cache of 4 bits"),
        (lambda plan: plan["model"].update(encoder={}), "is an encoder"),
        (lambda plan: plan["model"].update(experts={}), "is a mixture of experts"),
        (lambda plan: plan["model"]["layers"][0].update(stores_kv=False), "layers without keys and values"),
        (lambda plan: plan["model"]["layers"][0].update(head_dim=1 << 40), "head_dim is 1099511627776"),
        (lambda plan: plan["storage"].update(capacity_tokens=-1), "capacity_tokens is -1"),
        (lambda plan: plan.pop("threads"), "threads: is missing"),
        (lambda plan: plan["model"].update(vocab_size=5), "onnxruntime"),
    ],
)
def test_a_plan_that_is_not_supported_is_refused_by_name(
    library: NativeLibrary, demo_artifact: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    folder = with_plan(demo_artifact, tmp_path / "copy", change)
    with pytest.raises(InvalidInput, match=reason) as caught:
        library.open(folder).generate([1, 2, 3])
    assert "\n" not in str(caught.value)


def test_memory_is_counted_by_class(library: NativeLibrary, demo_artifact: Path) -> None:
    plan = open_artifact(demo_artifact).plan
    model = library.open(demo_artifact)
    a_token = sum(2 * each.kv_heads * each.head_dim for each in plan.model.layers) * plan.storage.kv_bits // 8
    opened = model.memory()
    assert (opened.cache, opened.cache_used) == (plan.storage.capacity_tokens * a_token, 0)
    assert (opened.weights or 0) <= sum(path.stat().st_size for path in demo_artifact.iterdir())
    assert opened.engine is not None and opened.process_private and opened.process_private > opened.engine
    code = "from edgekit.apps.native.library import NativeLibrary as L; print(L(%r).open(%r).memory().engine)"
    code %= str(library.path), str(demo_artifact)
    alone = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert int(alone.stdout) > 0  # here, an opening may take what others freed before
    prompt = tokens_of(model, REPEATED)
    answer = model.generate(prompt, max_tokens=20, ignores_ends=1)
    after = model.memory()
    assert after.cache_used == (len(prompt) + len(answer.tokens) - 1) * a_token
    assert after.activations and after.process_private and after.process_peak
    if "NATIVE_SANITIZE" not in os.environ:  # which keeps memory of its own
        grown = after.process_private - opened.process_private
        assert abs(grown - after.activations - after.cache_used) < 1 << 20
        here = footprint()
        assert here.private_bytes and abs(here.private_bytes - after.process_private) < 4 << 20
        assert here.peak_rss_bytes and abs(here.peak_rss_bytes - after.process_peak) < 4 << 20
    model.generate(prompt[:3], max_tokens=1)
    assert model.memory().cache_used == 3 * a_token  # pages of the longer text stay, and are no activations
    assert (model.memory().activations or 0) <= after.activations + (1 << 20)
    model.close()
    with pytest.raises(InvalidInput, match="model is null"):
        model.memory()


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_packed_weights_are_mapped_and_change_no_text(
    library: NativeLibrary, of_bits: dict[int, Path], tmp_path: Path, bits: int
) -> None:
    packed = tmp_path / "packed"
    (tmp_path / "packed.part").mkdir()
    (tmp_path / "packed.part" / "head.onnx").write_bytes(b"of a process that was killed")
    # In another process: this one would keep what packing frees, and later tests count memory.
    command = ["-m", "edgekit.apps.native.loop", library.path, of_bits[bits], packed]
    subprocess.run([sys.executable, *map(str, command)], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]
    stamps = {path.name: path.stat().st_mtime_ns for path in packed.iterdir()}
    library.pack(of_bits[bits], packed)
    assert stamps == {path.name: path.stat().st_mtime_ns for path in packed.iterdir()}
    plain, mapped = library.open(of_bits[bits]), library.open(of_bits[bits], packed=packed)
    for prompt in PROMPTS:
        texts = [each.generate(tokens_of(each, prompt), max_tokens=24).text for each in (plain, mapped)]
        assert texts[0] == texts[1]
    memory = mapped.memory()
    assert memory.weights is not None and memory.weights > (plain.memory().weights or 0)
    plain.close(), mapped.close()
    os.truncate(packed / "head.bin", (packed / "head.bin").stat().st_size - 1)
    with pytest.raises(InvalidInput, match="has no packed weights of this artifact for this processor"):
        library.open(of_bits[bits], packed=packed)


def test_weights_are_packed_only_where_nothing_else_lies(
    library: NativeLibrary, demo_artifact: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("keep this")
    with pytest.raises(InvalidInput, match=r"holds 'mine.txt', which is no packed weight; name a folder"):
        library.pack(demo_artifact, tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "keep this"
    with pytest.raises(InvalidInput, match="cannot be"):
        library.pack(demo_artifact, tmp_path / "mine.txt")
    places = [str(each).encode() for each in (demo_artifact, onnxruntime_library(), f"{tmp_path}/p/")]
    assert library.functions.edgekit_pack(*places) == 0
    library.open(demo_artifact, packed=tmp_path / "p").close()
    with pytest.raises(InvalidInput, match="has no packed weights"):
        library.open(demo_artifact, packed=tmp_path)


_HASH = """
#include <cstring>
#include "sha256.h"
extern "C" void hash(const char* data, size_t size, int may_be_fast, char* out) {
  edgekit::Sha256 made(may_be_fast != 0);
  made.update(data, size / 3);
  made.update(data + size / 3, size - size / 3);
  std::strcpy(out, made.hex().c_str());
}
"""


def test_hashes_are_those_of_python_by_plain_instructions_and_by_the_processors_own(tmp_path: Path) -> None:
    (tmp_path / "hash.cpp").write_text(_HASH)
    sources = [tmp_path / "hash.cpp", SOURCES / "src/sha256.cpp"]
    run(os.environ.get("CXX", "c++"), "-std=c++17", "-shared", "-fPIC", f"-I{SOURCES / 'src'}", *sources,
        "-o", tmp_path / "hash.so")  # fmt: skip
    hash_of, out = ctypes.CDLL(str(tmp_path / "hash.so")).hash, ctypes.create_string_buffer(65)
    hash_of.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p]
    for size in (0, 1, 55, 56, 63, 64, 65, 119, 128, 192, 1000, 100_000):
        data = random.Random(size).randbytes(size)
        for may_be_fast in (0, 1):
            hash_of(data, size, may_be_fast, out)
            assert out.value.decode() == hashlib.sha256(data).hexdigest(), size
