"""Windows with sinks: tokens are evicted where Python evicts them, with the same keys and texts afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from manifests import change_manifest
from native_answers import tokens_of
from runtimes import refusal

import edgekit
from edgekit.apps.native.library import NativeLibrary, NativeModel
from edgekit.errors import InvalidInput

pytestmark = [pytest.mark.onnx, pytest.mark.quantize, pytest.mark.slow]
WINDOW = {"window": 64, "sinks": 4, "block": 9}
REPEATED = "".join(f"self.value_{number} = {number % 3}\n" for number in (1, 2, 3, 1, 2, 3, 1, 2))
PROMPTS = ("import numpy as np", "\n".join(f"value_{number} = {number * number}" for number in range(40)), REPEATED)


def with_plan(artifact: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the artifact with a changed plan."""
    shutil.copytree(artifact, folder)
    change_manifest(folder / "manifest.json", lambda manifest: change(manifest["plan"]))
    return folder


@pytest.fixture(scope="module")
def artifact(demo_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def change(plan: dict[str, Any]) -> None:
        plan["cache"] = WINDOW
        plan["storage"]["capacity_tokens"] = WINDOW["window"]

    return with_plan(demo_artifact, tmp_path_factory.mktemp("windows") / "windowed.edgekit", change)


@pytest.fixture(scope="module")
def windowed(library: NativeLibrary, artifact: Path) -> Iterator[NativeModel]:
    opened = library.open(artifact)
    yield opened
    opened.close()


def test_texts_are_those_of_python_through_many_evictions(windowed: NativeModel, artifact: Path) -> None:
    with edgekit.open(artifact, draft="off", prefixes=0) as runtime:
        for seed, prompt in enumerate(PROMPTS):
            tokens = tokens_of(windowed, prompt)
            for options in ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95}, {"stop": ["= 9", "def"]}):
                asked = {"temperature": 0.0, **options, "max_tokens": 90, "seed": seed}
                native = windowed.generate(tokens, ignores_ends=True, **asked)
                python = runtime.generate(prompt, ignore_eos=True, **asked)
                assert (native.text, native.tokens) == (python.text, python.tokens), (prompt, options)
                assert native.finish_reason == python.finish_reason
        assert runtime.metrics().evictions > 30


def test_exact_texts_do_not_depend_on_drafts_or_prefixes(
    library: NativeLibrary, artifact: Path, open_exact: Callable[[Path], edgekit.Runtime]
) -> None:
    runtime = open_exact(artifact)
    model = library.open(artifact, exact=True)
    accepted = cached = 0
    with runtime:
        for seed, prompt in enumerate((*PROMPTS, PROMPTS[0] + "\nimport", REPEATED[:200])):
            tokens = tokens_of(model, prompt)
            for options in ({"temperature": 0.0}, {"temperature": 0.7, "top_k": 20}):
                asked = {**options, "max_tokens": 40, "seed": seed}
                python = runtime.generate(prompt, ignore_eos=True, **asked)
                for more in ({}, {"draft_tokens": 6}, {"reuses_prefix": 1}, {"draft_tokens": 3, "reuses_prefix": 1}):
                    model.generate(tokens[:40], max_tokens=3)  # nothing is evicted, so a prefix can be reused
                    native = model.generate(tokens, ignores_ends=True, **asked, **more)
                    assert (native.text, native.tokens) == (python.text, python.tokens), (prompt, options, more)
                    accepted, cached = accepted + native.accepted_tokens, cached + native.cached_tokens
    model.close()
    assert accepted > 20 and cached > 100


def test_an_answer_without_a_limit_is_as_long_as_in_python(windowed: NativeModel, artifact: Path) -> None:
    native = windowed.generate(tokens_of(windowed, PROMPTS[0]), ignores_ends=True)
    with edgekit.open(artifact, draft="off", prefixes=0) as runtime:
        assert native.tokens == runtime.generate(PROMPTS[0], ignore_eos=True, temperature=0).tokens
    assert len(native.tokens) == WINDOW["window"] and native.finish_reason == "length"


def rope(**fields: object) -> Callable[[dict[str, Any]], None]:
    return lambda plan: plan["model"]["ropes"]["default"].update(fields)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (rope(kind="yarn"), "a window over the rope 'yarn' is not supported; export it without --window"),
        (rope(dim=128), "dim of a rope is 128"),
        (rope(dim=3), "dim of a rope is 3"),
        (rope(theta=-1), "theta of a rope"),
        (lambda plan: plan["cache"].update(block=64), "no room for its sinks and a block"),
        (lambda plan: plan["cache"].update(window=100_000), "window is 100000"),
        (lambda plan: plan["cache"].update(sinks=-1), "sinks is -1"),
        (lambda plan: plan["cache"].update(keep="valuediff"), "keeps tokens by 'valuediff' is not supported"),
        (lambda plan: plan["cache"].update(block=0), "block is 0"),
    ],
)
def test_windows_that_cannot_be_kept_are_refused(
    library: NativeLibrary, artifact: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason):
        library.open(with_plan(artifact, tmp_path / "changed", change))


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "linear", "factor": 4.0},
        {"kind": "proportional", "proportion": 0.5, "factor": 2.0},
        {"interleaved": True},
        {"dim": 32},
        {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 256},
    ],
    ids=str,
)
def test_keys_are_rotated_back_by_the_frequencies_of_each_rope(
    library: NativeLibrary, artifact: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Only the rotation after an eviction reads the plan's rope; the graph has its own tables."""
    changed = with_plan(artifact, tmp_path / "changed", rope(**fields))
    model, kept = library.open(changed), []
    assert refusal(lambda: kept.append(edgekit.open(changed, draft="off", prefixes=0))) is None
    with kept[0] as runtime:
        native = model.generate(tokens_of(model, PROMPTS[1]), max_tokens=100, ignores_ends=True)
        assert native.text == runtime.generate(PROMPTS[1], max_tokens=100, ignore_eos=True, temperature=0).text
    model.close()
