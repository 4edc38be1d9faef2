"""The conformance suites on the llamacpp target: bitwise in exact mode, for every family and width of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import family_models as models
import llamacpp_models
from adapted import adapted_reference, difference
from edgekit_llamacpp import LlamaCppTarget, library
from edgekit_llamacpp.engine import LlamaCppEngine

from edgekit.contracts.feeding import feed
from edgekit.device.load import load_profile
from edgekit.errors import Unsupported
from edgekit.model.lora import read_adapter
from edgekit.testing import check_engine, check_export, check_target, write_adapter
from edgekit.testing.check_engine import check_threads_change_between_calls
from edgekit.testing.judging import Judge

pytestmark = [pytest.mark.llamacpp, pytest.mark.quantize]
runs = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))

USUAL = ("llama", "llama with yarn", "gemma3")
OTHERS = tuple(family for family in llamacpp_models.FAMILIES if family not in USUAL)


def opened(family: str, recipe: str = "s4-g32", bits: int = 16, *, exact: bool = False, **plan: Any) -> Any:
    """An engine whose cache has this width alone."""
    made = llamacpp_models.made(family, recipe, kv_bits=bits, **plan)
    engine = LlamaCppEngine(made.plan, made.files, exact=exact)
    engine.capabilities = engine.capabilities.model_copy(update={"kv_bits": (bits,)})
    return engine


@runs
@pytest.mark.parametrize("family", USUAL)
def test_exact_engine_passes_conformance_suite_bitwise(family: str) -> None:
    check_engine(lambda: opened(family, exact=True), exact=True, tolerance=0.06, sequences=20)


@runs
@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_pass_conformance_suite_bitwise(family: str) -> None:
    check_engine(lambda: opened(family, exact=True), exact=True, tolerance=0.06, sequences=60)


@runs
@pytest.mark.parametrize(("recipe", "bits"), [("s8", 32), ("float16", 16), ("float32", 16), ("s4-g128", 32)])
def test_exact_mode_holds_for_every_format(recipe: str, bits: int) -> None:
    family = llamacpp_models.WIDE_HEADS if recipe == "s4-g128" else "llama"
    check_engine(lambda: opened(family, recipe, bits, exact=True), exact=True, tolerance=0.06, sequences=20)


@runs
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_fast_mode_passes_conformance_suite(bits: int) -> None:
    tolerance = {8: 0.1, 4: 0.3}.get(bits, 0.08)
    check_engine(lambda: opened(llamacpp_models.WIDE_HEADS, bits=bits), exact=False, tolerance=tolerance, sequences=20)


@runs
def test_fewer_threads_give_the_same_logits() -> None:
    check_threads_change_between_calls(opened("llama", threads=2), Judge(False, 0.08, False, 0, False))


@runs
def test_export_passes_target_suite() -> None:
    made = llamacpp_models.made(llamacpp_models.ONE_LAYER)
    check_export(LlamaCppTarget(), made.plan, made.weights, exact=True, tolerance=0.06, sequences=5)


def test_offers_pass_target_suite() -> None:
    devices = [load_profile(name) for name in ("laptop-x86-8gb", "macbook-m4-16gb", "raspberry-pi-5-8gb", "pixel-9")]
    for family in ("llama", "gemma3"):
        check_target(LlamaCppTarget(), devices, models.spec_of(llamacpp_models.folder_of(family)))


@runs
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_logits_equal_reference(family: str) -> None:
    tokens = list(models.tokens_of(60))
    for recipe, bound in (("float32", 0.01), ("s4-g32", 0.08)):
        made = llamacpp_models.made(family, recipe, kv_bits=32)
        engine = LlamaCppEngine(made.plan, made.files)
        found = feed(engine, engine.start(made.plan.storage), tokens, len(tokens), chunk_tokens=7)
        engine.close()
        expected = models.logits_of(llamacpp_models.reference(family, recipe), tokens)
        assert difference(found, expected) < bound, recipe


@runs
def test_exact_mode_refuses_narrow_cache() -> None:
    made = llamacpp_models.made(llamacpp_models.WIDE_HEADS, kv_bits=8)
    with pytest.raises(Unsupported, match="kv_bits 16"):
        LlamaCppEngine(made.plan, made.files, exact=True)


def adapted(family: str) -> Any:
    """A model with room for adapters of rank 8."""
    made = llamacpp_models.made(family, "float32", kv_bits=32)
    return made._replace(plan=made.plan.model_copy(update={"adapter_rank": 8}))


@runs
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_adapters_pass_conformance_suite(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    made = adapted(family)
    folders = [write_adapter(tmp_path / name, made.plan.model, seed=seed) for seed, name in ((1, "one"), (2, "two"))]
    check_engine(
        lambda: LlamaCppEngine(made.plan, made.files, exact=True), exact=True, tolerance=0.06, sequences=3,
        adapters=(folders[0], folders[1]),
    )  # fmt: skip


@runs
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_adapter_equals_merged_weights(family: str, tmp_path: Path) -> None:
    made, tokens = adapted(family), list(models.tokens_of(24))
    folder = write_adapter(tmp_path / "adapter", made.plan.model, seed=1)
    engine = LlamaCppEngine(made.plan, made.files)
    assert engine.load_adapter("one", folder) > 0
    plain = feed(engine, engine.start(made.plan.storage), tokens, 24)
    state = engine.start(made.plan.storage.model_copy(update={"adapter": "one"}))
    found = feed(engine, state, tokens, 24)
    again = feed(engine, engine.start(made.plan.storage), tokens, 24)
    engine.close()
    reference = llamacpp_models.reference(family, "float32")
    merged = adapted_reference(reference, read_adapter(folder, made.plan.model))
    assert difference(found, models.logits_of(merged, tokens)) < 0.01
    assert difference(found, plain) > 0.05
    assert np.array_equal(plain, again)
