"""Windows with sinks: tokens are evicted where Python evicts them, with the same keys and texts afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from native_answers import PROMPTS, compare, tokens_of, with_plan, with_window
from runtimes import refusal

import edgekit
from edgekit.apps.native.library import NativeLibrary
from edgekit.errors import InvalidInput

pytestmark = [pytest.mark.onnx, pytest.mark.quantize, pytest.mark.slow]
WINDOW = {"window": 64, "sinks": 4, "block": 9}
LONG = pytest.mark.long


@pytest.fixture(scope="module")
def artifact(demo_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_window(demo_artifact, tmp_path_factory.mktemp("windows") / "windowed.edgekit", **WINDOW)


@pytest.mark.parametrize("bits", [pytest.param(32, marks=LONG), pytest.param(16, marks=LONG), 8])
def test_texts_are_those_of_python_through_many_evictions(
    library: NativeLibrary, of_bits: dict[int, Path], tmp_path: Path, bits: int
) -> None:
    place = with_window(of_bits[bits], tmp_path / "windowed", **WINDOW)
    model = library.open(place)
    with edgekit.open(place, draft="off", prefixes=0) as runtime:
        compare(model, runtime, 90)
        assert runtime.metrics().evictions > 30
    model.close()


@pytest.mark.parametrize(
    ("bits", "is_windowed"), [(32, True), *(pytest.param(8, is_windowed, marks=LONG) for is_windowed in (True, False))]
)
def test_exact_texts_do_not_depend_on_drafts_or_prefixes(
    library: NativeLibrary, of_bits: dict[int, Path], open_exact: Callable[[Path], edgekit.Runtime], tmp_path: Path,
    bits: int, is_windowed: bool,
) -> None:  # fmt: skip
    place = with_window(of_bits[bits], tmp_path / "windowed", **WINDOW) if is_windowed else of_bits[bits]
    model, accepted, cached = library.open(place, exact=True), 0, 0
    with open_exact(place) as runtime:
        for more in ({}, {"draft_tokens": 6}, {"reuses_prefix": 1}, {"draft_tokens": 3, "reuses_prefix": 1}):
            found = compare(model, runtime, 40, **more)
            accepted, cached = accepted + found[0], cached + found[1]
    model.close()
    assert accepted > 20 and cached > 100


def test_an_answer_without_a_limit_is_as_long_as_in_python(library: NativeLibrary, artifact: Path) -> None:
    model = library.open(artifact)
    native = model.generate(tokens_of(model, PROMPTS[0]), ignores_ends=True)
    model.close()
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
        native = model.generate(tokens_of(model, PROMPTS[3]), max_tokens=100, ignores_ends=True)
        assert native.text == runtime.generate(PROMPTS[3], max_tokens=100, ignore_eos=True, temperature=0).text
    model.close()
